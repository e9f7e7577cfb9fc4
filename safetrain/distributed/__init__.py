"""Several processes: the machine, the only way across ranks, the watchdog, DDP replicas, the launcher."""
