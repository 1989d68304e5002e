"""What code written for detectron2 needs and nothing else does."""
