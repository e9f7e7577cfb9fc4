"""Models that one process could not hold: sharded from the CPU, or made without values."""

import pytest
import torch
from process_group import run_ranks
from torch import nn

from safetrain import SafeTrainer
from safetrain.errors import UsageError
from safetrain.tensors.sharded import full_tensor
from safetrain.trainer.fsdp import _check_meta


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = torch.relu(block(inputs))
        return self.last(self.norm(inputs))


def train(rank, run_dir):
    with torch.device("meta"):
        model = Net()
    data = [(torch.randn(8, 6), torch.ones(8, 1)) for _ in range(12)]
    config = {
        "seed": 1,
        "loop": {"device": "cpu", "strategy": "fsdp"},
        "logging": {"console": "off", "tensorboard": False},
    }
    made = SafeTrainer(model, loss_fn=nn.MSELoss(), train_data=data, config=config, run_dir=run_dir)
    first = {name: full_tensor(p.detach()).clone().numpy() for name, p in model.named_parameters()}
    return first, made.fit().losses


def test_a_model_without_values_is_given_them_part_by_part(tmp_path):
    (first, losses), (same, _) = run_ranks(train, 2, str(tmp_path / "run"), timeout=90)
    for name, weight in first.items():
        assert (weight == same[name]).all()
        assert abs(weight).max() <= 1.0
    assert (
        len({weight.tobytes() for name, weight in first.items() if name.endswith("weight") and "blocks" in name}) == 3
    )
    assert len(losses) == 6
    assert all(loss < 100 for loss in losses)


def test_a_part_that_cannot_be_given_values_is_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), Own())
    with pytest.raises(UsageError, match=r"1 has no reset_parameters\(\)"):
        _check_meta(model)
    assert not _check_meta(nn.Linear(2, 2))
