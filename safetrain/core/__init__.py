"""What every other package speaks: verdict, view, incident, result, options. No torch.distributed, no run, no trainer."""
