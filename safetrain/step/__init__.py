"""One optimizer step as a transaction, for one process and many. It knows no run, no files and no trainer."""
