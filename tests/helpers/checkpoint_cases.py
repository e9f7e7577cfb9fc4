"""Training data of several kinds."""

import torch
from torch.utils.data import Dataset, TensorDataset


class Gone(BaseException):
    """Ends a run like a crash: nothing in the trainer handles this."""


class Counting(Dataset):
    """Fixed samples; counts how many were asked for in this process."""

    def __init__(self, length=36, bad=()):
        generator = torch.Generator().manual_seed(8)
        self.inputs = torch.randn(length, 6, generator=generator)
        self.targets = torch.randn(length, 1, generator=generator)
        self.inputs[list(bad)] = float("nan")
        self.asked = []

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.inputs[index], self.targets[index]


def make_samples(length=36):
    data = Counting(length)
    return TensorDataset(data.inputs, data.targets)


class Iterable:
    """Batches in a fixed order, from the beginning only."""

    def __iter__(self):
        data = Counting()
        for start in range(0, 36, 4):
            yield data.inputs[start : start + 4], data.targets[start : start + 4]


class OwnState:
    """Batches of a loader that knows where it is."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        data = Counting()
        while self.position < 9:
            start = 4 * self.position
            self.position += 1
            yield data.inputs[start : start + 4], data.targets[start : start + 4]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]
