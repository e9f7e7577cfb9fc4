"""How often the host waits for the device, and what deferred reads (`loop.host_read_every`) change."""

import math
from functools import partial

import pytest
import torch
from host_reads import HostReads
from records import journal
from small import assert_same, deep_state, fused_adamw, make_batches, make_model, mse
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from safetrain import Action, Guard, SafeTrainer, TrainingStopped, UsageError, Verdict
from safetrain._private import fused

OPTIMIZERS = {"fused": fused_adamw, "foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)}
HOOKED = {
    "islands": {"modules": ["BatchNorm1d"], "loss": True},
    "activations": {"every": 2, "max_abs": 1e6},
    "batch": {"only_if_bad": False},
    "anomaly": {},
}
"""Guards that install hooks."""


@pytest.fixture
def defer(make_trainer):
    """A trainer that reads the numbers of `every` steps at once, with a fused optimizer."""

    def make(every, *, loop=None, optimizer=fused_adamw, config=None, **parts):
        config = {**(config or {}), "loop": {"host_read_every": every, **(loop or {})}}
        return make_trainer(optimizer=optimizer, config=config, **parts)

    return make


@pytest.fixture
def fit_same(defer):
    """Train with a read after each step, and with one after `every`: all weights and moments must be the same to the bit."""

    def fit(every, make=make_model, **parts):
        trainers = []
        for each in (1, every):
            torch.manual_seed(1)
            trainers.append(defer(each, model=make(), **parts))
            torch.manual_seed(2)
            trainers[-1].fit()
        assert_same(*map(deep_state, trainers))
        return [trainer.run.result for trainer in trainers]

    return fit


@pytest.mark.parametrize(
    ("optimizer", "precision", "accum", "guards"),
    [
        *(
            (optimizer, precision, accum, {"clip": {"mode": "norm", **clip}} if clip is not None else {})
            for optimizer in OPTIMIZERS
            for precision in ("fp32", "fp16")
            for accum, clip in ((1, {"max_norm": 0.1}), (3, {}), (1, None))
        ),
        *(("fused", precision, accum, HOOKED) for precision in ("fp32", "bf16") for accum in (1, 3)),
    ],
)
def test_a_healthy_step_reads_the_host_once(make_trainer, monkeypatch, optimizer, precision, accum, guards):
    """With every default guard on, the given options aside."""

    def loss_fn(model, batch):
        return {"loss": mse(model, batch), "size": batch[0].abs().mean()}

    config = {"loop": {"precision": precision, "grad_accum": accum}, "guards": guards}
    data = make_batches(30 * accum)
    trainer = make_trainer(loss_fn=loss_fn, optimizer=OPTIMIZERS[optimizer], config=config, train_data=data)
    reads = HostReads(trainer, monkeypatch)
    result = trainer.fit()
    steps = [line["action"] for line in journal(result) if line["event"] == "step"]
    healthy = [count for count, action in zip(reads.per_step, steps, strict=True) if action != "overflow"]
    assert len(healthy) >= 25
    assert max(healthy) <= 1
    assert result.healthy


def test_deferred_reads_happen_once_in_n_steps(defer, monkeypatch):
    assert fused.SKIP.works  # tried out once in a process, which reads too
    trainer = defer(16, train_data=make_batches(64))
    reads = HostReads(trainer, monkeypatch)
    trainer.fit()
    assert reads.count <= 64 / 16


# ---- the same numbers as with a read after each step -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_deferred_reads_never_apply_a_bad_update_and_report_the_right_step(fit_same, name):
    """Bit-identical with reading every step, apart from the learning rate of the steps that followed a refusal."""
    optimizer = partial(getattr(torch.optim, name), lr=1e-2, fused=True)
    guards = {"backoff": None, "clip": {"mode": "norm"}}
    data = make_batches(40, bad=(7, 8, 30))
    for result in fit_same(8, optimizer=optimizer, train_data=data, config={"guards": guards}, loop={"ema": 0.9}):
        assert [i.step for i in result.incidents] == [7, 8, 30]
        assert (result.steps, result.skipped) == (37, 3)
        assert [i for i, loss in enumerate(result.losses) if math.isnan(loss)] == [7, 8, 30]


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_refused_first_step_leaves_the_momentum_clean(fit_same, dampening):
    optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, dampening=dampening, fused=True)
    parts = {"config": {"guards": {"backoff": None}}, "loop": {"deterministic": True}}
    for result in fit_same(2, optimizer=optimizer, train_data=make_batches(12, bad=(0,)), **parts):
        assert [incident.step for incident in result.incidents] == [0]


