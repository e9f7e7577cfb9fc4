"""The arithmetic of forward and backward: autocast, loss scaling, fp32 islands, compiled models."""
