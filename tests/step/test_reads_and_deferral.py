"""How often the host waits for the device, and what deferred reads (`loop.host_read_every`) change."""

import math

import pytest
import torch
from host_reads import HostReads, count_tolist
from small import assert_same, make_batches, make_model, mse

from safetrain import Action, Guard, SafeTrainer, TrainingStopped, UsageError, Verdict

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("accum", "guards"), [(1, {"clip": {"mode": "norm", "max_norm": 0.1}}), (3, {"clip": {"mode": "norm"}}), (1, {})]
)
def test_a_healthy_step_reads_the_host_once(make_trainer, monkeypatch, optimizer, precision, accum, guards):
    """With every default guard on, the given options aside."""
    model = make_model()
    opt = OPTIMIZERS[optimizer](model.parameters())
    config = {"loop": {"precision": precision, "grad_accum": accum}, "guards": guards}
    trainer = make_trainer(
        model, loss_fn=lambda m, b: {"loss": mse(m, b), "size": b[0].abs().mean()}, optimizer=opt, config=config,
        train_data=make_batches(30 * accum),
    )  # fmt: skip
    reads, lists = HostReads(), count_tolist(monkeypatch)
    run_step, per_step = trainer.run_step, []

    def counting(window):
        before = reads.count + lists["count"]
        with reads:
            run_step(window)
        if trainer.run.result.steps > len(per_step):  # an fp16 overflow is not a healthy step
            per_step.append(reads.count + lists["count"] - before)

    trainer.run_step = counting
    trainer.fit()
    assert len(per_step) >= 25
    assert max(per_step) <= 1


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_deferred_reads_never_apply_a_bad_update_and_report_the_right_step(make_trainer, name):
    """Bit-identical with reading every step, apart from the learning rate of the steps that followed a refusal."""
    batches = make_batches(40, bad=(7, 8, 30))
    states, results = [], []
    for every in (1, 8):
        torch.manual_seed(1)
        model = make_model()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, fused=True)
        config = {"loop": {"host_read_every": every, "ema": 0.9}, "guards": {"backoff": None, "clip": {"mode": "norm"}}}
        trainer = make_trainer(model, optimizer=optimizer, train_data=batches, config=config)
        torch.manual_seed(2)
        results.append(trainer.fit())
        states.append([model.state_dict(), optimizer.state_dict(), trainer.ema.state_dict()])
    assert_same(*states)
    for result in results:
        assert [i.step for i in result.incidents] == [7, 8, 30]
        assert (result.steps, result.skipped) == (37, 3)
        assert [i for i, loss in enumerate(result.losses) if math.isnan(loss)] == [7, 8, 30]


def test_the_schedule_counts_committed_steps_only(make_trainer):
    schedules = []
    for every in (1, 5):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        config = {"loop": {"host_read_every": every}}
        trainer = make_trainer(
            model, optimizer=optimizer, scheduler=scheduler, train_data=make_batches(22, bad=(6,)), config=config
        )
        trainer.fit()
        schedules.append((scheduler.last_epoch, optimizer.param_groups[0]["lr"]))
    assert schedules[0][0] == schedules[1][0] == 21
    assert schedules[0][1] == pytest.approx(schedules[1][1])


def test_deferred_reads_happen_once_in_n_steps(make_trainer, monkeypatch):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = make_trainer(
        model, optimizer=optimizer, train_data=make_batches(64), config={"loop": {"host_read_every": 16}}
    )
    reads, lists = HostReads(), count_tolist(monkeypatch)
    run_step = trainer.run_step

    def counting(window):
        with reads:
            run_step(window)

    trainer.run_step = counting
    trainer.fit()
    assert reads.count + lists["count"] <= 64 / 16