def test_the_first_step_of_a_late_parameter_is_judged_at_once(fit_same):
    """Its momentum is made in a bad step, while others are pending."""

    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.first(x) + (self.second(x) if self.calls > 5 else 0.0)

    def optimizer(params):
        params = list(params)
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        return torch.optim.SGD(groups, lr=1e-3, momentum=0.9, fused=True)

    parts = {"config": {"guards": {"backoff": None, "clip": None}}, "loop": {"deterministic": True}}
    fit_same(4, Late, optimizer=optimizer, train_data=make_batches(12, bad=(5,)), **parts)


def test_the_ema_of_float64_weights_does_not_depend_on_deferred_reads(fit_same):
    data = [(x.double(), y.double()) for x, y in make_batches(8)]
    fit_same(4, lambda: make_model().double(), train_data=data, config={"guards": {"clip": None}}, loop={"ema": 0.9})


@pytest.mark.parametrize(
    ("scheduler", "every", "num_steps", "bad"),
    [
        (partial(CosineAnnealingLR, T_max=40), 5, 22, (6,)),
        (partial(OneCycleLR, max_lr=1e-2, total_steps=40), 4, 9, (5, 6, 7, 8)),  # moves the momentum too
    ],
)
def test_the_schedule_counts_committed_steps_only(defer, scheduler, every, num_steps, bad):
    settings, data = [], make_batches(num_steps, bad=bad)
    for each in (1, every):
        optimizer = partial(fused_adamw, lr=torch.tensor(1e-3))
        trainer = defer(each, optimizer=optimizer, scheduler=scheduler, train_data=data)
        trainer.fit()
        group = trainer.optimizer.param_groups[0]
        settings.append((float(group["lr"]), group["betas"], trainer.scheduler.last_epoch))
    assert settings[0] == settings[1]
    assert settings[0][2] == num_steps - len(bad)


# ---- what comes late --------------------------------------------------------------------------------------------------


def assert_finite(trainer):
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_backoff_and_escalation_work_on_deferred_steps(defer):
    config = {"guards": {"finite": {"max_consecutive": 6}}, "recovery": {"max_refusals": 20}}
    trainer = defer(4, train_data=make_batches(40, bad=range(10, 40)), config=config)
    with pytest.raises(TrainingStopped, match="max_refusals is 20") as stopped:
        trainer.fit()
    reasons = [" ".join(incident.decision.reasons) for incident in stopped.value.result.incidents]
    assert ["the data is at fault" in reason for reason in reasons] == [False] * 5 + [True] * 16
    assert [incident.step for incident in stopped.value.result.incidents] == list(range(10, 31))
    assert stopped.value.result.steps == 10
    assert_finite(trainer)


def test_a_deferred_rollback_undoes_the_steps_after_it_too(defer):
    class Spoiling(SafeTrainer):
        spoilt = False

        def on_commit(self, view):
            if view.step == 9 and not self.spoilt:
                self.spoilt = True
                with torch.no_grad():
                    self.model[4].weight[0, 0] = math.nan

    config = {"checkpoint": {"snapshot_every": 5, "trust_after": 2}}
    scheduler = partial(CosineAnnealingLR, T_max=100)
    trainer = defer(4, cls=Spoiling, scheduler=scheduler, train_data=make_batches(40), config=config)
    result = trainer.fit()
    assert (result.rollbacks, result.attempted) == (1, 40)
    assert trainer.scheduler.last_epoch == result.steps
    assert_finite(trainer)


def test_max_steps_are_committed_steps_also_when_reads_are_deferred(defer):
    result = defer(8, train_data=make_batches(10, bad=(3,)), loop={"max_steps": 20}).fit()
    assert (result.steps, result.attempted) == (20, 22)


