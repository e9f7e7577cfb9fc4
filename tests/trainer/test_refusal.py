"""A refused step leaves no trace."""

import copy
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from records import journal
from small import assert_same, deep_state, make_batches, make_model, mse
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from safetrain import SafeTrainer, TrainingStopped
from safetrain.tensors.rng import RandomState


class Recording(SafeTrainer):
    """Keeps the whole state after every commit, and compares it after every refusal."""

    def on_commit(self, view):
        self.after_commit = deep_state(self)
        self.commits = [*getattr(self, "commits", []), view.step]

    def on_incident(self, incident):
        self.checked = [*getattr(self, "checked", []), incident.step]
        assert_same(deep_state(self), self.after_commit)
        assert all(p.grad is None for p in self.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_everything_is_bit_identical_after_a_refusal(make_trainer, precision):
    parts = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "scheduler": partial(CosineAnnealingLR, T_max=20)}
    config = {"loop": {"ema": 0.9, "precision": precision}}
    trainer = make_trainer(cls=Recording, train_data=make_batches(20, bad=(5, 6, 11)), config=config, **parts)
    result = trainer.fit()
    assert trainer.checked == [5, 6, 11]
    assert (result.steps, result.skipped, result.attempted) == (17 - result.overflows, 3 + result.overflows, 20)
    assert [i for i, loss in enumerate(result.losses) if math.isnan(loss)] == [5, 6, 11]
    assert trainer.scheduler.last_epoch == result.steps
    assert not result.healthy
    assert trainer.stream.epoch == 1


def test_random_numbers_continue_after_a_refusal_and_a_replay_restores_them(make_trainer):
    model = make_model(dropout=0.5)
    masks = []

    def loss_fn(model, batch):
        masks.append(F.dropout(torch.ones(32)))
        return mse(model, batch)

    config = {"forensics": {"enabled": False}, "recovery": {"ladder": ["skip"]}}
    trainer = make_trainer(model, loss_fn=loss_fn, train_data=make_batches(8, bad=(3,)), config=config)
    before = {}

    def remember(view):
        before.update(copy.deepcopy(model.state_dict())) if view.step == 2 else None

    trainer.on_commit = remember
    result = trainer.fit()
    assert not torch.equal(masks[3], masks[4])
    incident = result.incidents[0]
    bundle = torch.load(result.run_dir / incident.path / "replay.pt", weights_only=True)
    RandomState.from_plain(bundle["random_state"]).restore()
    model.load_state_dict(before)
    assert math.isnan(loss_fn(model, bundle["window"][0]).item())
    assert torch.equal(masks[-1], masks[3])
    assert json.loads((result.run_dir / incident.path / "incident.json").read_text())["trigger"]["value"] == "nan"


def test_a_non_finite_buffer_is_refused_even_if_loss_and_gradient_are_finite(make_trainer):
    class Clamp(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x):
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
            return x.clamp(-3, 3)

    model = nn.Sequential(Clamp(), nn.Linear(6, 1))
    result = make_trainer(model, train_data=make_batches(6, bad=(2,), value=math.inf)).fit()
    assert [(i.step, i.trigger.signal) for i in result.incidents] == [(2, "buffers")]
    assert torch.isfinite(model[0].largest)


def test_a_finite_loss_with_a_bad_gradient_is_refused(make_trainer):
    def loss_fn(model, batch):
        out = model(batch[0])
        return out.mean() + (out - out.detach()).abs().sqrt().sum()  # sqrt'(0) is infinite

    with pytest.raises(TrainingStopped) as stopped:
        make_trainer(loss_fn=loss_fn, train_data=make_batches(30)).fit()
    assert stopped.value.result.steps == 0
    assert stopped.value.incident.trigger.signal == "grad_norm"
    assert all(math.isfinite(loss) for loss in stopped.value.result.losses)


@pytest.mark.parametrize(
    ("finite", "bad"),
    [
        ({"max_consecutive": 4}, range(10, 30)),
        ({"max_consecutive": 50, "max_in_window": 5, "window": 20}, range(10, 40, 2)),
    ],
)
def test_repeated_refusals_escalate(make_trainer, finite, bad):
    """To a replay of the last good batch, which distinguishes bad data from a bad state."""
    for state_is_bad in (False, True):
        model = make_model()

        def loss_fn(model, batch, state_is_bad=state_is_bad):
            is_probe = not torch.is_grad_enabled()
            return mse(model, batch) * (math.nan if is_probe and state_is_bad else 1.0)

        config = {"guards": {"finite": finite}, "recovery": {"ladder": ["skip"]}, "forensics": {"enabled": False}}
        trainer = make_trainer(model, loss_fn=loss_fn, train_data=make_batches(40, bad=bad), config=config)
        if state_is_bad:
            with pytest.raises(TrainingStopped, match="the state is at fault") as stopped:
                trainer.fit()
            assert stopped.value.incident.step == 10  # of unknown cause, so the first one is looked at
            assert stopped.value.incident.decision.action == "stop"
            assert stopped.value.result.status == "stopped"
        else:
            result = trainer.fit()
            assert result.skipped == len(bad)
            assert any("the data is at fault" in r for r in result.incidents[-1].decision.reasons)


@pytest.mark.parametrize("budget", [0, 3])
def test_the_budget_bounds_refusals_over_the_run(make_trainer, budget):
    config = {"recovery": {"max_refusals": budget}, "loop": {"max_steps": 1000}}
    with pytest.raises(TrainingStopped, match="max_refusals") as stopped:
        make_trainer(train_data=make_batches(10, bad=(4,)), config=config).fit()
    assert len(stopped.value.result.incidents) == budget + 1
    assert stopped.value.incident.trigger.guard == "finite"


