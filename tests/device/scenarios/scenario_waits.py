"""A healthy step makes the host wait once, for its numbers; its batches make nobody wait."""

from functools import partial

import pytest
import torch
from backend import KNOBS, NAME
from records import journal
from small import fused_adamw, make_batches, make_model, mse

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
HOOKED = {
    "islands": {"modules": ["BatchNorm1d"], "loss": True},
    "activations": {"every": 2},
    "batch": {"only_if_bad": False},
}
COMBINATIONS = {
    "plain": {},
    "accumulation": {"loop": {"grad_accum": 3}},
    "moving average": {"loop": {"ema": 0.9}},
    "bf16": {"loop": {"precision": "bf16"}},
    "fp16": {"loop": {"precision": "fp16"}},
    "fp16, accumulation": {"loop": {"precision": "fp16", "grad_accum": 2}},
    "foreach": {"optimizer": SGD},
    "counters on the host": {"optimizer": partial(torch.optim.AdamW, lr=1e-2)},
    "learning rate on the device": {"optimizer": lambda p: fused_adamw(p, lr=torch.full((), 1e-2, device=NAME))},
    "no clipping": {"guards": {"clip": None}},
    **{f"clip {mode}": {"guards": {"clip": {"mode": mode, "max_norm": 0.1}}} for mode in ("norm", "group_norm")},
    "clip value": {"guards": {"clip": {"mode": "value", "max_value": 0.01}}},
    "hooks": {"guards": HOOKED},
    "state looked at in each step": {"guards": {"finite": {"state_every": 1}}},
    "memory that cannot be pinned": {"knobs": {"pins": False}},
}


def with_metrics(model, batch):
    loss = mse(model, batch)
    return {
        "loss": loss,
        "mean": batch[0].mean(),
        "on the host": torch.tensor(3.0),
        "number": 2.0,
        "count": torch.tensor(4),
    }


@pytest.mark.parametrize("given", COMBINATIONS.values(), ids=COMBINATIONS)
def test_one_wait_for_a_step_and_none_for_a_batch(on_device, waits_of, given):
    given = dict(given)
    for knob, value in given.pop("knobs", {}).items():
        setattr(KNOBS, knob, value)
    loop = given.get("loop", {})
    trainer = on_device(
        make_model().to(NAME) if "device" in str(given) else None,
        loop=loop,
        config={"guards": given.get("guards", {})},
        optimizer=given.get("optimizer", fused_adamw),
        loss_fn=with_metrics,
        train_data=make_batches(12 * loop.get("grad_accum", 1)),
    )
    steps, windows = waits_of(trainer)
    assert trainer.run.result.healthy
    outcomes = [line["action"] for line in journal(trainer.run.result) if line["event"] == "step"]
    healthy = [waits for waits, action in list(zip(steps, outcomes, strict=True))[2:] if action == "commit"]
    assert len(healthy) >= 8
    assert {each.total() for each in healthy} == {1}, healthy
    assert not any(windows), windows


def test_steps_whose_numbers_are_read_late_wait_once_in_ten(on_device, waits_of):
    trainer = on_device(loop={"host_read_every": 10}, optimizer=fused_adamw, train_data=make_batches(50))
    steps, _ = waits_of(trainer)
    assert sum(each.total() for each in steps[10:]) == 4, steps


def test_a_snapshot_and_a_checkpoint_cost_steps_nothing(on_device, waits_of):
    config = {"checkpoint": {"snapshot_every": 3, "every_steps": 5, "async": True}}
    steps, _ = waits_of(on_device(config=config, optimizer=fused_adamw, train_data=make_batches(20)))
    assert {each.total() for each in steps[2:]} == {1}
