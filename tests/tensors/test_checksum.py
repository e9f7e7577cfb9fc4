"""Checksums of tensors: equal bits, equal numbers; whatever changes, another one."""

import pytest
import torch

from safetrain.tensors.checksum import checksums

TENSORS = {
    "float32": torch.randn(40, 31),
    "bf16": torch.randn(300).bfloat16(),
    "int64": torch.arange(100),
    "int8": torch.arange(100, dtype=torch.int8),
    "bool": torch.arange(70) % 3 == 0,
    "complex": torch.randn(9, 5, dtype=torch.complex64),
    "scalar": torch.tensor(2.5),
    "not contiguous": torch.randn(30, 20).t(),
    "float64": torch.randn(64, dtype=torch.float64),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_equal_bits_and_one_other_value(tensor):
    before = checksums([tensor])
    assert checksums([tensor.clone()]) == before
    other = tensor.clone()
    last = (-1,) * tensor.dim()
    other[last] = ~other[last] if other.dtype is torch.bool else other[last] + 1
    assert checksums([other]) != before


@pytest.mark.parametrize("order", ["flipped", "rows", "columns", "two values"])
def test_values_that_changed_places(order):
    tensor = torch.randn(48, 64)
    changed = tensor.clone()
    if order == "flipped":
        changed = tensor.flip(0)
    elif order == "rows":
        changed[[3, 17]] = tensor[[17, 3]]
    elif order == "columns":
        changed[:, [3, 17]] = tensor[:, [17, 3]]
    else:
        changed[0, 0], changed[0, 1] = tensor[0, 1], tensor[0, 0]
    assert checksums([tensor]) != checksums([changed])


def test_negative_zero_and_nan_count_bit_for_bit():
    assert checksums([torch.zeros(4)]) != checksums([-torch.zeros(4)])
    assert checksums([torch.full((4,), float("nan"))]) == checksums([torch.full((4,), float("nan"))])
    assert checksums([torch.empty(0), torch.ones(2)])[0] == 0
