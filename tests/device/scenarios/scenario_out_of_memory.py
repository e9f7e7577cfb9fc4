"""A step that does not fit into the memory of the device: tried again, in halves if that is allowed, else the run is saved."""

import gc

import pytest
import torch
from backend import KNOBS, LEDGER, NAME
from records import journal
from small import make_batches, mse
from torch import nn

from safetrain import SafeTrainer

BIG = 400


def model():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


@pytest.fixture
def limited(on_device):
    """Trains on batches of 8 with one of 400 at step 6; from step 5 on there is room for `room` bytes more than is in use."""

    def make(room, before=None, **loop):
        torch.manual_seed(1)
        data = make_batches(10)
        data[6] = make_batches(1, size=BIG)[0]
        trainer = on_device(model(), optimizer=sgd, train_data=data, loss_fn=mse, loop=loop)
        run_step = trainer.run_step

        def limiting(window):
            if trainer.stepper.next_index == 5:
                gc.collect()
                KNOBS.memory_limit = LEDGER.used[0] + room
                if before is not None:
                    before()
            run_step(window)

        trainer.run_step = limiting
        return trainer

    return make


def test_what_is_kept_by_nobody_is_freed_and_the_step_made(limited, caplog):
    def litter():
        garbage = [torch.ones(100_000, device=NAME)]
        garbage.append(garbage)

    gc.disable()
    try:
        result = limited(700_000, litter).fit()
    finally:
        gc.enable()
    assert result.steps == 10
    assert result.healthy
    assert "it is tried once more" in caplog.text


def test_in_halves_if_that_is_allowed(limited):
    trainer = limited(420_000, on_out_of_memory="halves")
    result = trainer.fit()
    assert result.steps == 10
    step = next(line for line in journal(result) if line["event"] == "step" and line["step"] == 6)
    assert step["action"] == "commit"
    plain = limited(10**9).fit()
    assert result.losses == pytest.approx(plain.losses, rel=1e-5)


def test_else_the_run_is_saved_and_says_what_did_not_fit(limited):
    trainer = limited(420_000)
    with pytest.raises(torch.OutOfMemoryError) as shortage:
        trainer.fit()
    text = str(shortage.value)
    assert f"step 6 does not fit into the memory of {NAME}" in text
    assert f"batches of {BIG} samples" in text
    assert "To fix: " in text
    KNOBS.reset()
    small = model()
    data = make_batches(10)
    config = {"loop": {"device": NAME}, "logging": {"console": "off"}}
    again = SafeTrainer(
        small, loss_fn=mse, optimizer=sgd(small.parameters()), train_data=data, config=config, run_dir=trainer.run.dir
    )
    assert again.fit(resume="force").steps == 10
    assert again.run.losses[:6] == trainer.run.losses[:6]
