"""Peak memory: of going back, of looking into a refused step, of an evaluation with averaged weights, against that of a plain step."""

import gc
import math

import pytest
import torch
from backend import LEDGER, NAME
from small import fused_adamw, make_batches
from torch import nn
from torch.nn import functional as F

WIDTH = 64
BACK = {"checkpoint": {"snapshot_every": 4, "trust_after": 2}, "forensics": {"remedies": False}}


def wide_model():
    layers = [nn.Linear(6, WIDTH)]
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def peak_of(action):
    gc.collect()
    LEDGER.reset_peak()
    result = action()
    return LEDGER.peak[0], result


@pytest.fixture
def peaks(on_device):
    """Peak of a usual step, and of the step with that index, in bytes."""

    def measure(data, index, loss_fn, **parts):
        trainer = on_device(wide_model(), optimizer=fused_adamw, train_data=data, loss_fn=loss_fn, **parts)
        found, run_step = {}, trainer.run_step

        def measured(window):
            step = trainer.stepper.next_index
            found[step], _ = peak_of(lambda: run_step(window))

        trainer.run_step = measured
        trainer.fit()
        return found[index - 2], found[index], trainer

    return measure


def mse(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def test_going_back(peaks):
    data = make_batches(20)

    def spoilt(model, batch):
        if batch[0] is not None and spoilt.calls == 12:
            with torch.no_grad():
                model[3].weight.fill_(math.nan)
        spoilt.calls += 1
        return mse(model, batch)

    spoilt.calls = 0
    usual, back, trainer = peaks(data, 12, spoilt, config=BACK)
    assert trainer.run.result.rollbacks == 1
    assert back <= 1.3 * usual, back / usual


def bad_gradient(model, batch):
    y = model(batch[0])
    return (y - y.detach() + batch[1]).square().sum(1).sqrt().mean()


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_looking_into_a_refused_step(peaks, kind):
    data = make_batches(16)
    if kind == "loss":
        data[12][0][3] = math.nan
    else:
        data[12][1][3] = 0.0
    usual, bad, trainer = peaks(data, 12, mse if kind == "loss" else bad_gradient)
    incident = trainer.run.result.incidents[0]
    assert incident.samples == [3], incident.render()
    assert bad <= 1.3 * usual, bad / usual


def test_going_back_by_hand_on_a_full_device(on_device):
    trainer = on_device(
        wide_model(),
        optimizer=fused_adamw,
        train_data=make_batches(12),
        loss_fn=mse,
        config={"checkpoint": {"snapshot_every": 4, "trust_after": 2}},
    )
    ratios = []

    def on_commit(view):
        if view.step == 10:
            gc.collect()
            used = LEDGER.used[0]
            peak, _ = peak_of(lambda: trainer.rollback())
            ratios.append(peak / used)

    trainer.on_commit = on_commit
    trainer.fit()
    assert ratios[0] < 1.1


def test_evaluating_averaged_weights(on_device):
    data = make_batches(8)
    trainer = on_device(
        wide_model(), loop={"ema": 0.9}, optimizer=fused_adamw, train_data=data, eval_data=data[:2], loss_fn=mse
    )
    run, used = trainer.evaluation.run, []

    def measured(result):
        gc.collect()
        before = LEDGER.used[0]
        peak, found = peak_of(lambda: run(result))
        used.append(peak / before)
        return found

    trainer.evaluation.run = measured
    trainer.fit()
    assert max(used) < 1.2, used
    assert all(p.device.type == NAME for p in trainer.model.parameters())
