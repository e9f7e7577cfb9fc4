"""Optimizers, the learning-rate schedule, and the average of the weights."""
