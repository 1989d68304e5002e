"""What happens after a run: export to one file, inspection, prediction."""
