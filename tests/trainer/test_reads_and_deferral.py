"""How often the host waits for the device, and what is late when it waits less."""

import math

import pytest
import torch
from host_reads import HostReads, count_tolist
from small import assert_same, make_batches, make_model, mse

from safetrain import SafeTrainer, TrainingStopped, UsageError

OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("accum", [1, 3])
def test_a_healthy_step_reads_the_host_once(make_trainer, monkeypatch, optimizer, precision, accum):
    model = make_model()
    opt = OPTIMIZERS[optimizer](model.parameters())
    config = {
        "loop": {"precision": precision, "grad_accum": accum},
        "guards": {"clip": {"mode": "norm", "max_norm": 0.1}},
    }
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
def test_deferred_reads_never_apply_a_bad_update_and_tell_the_right_step(make_trainer, name):
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


def test_deferral_needs_an_optimizer_that_can_skip_on_the_device(make_trainer):
    trainer = make_trainer(train_data=make_batches(2), config={"loop": {"host_read_every": 4}})
    with pytest.raises(UsageError, match="fused=True"):
        trainer.fit()


@pytest.mark.parametrize(
    "config",
    [
        {"loop": {"host_read_every": 4, "precision": "fp16"}},
        {"loop": {"host_read_every": 4}, "guards": {"finite": {"drop_micro_batch": True}}},
    ],
)
def test_what_cannot_be_deferred_is_said(make_trainer, config):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = make_trainer(model, SafeTrainer, optimizer=optimizer, train_data=make_batches(2), config=config)
    with pytest.raises(UsageError, match="host_read_every"):
        trainer.fit()
