"""What the device is told to do, and whether it still works."""

from dataclasses import dataclass

import torch

NAME = "testdev"


@dataclass
class Knobs:
    late_copies: bool = False
    """Non-blocking copies to the host arrive when somebody waits for them, those to the device when it first needs them."""
    memory_limit: int | None = None
    """In bytes, for each device."""
    poisons: bool = False
    """An index out of range is no exception: the device fails at the next wait, and at everything after that."""
    noise: bool = False
    """Sums and products differ in the last bit from one run to the next, as atomic additions do."""
    pins: bool = True
    """Host memory can be pinned."""
    has_float64: bool = True
    is_poisoned: bool = False
    has_raised: bool = False

    def reset(self):
        self.__init__()

    def check_alive(self, is_wait=False):
        if self.has_raised or (is_wait and self.is_poisoned):
            self.has_raised = True
            raise getattr(torch, "AcceleratorError", RuntimeError)(f"{NAME} error: device-side assert triggered")


KNOBS = Knobs()
