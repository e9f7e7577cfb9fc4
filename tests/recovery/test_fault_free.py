"""In a run without a fault all guards, snapshots and the ladder change no bit, apart from clipping."""

import copy
import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from small import assert_same, deep_state

from safetrain.guards import DEFAULT

BENCH = Path(__file__).parents[2] / "scripts" / "faultbench.py"
NUM_STEPS = 80  # past every warm-up, a snapshot and the look at whether anything was learned


@pytest.fixture(scope="module")
def tasks():
    """The three tasks that faults are measured on."""
    spec = importlib.util.spec_from_file_location("faultbench", BENCH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["faultbench"] = module
    spec.loader.exec_module(module)
    yield module.TASKS
    del sys.modules["faultbench"]


@pytest.mark.parametrize("name", ["gpt", "mlp", "convnet"])
def test_guards_that_do_not_fire_change_no_bit(make_trainer, tasks, name):
    task, states = tasks[name](0, False), []
    for guards in ({"clip": None}, None):
        parts = {
            "optimizer": partial(torch.optim.AdamW, lr=task.lr),
            "scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=NUM_STEPS),
            "config": {"seed": 0, "guards": guards, "loop": {"max_steps": NUM_STEPS}},
        }
        model = copy.deepcopy(task.model)
        trainer = make_trainer(model=model, loss_fn=task.loss, train_data=task.batches, **parts)
        result = trainer.fit()
        assert result.healthy
        assert result.steps == result.attempted == NUM_STEPS
        assert {guard.name for guard in trainer.guards} == (set() if guards is None else {*DEFAULT} - {"clip"})
        states.append(deep_state(trainer))
    assert_same(*states)
