"""Before a run: command line, checks, seeding, OUTPUT_DIR, logger, exit codes."""
