"""Where metrics live during a run: the EventStorage and its histories."""
