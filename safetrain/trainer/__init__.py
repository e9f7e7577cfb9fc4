"""The trainer: the loop, the record of a run, evaluation."""

from .trainer import SafeTrainer

__all__ = ["SafeTrainer"]
