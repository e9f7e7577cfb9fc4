"""A batch as a row of samples, whatever its nesting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forensic_cases import Tiny, incident_of
from torch import Tensor, nn

from safetrain.forensics.samples_of import batch_size, samples_of_rows, select
from safetrain.tensors.nest import num_samples

RAGGED = [torch.zeros(length, 3) for length in (4, 3, 7)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((torch.zeros(8, 3), torch.zeros(8)), 8),
        ([torch.zeros(8, 3), torch.zeros(2, 5)], 8),  # fields, as a loader gives them
        ({"sequences": RAGGED, "y": torch.zeros(3)}, 3),
        ((RAGGED, torch.zeros(3)), 3),
        ({"levels": [torch.zeros(8, 4), torch.zeros(8, 2)], "y": torch.zeros(8)}, 8),
        ({"sequences": RAGGED, "y": torch.zeros(9)}, 4),  # nothing else has as many
        (torch.tensor(1.0), 1),
    ],
)
def test_batch_size(batch: Any, size: int) -> None:
    assert batch_size(batch) == size


def test_samples_of_a_ragged_list_are_its_entries() -> None:
    kept = select({"sequences": RAGGED, "y": torch.arange(3)}, [0, 2], 3)
    assert [len(item) for item in kept["sequences"]] == [4, 7]
    assert kept["y"].tolist() == [0, 2]


def test_the_guilty_entry_of_a_ragged_list_is_found() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        means = torch.stack([model(sequence).mean() for sequence in batch["sequences"]])
        return (means - batch["y"]).square().mean()

    sequences = [torch.randn(length, 2) for length in (3, 5, 4, 2, 6)]
    sequences[3][1, 0] = float("nan")
    incident = incident_of(nn.Linear(2, 1), loss_fn, {"sequences": sequences, "y": torch.zeros(5)})
    assert incident.samples == [3]


class Graphs:
    """As the batch of a graph library: nodes of all graphs in one tensor, and which graph each is of."""

    def __init__(self, graphs: list[Tensor]) -> None:
        self.graphs = graphs
        self.x = torch.cat(graphs)
        self.batch = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor([len(g) for g in graphs]))

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)

    def __len__(self) -> int:
        return 3  # fields

    def __getitem__(self, index: int) -> Tensor:
        return self.graphs[index]

    @classmethod
    def from_data_list(cls, graphs: list[Tensor]) -> Graphs:
        return cls(graphs)

    def keys(self) -> list[str]:
        return ["x", "batch"]

    def clone(self) -> Graphs:
        return Graphs([g.clone() for g in self.graphs])

    def to(self, device: Any) -> Graphs:
        return self


def graphs() -> Graphs:
    nodes = [torch.rand(n, 4) + 0.1 for n in (2, 5, 3, 4)]
    nodes[2][1] = 0
    return Graphs(nodes)


def test_graphs_are_samples() -> None:
    batch = graphs()
    assert batch_size(batch) == num_samples(batch) == 4
    assert select(batch, [0, 2], 4).batch.tolist() == [0, 0, 1, 1, 1]
    assert samples_of_rows(batch, [1, 7, 8], 14) == [0, 2]


def test_graph_with_a_bad_node_is_found() -> None:
    def loss_fn(model: nn.Module, batch: Graphs) -> Tensor:
        return model(batch.x / batch.x.sum(1, keepdim=True)).mean()

    incident = incident_of(Tiny(), loss_fn, graphs())
    assert incident.samples == [2]
    assert "batch.x" in incident.lineage[-1].text


def test_rows_with_an_intended_inf_are_innocent() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, hidden = batch
        scores = model(x).masked_fill(hidden, -math.inf)
        return -(scores.softmax(1)[:, 0] / x.sum(1)).sum() + scores.exp().sum()

    x = torch.rand(8, 4) + 0.1
    hidden = torch.zeros(8, 3, dtype=torch.bool)
    hidden[::2, 1] = True
    x[4] = 0
    assert incident_of(Tiny(), loss_fn, (x, hidden)).samples == [4]


def test_no_sample_is_named_where_any_would_do() -> None:
    """Their number is what is wrong, not which they are."""

    def too_many(model: nn.Module, x: Tensor) -> Tensor:
        room = torch.tensor(6.0 - len(x)).clamp_min(0)
        return model(x).square().mean() / room

    incident = incident_of(Tiny(), too_many, torch.rand(8, 4))
    assert incident.samples == []
