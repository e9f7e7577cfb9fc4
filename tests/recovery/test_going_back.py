"""Rungs that give up a step: skip, roll back, restart or stop. Each alone recovers the run, and each ends with its budget."""

import math
from functools import partial

import pytest
import torch
from records import journal
from small import assert_same, deep_state, make_batches, make_model
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer

KEEP = {"checkpoint": {"snapshot_every": 5, "trust_after": 2}}
DISK = {"checkpoint": {"snapshot_every": None, "every_steps": 5}}


class Spoiling(SafeTrainer):
    """A weight becomes NaN after each of these attempted steps. Keeps which batches were seen, and what guards had learned."""

    at = (12,)

    def training_step(self, model, batch):
        if torch.is_grad_enabled():
            seen = vars(self).setdefault("seen", {})
            seen.setdefault(self.step, float(batch[1][0, 0].detach()))
        return super().training_step(model, batch)

    def on_commit(self, view):
        learned = vars(self).setdefault("learned", {})
        learned[view.step] = {guard.name: guard.state_dict() for guard in self.guards}
        if view.step in self.at:
            with torch.no_grad():
                self.model[0].weight[0, 0] = math.nan


class Twice(Spoiling):
    at = (12, 14)


def rollbacks_of(result):
    return [(e["to_step"], e["committed"], e["source"]) for e in journal(result) if e["event"] == "rollback"]


def test_skipped_bad_batches_leave_no_trace(make_trainer, check_saved):
    batches, states = make_batches(12, bad=(4, 8)), []
    for data in ([b for i, b in enumerate(batches) if i not in (4, 8)], batches):
        torch.manual_seed(1)
        trainer = make_trainer("skip", train_data=data)
        if data is batches:
            result = trainer.fit()
            assert [(i.step, i.decision.action) for i in result.incidents] == [(4, "skip"), (8, "skip")]
            assert [e["action"] for e in journal(result) if e["event"] == "step"].count("skip") == 2
            assert (result.steps, result.skipped) == (10, 2)
        else:
            assert trainer.fit().healthy
        states.append(deep_state(trainer))
    assert_same(*states)


@pytest.mark.parametrize(
    ("bad", "budget_steps", "reason"),
    [
        ((4, 6, 8), 10_000, "3 refused steps in this run, recovery.max_refusals is 2"),
        ((4, 20, 38), None, "3 refused steps in this run, recovery.max_refusals is 2"),
        (
            (4, 30, 32, 34),
            20,
            "3 refused steps in the last 20 steps (recovery.budget_steps), recovery.max_refusals is 2",
        ),
    ],
)
def test_skipping_ends_with_its_budget(make_trainer, check_stopped, bad, budget_steps, reason):
    recovery = {"max_refusals": 2, "budget_steps": budget_steps}
    result = check_stopped(make_trainer("skip", train_data=make_batches(40, bad=bad), recovery=recovery), reason)
    assert (result.steps, result.skipped) == (bad[-1] - len(bad) + 1, len(bad))


def test_refusals_long_ago_do_not_count(make_trainer):
    data = make_batches(40, bad=(4, 8, 30, 34))
    trainer = make_trainer("skip", train_data=data, recovery={"max_refusals": 2, "budget_steps": 20})
    result = trainer.fit()
    assert (result.status, result.skipped) == ("done", 4)
    assert trainer.ladder.refused == [30, 34]


class Table(SafeTrainer):
    """A parameter for each batch. At step 40 all are spoiled but the one just learned: only other batches tell."""

    def on_commit(self, view):
        if view.step == 40:
            with torch.no_grad():
                kept = self.model.weight[view.step % 8].clone()
                self.model.weight.fill_(1e4)
                self.model.weight[view.step % 8] = kept


def test_a_state_that_only_fits_the_last_batch_is_rolled_back(make_trainer):
    def loss_fn(model, batch):
        return model(batch).square().mean() + 1.0

    model = nn.Embedding(8, 4)
    data = [torch.tensor([index]) for index in range(8)] * 12
    config = {**KEEP, "guards": {"clip": None, "stall": None, "rollback": None}}
    parts = {"loss_fn": loss_fn, "optimizer": partial(torch.optim.SGD, lr=0.1), "train_data": data, "config": config}
    result = make_trainer(cls=Table, model=model, **parts).fit()
    assert [(i.step, i.decision.action) for i in result.incidents] == [(41, "rollback")]
    assert "a good batch from a few steps ago is bad now too" in str(result.incidents[0].decision.reasons)
    assert result.final_loss < 2.0


class Looking(Spoiling):
    def on_incident(self, incident):
        self.after_rollback = {guard.name: guard.state_dict() for guard in self.guards}


