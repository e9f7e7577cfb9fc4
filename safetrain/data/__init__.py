"""Training data as windows of micro-batches, with a cursor from which a resume continues."""
