"""One optimizer step as a transaction, for one process and for several."""