def test_backoff_and_escalation_work_on_deferred_steps(make_trainer):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {
        "loop": {"host_read_every": 4},
        "guards": {"finite": {"max_consecutive": 6}},
        "recovery": {"max_refusals": 20},
    }
    trainer = make_trainer(model, optimizer=optimizer, train_data=make_batches(40, bad=range(10, 40)), config=config)
    with pytest.raises(TrainingStopped, match="max_refusals is 20") as stopped:
        trainer.fit()
    reasons = [" ".join(incident.decision.reasons) for incident in stopped.value.result.incidents]
    assert ["the data is at fault" in reason for reason in reasons] == [False] * 5 + [True] * 16
    assert [incident.step for incident in stopped.value.result.incidents] == list(range(10, 31))
    assert stopped.value.result.steps == 10
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_deferred_rollback_undoes_the_steps_after_it_too(make_trainer):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    class Spoiling(SafeTrainer):
        spoilt = False

        def on_commit(self, view):
            if view.step == 9 and not self.spoilt:
                self.spoilt = True
                with torch.no_grad():
                    self.model[4].weight[0, 0] = math.nan

    config = {"loop": {"host_read_every": 4}, "checkpoint": {"snapshot_every": 5, "trust_after": 2}}
    trainer = make_trainer(
        model, Spoiling, optimizer=optimizer, scheduler=scheduler, train_data=make_batches(40), config=config
    )
    result = trainer.fit()
    assert result.rollbacks == 1
    assert result.attempted == 40
    assert scheduler.last_epoch == result.steps
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_max_steps_are_committed_steps_also_when_reads_are_deferred(make_trainer):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {"loop": {"host_read_every": 8, "max_steps": 20}}
    result = make_trainer(model, optimizer=optimizer, train_data=make_batches(10, bad=(3,)), config=config).fit()
    assert (result.steps, result.attempted) == (20, 22)


def test_deferred_reads_need_a_fused_optimizer(make_trainer):
    unfused = {"_target_": "torch.optim.AdamW", "fused": False}
    trainer = make_trainer(train_data=make_batches(2), config={"loop": {"host_read_every": 4}, "optimizer": unfused})
    with pytest.raises(UsageError, match="fused=True"):
        trainer.fit()


@pytest.mark.parametrize(
    "config",
    [
        {"loop": {"host_read_every": 4, "precision": "fp16"}},
        {"loop": {"host_read_every": 4}, "guards": {"finite": {"drop_micro_batch": True}}},
    ],
)
def test_options_that_cannot_be_deferred_are_an_error(make_trainer, config):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = make_trainer(model, SafeTrainer, optimizer=optimizer, train_data=make_batches(2), config=config)
    with pytest.raises(UsageError, match="host_read_every"):
        trainer.fit()


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_refused_first_step_leaves_the_momentum_clean(make_trainer, dampening):
    batches = make_batches(12, bad=(0,))
    states = []
    for every in (1, 2):
        torch.manual_seed(1)
        model = make_model(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, dampening=dampening, fused=True)
        config = {"loop": {"host_read_every": every, "deterministic": True}, "guards": {"backoff": None}}
        result = make_trainer(model, optimizer=optimizer, train_data=batches, config=config).fit()
        assert [incident.step for incident in result.incidents] == [0]
        states.append([model.state_dict(), optimizer.state_dict()])
    assert_same(*states)


def test_the_first_step_of_a_late_parameter_is_judged_at_once(make_trainer):
    """Its momentum is made in a bad step, while others are pending."""

    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.first(x) + (self.second(x) if self.calls > 5 else 0.0)

    batches = make_batches(12, bad=(5,))
    states = []
    for every in (1, 4):
        torch.manual_seed(1)
        model = Late()
        groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9, fused=True)
        config = {"loop": {"host_read_every": every, "deterministic": True}, "guards": {"backoff": None, "clip": None}}
        make_trainer(model, optimizer=optimizer, train_data=batches, config=config).fit()
        states.append([model.state_dict(), optimizer.state_dict()])
    assert_same(*states)


def test_a_bad_learning_rate_is_not_applied(make_trainer):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.nan if step == 6 else 1.0)
    trainer = make_trainer(
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_data=make_batches(12),
        config={"loop": {"host_read_every": 4}},
    )
    with pytest.raises(TrainingStopped, match="learning rate is nan") as stopped:
        trainer.fit()
    assert stopped.value.result.steps == 6
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Ceiling(Guard):
    def judge(self, view):
        if view.step in (5, 6):
            return Verdict(Action.SKIP, reason="not this one", evidence={"signal": "loss", "value": view.loss})
        return Verdict()