@pytest.mark.parametrize(
    ("optimizer", "config", "loop", "message"),
    [
        (None, {"optimizer": {"_target_": "torch.optim.AdamW", "fused": False}}, {}, "fused=True"),
        (fused_adamw, {}, {"precision": "fp16"}, "host_read_every"),
        (fused_adamw, {"guards": {"finite": {"drop_micro_batch": True}}}, {}, "host_read_every"),
    ],
)
def test_what_cannot_be_deferred_is_an_error(defer, optimizer, config, loop, message):
    trainer = defer(4, optimizer=optimizer, train_data=make_batches(2), config=config, loop=loop)
    with pytest.raises(UsageError, match=message):
        trainer.fit()


def test_a_bad_learning_rate_is_not_applied(defer):
    scheduler = partial(LambdaLR, lr_lambda=lambda step: math.nan if step == 6 else 1.0)
    trainer = defer(4, scheduler=scheduler, train_data=make_batches(12))
    result = trainer.fit()
    assert (result.steps, [i.step for i in result.incidents]) == (12, [6])  # held at the last good rate
    assert_finite(trainer)


class Ceiling(Guard):
    def judge(self, view):
        if view.step in (5, 6):
            return Verdict(Action.SKIP, reason="not this one", evidence={"signal": "loss", "value": view.loss})
        return Verdict()


def test_a_refusal_that_comes_too_late_is_reported(defer):
    result = defer(4, train_data=make_batches(12), guards=[Ceiling()]).fit()
    assert (result.steps, result.skipped, result.healthy) == (12, 0, False)
    assert [(i.step, i.trigger.guard, i.decision.action) for i in result.incidents] == [
        (5, "ceiling", "commit"),
        (6, "ceiling", "commit"),
    ]
    assert "could not be skipped" in " ".join(result.incidents[0].decision.reasons)


def test_steps_on_the_device_are_recorded_however_the_run_ends(defer):
    """The record counts what the weights have in them."""

    def run(**parts):
        trainer = defer(8, train_data=make_batches(12, bad=(4,)), **parts)
        with pytest.raises((TrainingStopped, RuntimeError)):
            trainer.fit()
        assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {trainer.run.result.steps}
        return trainer.run.result

    class Stopping(Guard):
        def judge(self, view):
            return Verdict(Action.STOP, reason="enough") if view.step == 6 else Verdict()

    def breaks(model, batch):
        run.calls = getattr(run, "calls", 0) + 1
        if run.calls == 7:
            raise RuntimeError("a mistake")
        return mse(model, batch)

    class Breaking(SafeTrainer):
        def run_step(self, window):
            if self.step == 6:
                raise RuntimeError("elsewhere")
            super().run_step(window)

    assert run(guards=[Stopping()]).attempted == 8
    assert run(loss_fn=breaks).attempted == 6
    assert run(cls=Breaking).attempted == 6


def test_finite_numbers_whose_sum_overflows_are_healthy(defer):
    model = make_model()
    model.register_buffer("huge", torch.full((2,), 3e38))

    def loss_fn(model, batch):
        return mse(model, batch) * 1e-6 + 3e38

    assert defer(3, model=model, loss_fn=loss_fn, train_data=make_batches(6)).fit().steps == 6


class Switching(torch.nn.Linear):
    def forward(self, x):
        if torch.isnan(x).any():
            self.eval()
        return super().forward(x)


def test_modes_of_a_refused_step_are_restored_when_reads_are_deferred(defer):
    trainer = defer(6, model=Switching(6, 1), train_data=make_batches(6, bad=(4,)))
    trainer.fit()
    assert trainer.model.training


@pytest.mark.parametrize("every", [1, 3])
def test_a_failing_schedule_leaves_a_complete_step_and_a_saved_state(defer, every):
    scheduler = partial(OneCycleLR, max_lr=1e-3, total_steps=5)
    trainer = defer(every, scheduler=scheduler, train_data=make_batches(20), loop={"max_steps": 20})
    with pytest.raises(UsageError, match=r"OneCycleLR failed after step 5(.|\n)*loop\.max_steps"):
        trainer.fit()
    assert trainer.run.result.steps == 6
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {6}
    assert (trainer.run.dir / "checkpoints" / "last").resolve().name == "step-00000006"
    assert all(p.grad is None for p in trainer.model.parameters())
