"""Helpers for models and batches that several rooms share."""
