"""After training: export to one file, inspection, prediction."""
