"""What happens before a run: command line, checks, seeding, run folder, logger."""
