"""Training data: windows of micro-batches, and the position that a resume goes on from."""
