"""Earlier names of what is in saved.py, until the transaction uses the new ones."""

from __future__ import annotations

from .saved import SavedTensors, layout_of


class Copies(SavedTensors):
    take = SavedTensors.capture
    put_back = SavedTensors.restore


__all__ = ["Copies", "layout_of"]
