"""Batches of any nesting, gradients, random state, sharded tensors."""
