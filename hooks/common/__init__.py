"""Small helpers that several rooms share: models, optimizers, batches, sharded tensors, random numbers."""
