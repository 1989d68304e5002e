"""What is done with a trained model: export to one file, inspection, prediction."""
