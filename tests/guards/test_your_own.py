"""Everything that recovery can be asked for by a verdict, asked for by a guard that is not one of ours."""

import itertools
import json
import math

import pytest
import torch
from small import make_batches
from torch import nn
from torch.utils.data import TensorDataset

from safetrain import Action, Guard, SafeTrainer, UsageError, Verdict
from safetrain.verdict import Doubt

AT = 30
"""The step that guards of these tests answer at."""


class Answers(Guard):
    """Gives one verdict, at the attempts of one step."""

    def __init__(self, action=Action.COMMIT, reason="asked for", at=AT, if_bad=False, **fields):
        super().__init__()
        self.answer = Verdict(action, reason=reason, **fields)
        self.at, self.if_bad = at, if_bad
        self.lr_scales = []

    def judge(self, view):
        asked = view.step == self.at and (view.in_trouble or not self.if_bad)
        return self.answer if asked else Verdict()

    def learn(self, view, decision):
        self.lr_scales.append(decision.lr_scale)


class Spoiled(SafeTrainer):
    """After step AT - 1 the weights are a hundred times as large."""

    def on_commit(self, view):
        if view.step == AT - 1:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(100)


def squared(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def make_data(count=AT + 20, size=8):
    return [(x, x.sum(1, keepdim=True)) for x in torch.randn(count, size, 4)]


def train(tmp_path, guard, train_data=None, cls=SafeTrainer, ours=(), loss_fn=squared, **config):
    """`ours`: what of the guards that are on by default stays on."""
    off = {"finite", "spike", "rollback", "stall"} - set(ours)
    model = nn.Linear(4, 1)
    trainer = cls(
        model,
        loss_fn=loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_data=make_data() if train_data is None else train_data,
        config={
            "guards": dict.fromkeys(off),
            "logging": {"console": "off", "tensorboard": False},
            "checkpoint": {"enabled": False, "snapshot_every": 10, "trust_after": 5},
            **config,
        },
        guards=[guard],
        run_dir=tmp_path / "run",
    )
    return trainer.fit()


def only_decision(result):
    (incident,) = result.incidents
    return incident.decision.action, incident.decision.reasons[-1]


@pytest.mark.parametrize("salvage", [True, False])
def test_salvage_leaves_out_the_bad_micro_batch(tmp_path, salvage):
    data = make_data(2 * AT + 10)
    data[2 * AT + 1][0].fill_(math.nan)
    guard = Answers(Action.SKIP, salvage=salvage, if_bad=True)
    result = train(tmp_path, guard, data, loop={"grad_accum": 2})
    action, reason = only_decision(result)
    if salvage:
        assert (action, reason) == ("commit", "micro_batch: micro-batch 1 of 2 left out (counted from 0)")
    else:
        assert action == "skip"


def test_salvage_is_not_for_what_another_guard_refuses_altogether(tmp_path):
    data = make_data(2 * AT + 10)
    data[2 * AT + 1][0].fill_(math.nan)
    result = train(tmp_path, Answers(Action.SKIP, salvage=True), data, ours=["finite"], loop={"grad_accum": 2})
    assert only_decision(result)[0] == "skip"


class Outlier(Guard):
    """Refuses a batch with a row that is far too large, and names the row; its loss is finite."""

    def judge(self, view):
        rows = {}
        for index, (inputs, _) in enumerate(view.window()):
            found = (inputs.abs().amax(1) > 100).nonzero().flatten().tolist()
            if found:
                rows[index] = found
        if not rows:
            return Verdict()
        return Verdict(Action.SKIP, reason="a row is far too large", bad_samples=rows)


def test_bad_samples_are_counted_and_left_out_of_later_epochs(tmp_path):
    inputs = torch.randn(64, 4)
    inputs[37] = 1e4
    result = train(
        tmp_path,
        Outlier(),
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        loop={"max_epochs": 4},
        data={"batch_size": 8},
        recovery={"quarantine_after": 2},
    )
    assert result.quarantined == [37]
    assert [incident.decision.reasons[-1] for incident in result.incidents] == [
        "quarantine: sample 37 of the data set has caused 1 of 2 incidents",
        "quarantine: sample 37 of the data set has caused 2 incidents: it is left out of later epochs",
    ]
    assert (result.epochs, result.skipped) == (4, 2)


@pytest.mark.parametrize("bad_state", [{}, {"weight": "spoiled"}])
def test_of_a_bad_state_the_step_is_not_repaired(tmp_path, bad_state):
    data = make_data()
    data[AT][0][3] = math.nan
    result = train(tmp_path, Answers(Action.ROLLBACK, bad_state=bad_state, if_bad=True), data)
    action, reason = only_decision(result)
    if bad_state:
        assert action == "rollback"
        assert reason.startswith("rollback: went back to the state of step 20")
    else:
        assert (action, reason) == ("commit", "samples: sample 3 of the batch left out, the rest committed")


def test_after_a_bad_state_an_update_that_ruins_it_again_is_taken_back(tmp_path):
    calls = itertools.count(1)  # not an attribute of the optimizer, which would be undone with the step

    class Ruins(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if next(calls) == AT + 5:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].fill_(math.nan)

    model = nn.Linear(4, 1)
    trainer = SafeTrainer(
        model,
        loss_fn=squared,
        optimizer=Ruins(model.parameters(), lr=0.01),
        train_data=make_data(),
        config={"logging": {"console": "off", "tensorboard": False}, "checkpoint": {"enabled": False}},
        guards=[Answers(Action.ROLLBACK, bad_state={"weight": "spoiled"})],
        run_dir=tmp_path / "run",
    )
    first, second = trainer.fit().incidents
    assert first.decision.action == "rollback"
    assert (second.trigger.guard, second.decision.action) == ("update", "skip")
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("cls", [SafeTrainer, Spoiled])
def test_a_rollback_only_if_the_state_is_bad(tmp_path, cls):
    result = train(tmp_path, Answers(Action.ROLLBACK, if_state_is_bad=True), cls=cls)
    action, reason = only_decision(result)
    if cls is Spoiled:
        assert action == "rollback"
        assert reason.startswith("rollback: went back to the state of step 20")
    else:
        assert action == "skip"
        assert reason == "skip: the last good batch is as good as it was: the data is at fault, not the state"


@pytest.mark.parametrize(("expected_loss", "scale"), [(None, 0.1), (1.0, 0.1), (1e-9, 0.01)])
def test_a_restart_begins_again_at_a_lower_rate(tmp_path, expected_loss, scale):
    data = make_data()
    data[AT] = (data[AT][0], data[AT][1] + 1.0)
    guard = Answers(Action.ROLLBACK, restart=True, expected_loss=expected_loss)
    result = train(tmp_path, guard, data)
    action, reason = only_decision(result)
    assert action == "rollback"
    assert reason.startswith("restart: went back to the state of step 0")
    assert guard.lr_scales[:AT] == [1.0] * AT
    assert guard.lr_scales[-1] == pytest.approx(scale)


def test_a_restart_is_for_when_the_run_has_to_go_back(tmp_path):
    assert only_decision(train(tmp_path, Answers(Action.SKIP, restart=True)))[0] == "skip"


@pytest.mark.parametrize("doubt", [Doubt.LAST_GOOD_BATCH, Doubt.SINCE_START])
@pytest.mark.parametrize("cls", [SafeTrainer, Spoiled])
def test_a_doubtful_refusal_holds_only_if_the_weights_are_bad(tmp_path, cls, doubt):
    result = train(tmp_path, Answers(Action.SKIP, doubt=doubt), cls=cls)
    assert len(result.incidents) == (1 if cls is Spoiled else 0)
    assert result.attempted == AT + 20
    if cls is SafeTrainer:
        assert result.steps == result.attempted


@pytest.mark.parametrize(("margin", "num_incidents"), [(0.0, 1), (1e9, 0)])
def test_the_margin_is_how_much_worse_than_the_first_weights(tmp_path, margin, num_incidents):
    guard = Answers(Action.SKIP, doubt=Doubt.SINCE_START, doubt_margin=margin)
    assert len(train(tmp_path, guard, cls=Spoiled).incidents) == num_incidents


@pytest.mark.parametrize("detect_anomaly", [True, False])
def test_the_replay_asks_autograds_anomaly_mode(tmp_path, detect_anomaly):
    def with_a_root(model, batch):
        return (model(batch) * 0).sqrt().mean() if batch[0, 0] == 0 else model(batch).square().mean()

    data = list(torch.randn(AT + 10, 8, 4))
    data[AT][0, 0] = 0.0
    guard = Answers(reason="", detect_anomaly=detect_anomaly)
    (incident,) = train(tmp_path, guard, data, ours=["finite"], loss_fn=with_a_root).incidents
    assert incident.origin.phase == "backward"
    assert ("anomaly mode says" in incident.cause.explanation) == detect_anomaly


def test_a_recording_is_kept_with_the_incident(tmp_path):
    class Recorder(Answers):
        def records(self):
            return [{"learned": len(self.lr_scales)}]

    guard = Recorder(Action.SKIP, recording={"gap": 1.5})
    (incident,) = train(tmp_path, guard).incidents
    recorded = json.loads((tmp_path / "run" / incident.path / "flight_recorder.json").read_text())
    assert recorded == {"recorder": {"before": [{"learned": AT}], "refused": {"gap": 1.5}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"doubt": "last_good"},
        {"bad_samples": [5]},
        {"bad_state": ["weight"]},
        {"evidence": None},
        {"expected_loss": "x"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_field_of_the_wrong_type_is_an_error(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Verdict(Action.SKIP, reason="not this one", **fields)


@pytest.mark.parametrize("rows", [{0: [500]}, {7: [0]}, {"0": [1]}, {0: [1.0]}, {0: 1}], ids=str)
def test_rows_that_are_not_there_are_an_error_that_names_the_guard(make_trainer, rows):
    class Naming(Guard):
        def judge(self, view):
            return Verdict(Action.SKIP, reason="bad rows", bad_samples=rows) if view.step == 2 else Verdict()

    data = TensorDataset(torch.randn(32 * 6, 6), torch.randn(32 * 6, 1))
    trainer = make_trainer(nn.Linear(6, 1), train_data=data, guards=[Naming()])
    with pytest.raises(UsageError, match="guard naming: bad_samples"):
        trainer.fit()


def test_guards_may_be_replaced_and_removed_before_the_run(make_trainer):
    judged = []

    class Watching(Guard):
        def judge(self, view):
            judged.append(view.step)
            return Verdict()

    trainer = make_trainer(train_data=make_batches(3))
    trainer.guards.pop()
    trainer.guards = [*trainer.guards, Watching()]
    trainer.fit()
    assert judged == [0, 1, 2]