def test_a_bad_state_is_rolled_back_to_the_newest_trusted_snapshot(make_trainer, check_saved):
    """With the baselines of the guards; what became NaN in training is not blamed on initialisation."""
    trainer = make_trainer("rollback", cls=Looking, train_data=make_batches(30), config=KEEP)
    reason = "went back to the state of step 10 (memory), 3 committed steps undone"
    result = check_saved(trainer, steps=26, incidents={13: "rollback"}, rung="rollback", reason=reason)
    assert rollbacks_of(result) == [(10, 10, "trusted")]
    assert result.rollbacks == 1
    assert trainer.after_rollback == trainer.learned[9]  # the snapshot was taken after the tenth step
    assert trainer.after_rollback != trainer.learned[12]
    (incident,) = result.incidents
    assert incident.cause.label == "corrupt_parameter"
    assert "an update before it, or something between the steps" in incident.cause.explanation
    assert incident.fix.startswith("look at the optimizer, or reload it")


def test_a_repeated_rollback_picks_an_older_snapshot_and_repeats_no_batch(make_trainer, check_saved):
    batches = make_batches(30)
    trainer = make_trainer("rollback", cls=Twice, train_data=batches, config=KEEP)
    reason, incidents = "went back to the state of step", {13: "rollback", 15: "rollback"}
    result = check_saved(trainer, steps=19, incidents=incidents, rung="rollback", reason=reason)
    assert rollbacks_of(result) == [(10, 10, "trusted"), (5, 5, "trusted")]
    assert list(trainer.seen.values()) == [float(targets[0, 0]) for _, targets in batches]


class TransientAndSpoiling(Spoiling):
    """A NaN that does not come again at step 11, between the snapshot and the ruin."""

    def training_step(self, model, batch):
        loss = super().training_step(model, batch)
        if self.step == 11 and not vars(self).get("is_over"):
            self.is_over = True
            return loss * math.nan
        return loss


def test_a_rollback_does_not_rewind_budgets(make_trainer):
    trainer = make_trainer("retry", "rollback", cls=TransientAndSpoiling, train_data=make_batches(30), config=KEEP)
    result = trainer.fit()
    assert [(i.step, i.decision.action) for i in result.incidents] == [(11, "commit"), (13, "rollback")]
    assert trainer.ladder.spent == {"retry": [11], "rollback": [13]}
    assert trainer.ladder.refused == [13]


@pytest.mark.parametrize("config", [KEEP, DISK])
@pytest.mark.parametrize("ladder", [("rollback", "disk"), ("disk", "rollback")])
def test_rollbacks_to_memory_and_disk_share_a_budget(make_trainer, check_stopped, ladder, config):
    parts = {"train_data": make_batches(30), "config": config, "recovery": {"max_rollbacks": 1}}
    trainer = make_trainer(*ladder, cls=Twice, **parts)
    result = check_stopped(trainer, "its budget of 1 is spent", "nothing is left to try")
    assert (result.rollbacks, [i.step for i in result.incidents]) == (1, [13, 15])


def test_without_snapshots_the_run_rolls_back_to_disk(make_trainer, check_saved):
    trainer = make_trainer("disk", cls=Spoiling, train_data=make_batches(30), config=DISK)
    reason = "went back to the state of step 10 (disk), 3 committed steps undone"
    result = check_saved(trainer, steps=26, incidents={13: "rollback"}, rung="disk", reason=reason)
    assert rollbacks_of(result) == [(10, 10, "disk")]


def test_a_rollback_without_any_saved_state_stops(make_trainer, check_stopped):
    nothing = {"checkpoint": {"snapshot_every": None, "enabled": False}}
    trainer = make_trainer("rollback", "disk", cls=Spoiling, train_data=make_batches(30), config=nothing)
    check_stopped(trainer, "rollback: there is nothing to go back to", "disk: there is nothing to go back to")


def too_fast(make_trainer, lr, **parts):
    """An MLP on plain data, with a learning rate that is far too high from the start."""
    torch.manual_seed(0)
    directions = torch.randn(6, 1)
    batches = [(inputs, torch.tanh(inputs @ directions)) for inputs in (torch.randn(32, 6) for _ in range(50))]
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    parts |= {"optimizer": partial(torch.optim.SGD, lr=lr), "config": {"loop": {"max_steps": 250}}}
    return make_trainer(model=model, train_data=batches, **parts)


def test_a_learning_rate_far_too_high_is_recovered_by_a_restart(make_trainer):
    trainer = too_fast(make_trainer, 1.0, recovery={"ladder": ["restart"]})
    result = trainer.fit()
    (incident,) = result.incidents
    assert any(reason.startswith("restart: went back to the state of step 0") for reason in incident.decision.reasons)
    assert rollbacks_of(result) == [(0, 0, "first")]
    assert result.steps == 250
    assert result.final_loss < 0.4 * result.losses[0] < 0.1 * max(result.losses)
    steps = [event for event in journal(result) if event["event"] == "step" and event["action"] == "commit"]
    assert steps[-1]["lr"] <= 0.1 + 1e-6  # the rate that failed is not returned to


