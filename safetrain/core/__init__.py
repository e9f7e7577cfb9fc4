"""The types that every other package uses: verdict, view, incident, result, options. No torch.distributed, no run, no
trainer."""
