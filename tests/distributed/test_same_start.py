"""Ranks that were not started in the same way are named before the first step."""

import pytest
import torch
from process_group import outcomes_of
from small import make_batches, make_model, mse

from safetrain import SafeTrainer


def start(rank, what, run_dir):
    other = rank == 1
    model = make_model()
    if other and what == "model":
        model.append(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 if other and what == "optimizer" else 0.01)
    config = {
        "name": f"of-{rank}",
        "loop": {"device": "cpu", "max_steps": 9 if other and what == "config" else 8},
        "guards": {"finite": None} if other and what == "guard" else {},
        "logging": {"console": "off", "tensorboard": False},
    }
    SafeTrainer(model, loss_fn=mse, optimizer=optimizer, train_data=make_batches(3), config=config, run_dir=run_dir)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("config", "config: loop.max_steps is 9 on rank 1, and 8 on rank 0"),
        ("guard", "config: guards.finite"),
        ("model", "(1, 1) on rank 1, and None on rank 0"),
        ("optimizer", "optimizer: lr of group 0 is 0.02 on rank 1, and 0.01 on rank 0"),
    ],
)
def test_what_differs_is_named_on_all_ranks(tmp_path, what, said):
    for outcome in outcomes_of(start, 2, what, str(tmp_path / "run"), timeout=60):
        assert outcome.error == "UsageError"
        assert said in outcome.message
