"""Several processes: talking to each other, agreeing, and noticing that one hangs."""
