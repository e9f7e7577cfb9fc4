"""Models that no rank can run alone: guilty rank, module and samples are found by running all ranks together."""

import pytest
import torch
from process_group import run_ranks
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer

BAD_STEP = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x)) / (x.abs().sum(1, keepdim=True) > 0)  # zero divided by zero for an empty row


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        return self.blocks[1](x).sum(1, keepdim=True)


def train(rank, fault, run_dir):
    torch.manual_seed(3)
    batches = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(16)]
    guilty = batches[2 * BAD_STEP + 1][0]  # every second batch is rank 1's
    guilty[2] = float("nan") if fault == "data" else 0.0
    model = Model()
    trainer = SafeTrainer(
        model,
        loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_data=batches,
        config={"loop": {"device": "cpu", "strategy": "fsdp"}, "logging": {"console": "off", "tensorboard": False}},
        run_dir=run_dir,
    )
    result = trainer.fit()
    return [incident.to_dict() for incident in result.incidents], result.losses


@pytest.mark.parametrize(("fault", "module"), [("data", "<data>"), ("zero", "blocks.0")])
def test_fsdp_names_the_guilty_rank_and_its_module(tmp_path, fault, module):
    by_rank = run_ranks(train, 2, fault, str(tmp_path / "run"), timeout=90)
    for incidents, losses in by_rank:
        assert len(losses) == 8
        (incident,) = incidents
        assert (incident["step"], incident["rank"]) == (BAD_STEP, 1)
        assert incident["origin"]["module"] == module
        assert incident["samples"] == [2]
        assert [about["guilty"] for about in incident["ranks"]] == [False, True]
    assert by_rank[0][0] == by_rank[1][0]
