"""Batches of every nesting are moved and copied as they are."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import InitVar, dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from safetrain.tensors.nest import copied, in_code, leaves, map_tensors, named_tensors, num_samples, same_nest


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


class Movable:
    def __init__(self, x):
        self.x, self.parts, self.owner = x, {"y": x}, [self]

    def to(self, device):
        return self


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


def test_tensors_are_named_by_their_path():
    x = torch.ones(1)
    nest = {"inputs": [x, {"mask": x}], "meta": "x", "sample": Frozen(x), "pair": Message(x, None)}
    assert [path for path, _ in named_tensors(nest)] == ["inputs.0", "inputs.1.mask", "sample.x", "pair.0"]
    spelled = [path for path, _ in named_tensors(nest, lambda path: in_code(path, "batch"))]
    assert spelled == ["batch['inputs'][0]", "batch['inputs'][1]['mask']", "batch['sample'].x", "batch['pair'].to"]
    assert [path for path, _ in named_tensors(x)] == [""]


def test_tensors_of_objects_are_found_and_an_object_that_holds_itself_is_entered_once():
    x = torch.ones(3)
    assert [path for path, _ in named_tensors((x, Movable(x)))] == ["0", "1.x", "1.parts.y"]
    assert [path for path, _ in named_tensors(pack_sequence([x]))] == ["data", "batch_sizes"]


def test_the_steps_of_a_packed_sequence_are_not_samples():
    assert num_samples((pack_sequence([torch.ones(5), torch.ones(2)]), torch.ones(2))) == 2
    assert num_samples({"id": 3, "x": torch.ones(4, 2)}) == 4
