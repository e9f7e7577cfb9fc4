import math

import pytest
import torch
from torch import nn

from safetrain.tensors.update_size import UpdateSize


def norm_of(tensors):
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def test_it_is_that_of_the_update():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Linear(40, 7))
    size = UpdateSize(model)
    assert size.measure(0) is None
    before = [weight.detach().clone() for weight in model.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(0.01 * torch.randn_like(weight))
    moved = norm_of(a.detach() - b for a, b in zip(model.parameters(), before, strict=True))
    measured = float(size.measure(1))
    assert measured == pytest.approx(moved / norm_of(before), rel=0.1)
    assert float(size.measure(1)) == measured  # the same step once more
    assert float(size.measure(2)) == 0.0


def test_weights_that_moved_to_other_memory_are_found_again():
    model = nn.Linear(4, 4)
    size = UpdateSize(model)
    size.measure(0)
    model.weight.data = model.weight.detach() * 2
    assert float(size.measure(1)) > 0.1