class Spoiling(SafeTrainer):
    def on_commit(self, view):
        if view.step == 3:
            with torch.no_grad():
                self.model[4].weight[0, 0] = math.nan


def test_a_parameter_that_becomes_nan_is_named_and_rolled_back(make_trainer):
    result = make_trainer(None, Spoiling, train_data=make_batches(20)).fit()
    (incident,) = result.incidents
    assert (incident.step, incident.decision.action, result.rollbacks) == (4, "rollback", 1)
    assert "4.weight (1 NaN of 16 values)" in incident.decision.reasons[0]
    assert result.steps == 15  # 4 committed steps were undone, and the batch of the refused one was passed
    config = {"checkpoint": {"snapshot_every": None, "enabled": False}}
    with pytest.raises(TrainingStopped, match="there is nothing to go back to"):
        make_trainer(None, Spoiling, train_data=make_batches(20), config=config).fit()


def test_optimizer_state_is_checked_every_n_steps_although_the_loss_stays_finite(make_trainer):
    class SpoilingMoments(SafeTrainer):
        def on_commit(self, view):
            if view.step == 3:
                self.optimizer.state[self.model[0].weight]["exp_avg_sq"][0, 0] = math.inf

    config = {"guards": {"finite": {"state_every": 6}}}
    (incident,) = make_trainer(None, SpoilingMoments, train_data=make_batches(20), config=config).fit().incidents
    assert (incident.step, incident.trigger.signal, incident.decision.action) == (6, "state", "rollback")
    assert "optimizer exp_avg_sq of 0.weight" in incident.decision.reasons[0]


def test_bad_state_is_never_saved(make_trainer):
    trainer = make_trainer(None, Spoiling, train_data=make_batches(4))  # the last step spoils it
    with pytest.raises(TrainingStopped, match=r"not saved: 4\.weight"):
        trainer.fit()
    saved = {path.name for path in (trainer.run.dir / "checkpoints").iterdir()}
    assert saved == {"step-00000000", "last"}  # the state that the run began with


def test_a_learning_rate_of_nan_is_never_applied(make_trainer):
    scheduler = partial(LambdaLR, lr_lambda=lambda step: math.nan if step == 3 else 1.0)
    optimizer, config = partial(torch.optim.SGD, lr=0.1), {"recovery": {"heal": []}}
    trainer = make_trainer(optimizer=optimizer, scheduler=scheduler, train_data=make_batches(30), config=config)
    with pytest.raises(TrainingStopped, match="learning rate is nan") as stopped:
        trainer.fit()
    assert stopped.value.result.steps == 3
    assert trainer.ladder.spent == {}  # neither another batch nor an earlier state helps
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_backoff_is_applied_outside_the_schedule_and_seen_in_the_journal(make_trainer):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    used = []
    optimizer.register_step_pre_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
    # Without an investigation the cause is not known, and then the learning rate is suspected.
    config = {
        "guards": {"backoff": {"factor": 0.5, "floor": 0.25, "recovery_steps": 4}},
        "forensics": {"enabled": False},
        "recovery": {"ladder": ["skip"]},
    }
    parts = {"optimizer": optimizer, "scheduler": partial(LambdaLR, lr_lambda=lambda step: 1.0), "config": config}
    result = make_trainer(model, train_data=make_batches(10, bad=(3,)), **parts).fit()
    growth = 4 ** (1 / 4)
    expected = [0.1] * 3 + [0.1 * 0.5 * growth**n for n in range(2)] + [0.1] * 4
    assert used == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] == 0.1
    steps = [line for line in journal(result) if line["event"] == "step"]
    assert [line["lr"] for line in steps if line["action"] == "commit"] == pytest.approx(expected)
    assert "learning rate scaled by 0.5" in " ".join(steps[4]["reasons"])


def test_without_guards_nothing_is_refused(make_trainer):
    trainer = make_trainer(train_data=make_batches(6, bad=(3,)), config={"guards": None})
    with pytest.raises(TrainingStopped, match="not saved"):  # still never saved as if it were good
        trainer.fit()
    assert trainer.run.result.steps == 6


class Unpicklable:
    """A batch that moves itself and cannot be written to disk."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return self

    def __reduce__(self):
        raise RuntimeError("not to be pickled")


def test_a_batch_that_cannot_be_pickled_does_not_end_the_run(make_trainer):
    batches = [Unpicklable(x, y) for x, y in make_batches(4, bad=(1,))]
    config = {"recovery": {"ladder": ["skip"]}}
    trainer = make_trainer(loss_fn=lambda m, b: F.mse_loss(m(b.x), b.y), train_data=batches, config=config)
    result = trainer.fit()
    assert (result.steps, result.skipped) == (3, 1)
    bundle = torch.load(result.run_dir / result.incidents[0].path / "replay.pt", weights_only=True)
    assert bundle["window"] is None


@pytest.mark.parametrize("values", [[1.0], np.ones(3)], ids=["list", "array"])
def test_an_index_error_of_plain_python_is_no_incident(make_trainer, values):
    trainer = make_trainer(loss_fn=lambda m, b: mse(m, b) * float(values[5]), train_data=make_batches(3))
    with pytest.raises(IndexError):
        trainer.fit()
    assert trainer.run.result.incidents == []


def test_an_index_outside_an_embedding_is_an_incident(make_trainer):
    model = nn.Sequential(nn.Embedding(4, 1), nn.Flatten())
    batches = [(torch.tensor([[0], [3]]), torch.zeros(2, 1)), (torch.tensor([[0], [4]]), torch.zeros(2, 1))]
    result = make_trainer(model, train_data=batches).fit()
    assert [incident.cause.label for incident in result.incidents] == ["bad_input_data"]
