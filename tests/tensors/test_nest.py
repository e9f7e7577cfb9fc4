"""Batches of every nesting are moved and copied as they are."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import InitVar, dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from safetrain.tensors.nest import copied, leaves, map_tensors, same_nest


@dataclass
class Doubled:
    x: torch.Tensor
    scale: InitVar[float] = 1.0
    total: torch.Tensor = field(init=False)

    def __post_init__(self, scale):
        self.x = self.x * 2 * scale
        self.total = self.x.sum()


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"


Message = namedtuple("Message", "to x")


def test_a_dataclass_is_not_made_anew():
    batch = Doubled(torch.ones(2), 3.0)
    moved = map_tensors(batch, lambda t: t + 1)
    assert moved.x.tolist() == [7.0, 7.0]
    assert moved.total == 13.0
    assert batch.x.tolist() == [6.0, 6.0]
    frozen = map_tensors(Frozen(torch.ones(1), "b"), lambda t: t + 1)
    assert (frozen.x.tolist(), frozen.name) == ([2.0], "b")


def test_dictionaries_keep_their_type_and_what_belongs_to_it():
    batch = defaultdict(list, x=torch.ones(1))
    moved = map_tensors(batch, lambda t: t + 1)
    assert moved["x"] == 2.0
    assert moved["other"] == []
    assert "other" not in batch
    assert isinstance(map_tensors(OrderedDict(x=torch.ones(1)), lambda t: t), OrderedDict)


def test_a_field_called_to_is_a_field():
    batch = Message(torch.zeros(1), torch.ones(1))
    assert len(list(leaves(batch))) == 2
    assert map_tensors(batch, lambda t: t + 1).to == 1.0
    assert isinstance(map_tensors(pack_sequence([torch.ones(2)]), lambda item: item), PackedSequence)


@pytest.mark.parametrize("make", [lambda x: (x,), lambda x: [x], lambda x: {"x": x}, Frozen])
def test_copies_share_nothing_and_new_nests_share_tensors(make):
    x = torch.ones(2)
    batch = make(x)
    (copy,) = leaves(copied(batch))
    (same,) = leaves(same_nest(batch))
    assert copy.data_ptr() != x.data_ptr()
    assert same is x
    assert type(same_nest(batch)) is type(batch)
