"""The benchmark of scripts/bench."""
