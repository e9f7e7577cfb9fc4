"""Nested containers, gradients, saved values, random state, and tensors that are sharded over processes."""