def classify(make_trainer, lr, easy=1.0, **parts):
    """Three classes, Adam. `easy`: what the loss of the first batch is multiplied by."""
    torch.manual_seed(0)
    directions = torch.randn(6, 3)
    inputs, factors = [torch.randn(64, 6) for _ in range(120)], [easy] + [1.0] * 119
    batches = [(x, (x @ directions).argmax(1), factor) for x, factor in zip(inputs, factors, strict=True)]
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    return make_trainer(
        model=model,
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * batch[2],
        optimizer=partial(torch.optim.AdamW, lr=lr),
        train_data=batches,
        **parts,
    )


def test_first_steps_that_raised_the_loss_are_rolled_back(make_trainer):
    result = classify(make_trainer, 3.0).fit()
    incident = result.incidents[0]
    assert (incident.step, incident.decision.action) == (7, "rollback")
    assert "times their size" in incident.decision.reasons[0]
    assert rollbacks_of(result)[0] == (0, 0, "first")
    assert result.final_loss < 0.25 * result.losses[0]


def test_an_easy_first_batch_is_no_incident_and_changes_nothing(make_trainer):
    states, calls = [], []
    for stall in ({}, None):
        trainer = classify(make_trainer, 0.1, easy=0.2, config={"guards": {"stall": stall}})
        count = trainer.training_step
        num_calls = 0

        def counted(model, batch, count=count):
            nonlocal num_calls
            num_calls += 1
            return count(model, batch)

        trainer.training_step = counted
        assert trainer.fit().healthy
        states.append(deep_state(trainer))
        calls.append(num_calls)
    assert calls[0] > calls[1]  # it was looked at: with the weights of the start, and at a lower rate
    assert_same(*states)


@pytest.mark.parametrize("budget", [0, 1])
def test_restarts_end_with_their_budget(make_trainer, check_stopped, budget):
    trainer = too_fast(make_trainer, 1e9, recovery={"ladder": ["restart"], "max_restarts": budget})
    result = check_stopped(trainer, f"restart: its budget of {budget} is spent", "nothing is left to try")
    assert result.rollbacks == budget
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


class Remembering(SafeTrainer):
    def on_commit(self, view):
        self.kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def test_at_the_end_of_the_ladder_the_run_stops_without_an_update(make_trainer, check_stopped):
    trainer = make_trainer(cls=Remembering, train_data=make_batches(8, bad=(5,)), recovery={"ladder": []})
    result = check_stopped(trainer, "finite: the loss is nan", "recovery: nothing is left to try")
    assert (result.steps, result.attempted) == (5, 6)
    assert_same(dict(trainer.model.state_dict()), trainer.kept)
    assert result.incidents[-1].cause.label == "bad_input_data"


def test_bad_data_in_a_row_is_distinguished_from_a_bad_state(make_trainer):
    """Rollback comes before skip here, and still only what is at fault is given up."""
    batches = make_batches(40, bad=range(20, 34))
    trainer = make_trainer("skip", "rollback", train_data=batches, config=KEEP)
    result = trainer.fit()
    assert (result.steps, result.skipped, result.rollbacks) == (26, 14, 0)
    assert "the data is at fault, not the state" in " ".join(result.incidents[-1].decision.reasons)


def test_the_default_ladder_recovers_from_every_kind_of_fault(make_trainer):
    """The whole ladder, and a fault for each of its ends."""
    batches = make_batches(40, bad=(20,))
    batches[25][0][3] = math.nan
    trainer = make_trainer(cls=Spoiling, train_data=batches, config=KEEP)
    result = trainer.fit()
    assert [(i.step, i.decision.action) for i in result.incidents] == [(13, "rollback"), (20, "skip"), (25, "commit")]
    assert F.mse_loss(trainer.model(batches[0][0]), batches[0][1]).isfinite()


def test_a_parameter_that_was_never_finite_is_named_with_cause_and_fix(make_trainer, check_stopped):
    model = make_model(dropout=0.0)
    with torch.no_grad():
        model[4].weight[0, 3] = math.nan
    trainer = make_trainer(model=model, train_data=make_batches(4))
    result = check_stopped(trainer, "4.weight (1 NaN of 16 values)", "nothing is left to try")
    incident = result.incidents[0]
    origin = incident.origin
    assert (origin.phase, origin.op, origin.module, origin.module_type) == ("params", "parameter", "4", "Linear")
    assert origin.inputs[0]["nan"] == 1
    assert incident.cause.label == "corrupt_parameter"
    assert "initialise it" in incident.fix


def test_a_weight_that_breaks_between_steps_has_an_unknown_cause(make_trainer):
    config = {**KEEP, "guards": {"finite": {"state_every": 1000}}}

    class Late(Spoiling):
        at = (14,)  # the snapshot is taken before the next step is

    result = make_trainer("rollback", cls=Late, train_data=make_batches(30), config=config).fit()
    first = result.incidents[0]
    assert (first.trigger.guard, first.decision.action) == ("audit", "rollback")
    assert (first.origin.phase, first.origin.module) == ("params", "0")
    assert first.cause.label == "unknown"
    assert "parameter 0.weight is not finite after a step" in first.cause.explanation