def test_a_refusal_that_comes_too_late_is_reported(make_trainer):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {"loop": {"host_read_every": 4}}
    trainer = make_trainer(model, optimizer=optimizer, train_data=make_batches(12), guards=[Ceiling()], config=config)
    result = trainer.fit()
    assert (result.steps, result.skipped, result.healthy) == (12, 0, False)
    assert [(i.step, i.trigger.guard, i.decision.action) for i in result.incidents] == [
        (5, "ceiling", "commit"),
        (6, "ceiling", "commit"),
    ]
    assert "could not be skipped" in " ".join(result.incidents[0].decision.reasons)


def test_steps_on_the_device_are_recorded_however_the_run_ends(make_trainer):
    """The record counts what the weights have in them."""

    def run(**parts):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        trainer = make_trainer(
            model,
            optimizer=optimizer,
            train_data=make_batches(12, bad=(4,)),
            config={"loop": {"host_read_every": 8}},
            **parts,
        )
        with pytest.raises((TrainingStopped, RuntimeError)):
            trainer.fit()
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert steps == {trainer.run.result.steps}
        return trainer.run.result

    class Stopping(Guard):
        def judge(self, view):
            return Verdict(Action.STOP, reason="enough") if view.step == 6 else Verdict()

    def breaks(model, batch):
        run.calls = getattr(run, "calls", 0) + 1
        if run.calls == 7:
            raise RuntimeError("a mistake")
        return mse(model, batch)

    assert run(guards=[Stopping()]).attempted == 8
    assert run(loss_fn=breaks).attempted == 6

    class Breaking(SafeTrainer):
        def run_step(self, window):
            if self.step == 6:
                raise RuntimeError("elsewhere")
            super().run_step(window)

    assert run(cls=Breaking).attempted == 6


def test_refused_deferred_steps_restore_everything_the_schedule_changes(make_trainer):
    settings = []
    for every in (1, 4):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        config = {"loop": {"host_read_every": every, "max_epochs": 1}}
        trainer = make_trainer(
            model, optimizer=optimizer, scheduler=scheduler, train_data=make_batches(9, bad=(5, 6, 7, 8)), config=config
        )
        trainer.fit()
        group = optimizer.param_groups[0]
        settings.append((float(group["lr"]), group["betas"], scheduler.last_epoch))
    assert settings[0] == settings[1]


def test_finite_numbers_whose_sum_overflows_are_healthy(make_trainer):
    model = make_model()
    model.register_buffer("huge", torch.full((2,), 3e38))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss_fn(model, batch):
        return mse(model, batch) * 1e-6 + 3e38

    trainer = make_trainer(
        model, optimizer=optimizer, loss_fn=loss_fn, train_data=make_batches(6), config={"loop": {"host_read_every": 3}}
    )
    assert trainer.fit().steps == 6


class Switching(torch.nn.Linear):
    def forward(self, x):
        if torch.isnan(x).any():
            self.eval()
        return super().forward(x)


def test_modes_of_a_refused_step_are_restored_when_reads_are_deferred(make_trainer):
    model = Switching(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    make_trainer(
        model, optimizer=optimizer, train_data=make_batches(6, bad=(4,)), config={"loop": {"host_read_every": 6}}
    ).fit()
    assert model.training


def test_the_ema_of_float64_weights_does_not_depend_on_deferred_reads(make_trainer):
    averages = []
    for every in (1, 4):
        torch.manual_seed(1)
        model = make_model(dropout=0.0).double()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        data = [(x.double(), y.double()) for x, y in make_batches(8)]
        config = {"loop": {"host_read_every": every, "ema": 0.9}, "guards": {"clip": None}}
        trainer = make_trainer(model, optimizer=optimizer, train_data=data, config=config)
        trainer.fit()
        averages.append(trainer.ema.state_dict())
    assert_same(*averages)


@pytest.mark.parametrize("every", [1, 3])
def test_a_failing_schedule_leaves_a_complete_step_and_a_saved_state(make_trainer, every):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=5)
    config = {"loop": {"host_read_every": every, "max_steps": 20}}
    trainer = make_trainer(model, optimizer=optimizer, scheduler=scheduler, train_data=make_batches(20), config=config)
    with pytest.raises(UsageError, match=r"OneCycleLR failed after step 5(.|\n)*loop\.max_steps"):
        trainer.fit()
    assert trainer.run.result.steps == 6
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    assert (trainer.run.dir / "checkpoints" / "last").resolve().name == "step-00000006"
    assert all(p.grad is None for p in model.parameters())
