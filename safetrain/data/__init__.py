"""Training data as windows of micro-batches with a cursor that a resume goes on from."""
