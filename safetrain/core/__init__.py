"""The words that all other packages use, without torch.distributed, a run or a trainer."""
