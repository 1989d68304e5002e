"""What a resumed run takes from its config and what from the checkpoint."""
