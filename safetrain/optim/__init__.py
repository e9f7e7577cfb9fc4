"""Optimizers built from a name, several as one, the schedule, the moving average."""
