"""Several processes: device and process group, communication between ranks, the watchdog, DDP replicas, the
launcher."""
