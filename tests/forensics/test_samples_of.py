"""A batch as a row of samples, whatever its nesting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forensic_cases import incident_of
from torch import Tensor, nn

from safetrain.forensics.samples_of import batch_size, select

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
