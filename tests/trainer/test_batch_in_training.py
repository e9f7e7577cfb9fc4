"""The batch guard in a run."""

import math

import pytest
import torch
from small import assert_same, fused_adamw, make_batches, make_model, with_bad_samples
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer, TrainingStopped

ON = {"guards": {"batch": {}}}


def test_the_guilty_samples_are_in_the_verdict(make_trainer):
    trainer = make_trainer(train_data=with_bad_samples(make_batches(6), (2, (0, 0)), (4, (0, 0))), config=ON)
    seen, judge = {}, trainer.stepper.judge

    def watching(view):
        decision = judge(view)
        seen.setdefault(view.step, decision.verdicts["batch"].evidence)  # a repaired step is judged again
        return decision

    trainer.stepper.judge = watching
    result = trainer.fit()
    assert [i.step for i in result.incidents] == [2, 4]
    assert seen[2]["samples"] == [0]
    assert seen[2]["fields"] == ["0"]
    assert result.incidents[0].trigger.guard == "batch"


@pytest.mark.parametrize(("action", "steps"), [("drop", 3), ("skip", 2)])
def test_dropping_samples_combines_with_dropping_micro_batches(make_trainer, action, steps):
    guards = {"batch": {"action": action}, "finite": {"drop_micro_batch": True}}
    config = {"loop": {"grad_accum": 2}, "guards": guards}
    result = make_trainer(train_data=make_batches(6, bad=(3,)), config=config).fit()
    assert result.steps == steps
    (incident,) = result.incidents
    assert "batch: field '0' holds 48 NaN in row 0, 1, 2, 3, 4, 5, 6, 7" in incident.decision.reasons


def test_a_stored_view_holds_no_batch(make_trainer):
    views = []

    class Keeping(SafeTrainer):
        def on_commit(self, view):
            assert len(view.window()) == 2
            views.append(view)

    make_trainer(cls=Keeping, train_data=make_batches(6), config={"loop": {"grad_accum": 2}}).fit()
    assert [view.window() for view in views] == [(), (), ()]


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled(count, bad=()):
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(count)]
    for index in bad:
        batches[index][1][5] = 3
    return batches


def classifier():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_a_label_that_makes_the_loss_raise_is_a_refused_step(make_trainer):
    """On a GPU it would be a device assert; on the CPU an IndexError, after the forward pass wrote to the buffers."""
    model = classifier()
    config = {**ON, "recovery": {"heal": []}}
    result = make_trainer(model, loss_fn=classify, train_data=labelled(5, bad=(1,)), config=config).fit()
    (incident,) = result.incidents
    assert (result.steps, incident.step, incident.trigger.signal) == (4, 1, "labels")
    assert "holds the label 3, outside the 3 classes of the model's output in row 5" in incident.decision.reasons[0]
    assert any("IndexError: Target 3 is out of bounds" in reason for reason in incident.decision.reasons)
    assert int(model[1].num_batches_tracked) == 4
    assert math.isnan(result.losses[1])


def test_labels_that_are_always_wrong_stop_the_run_with_the_diagnosis(make_trainer):
    config = {**ON, "recovery": {"heal": []}}
    trainer = make_trainer(classifier(), loss_fn=classify, train_data=labelled(20, bad=range(20)), config=config)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.fit()
    assert any("outside the 3 classes" in reason for reason in stopped.value.incident.decision.reasons)


@pytest.mark.parametrize("compile_with", [False, "aot_eager"])
def test_the_class_dimension_is_seen_in_a_compiled_model_too(make_trainer, compile_with):
    config = {**ON, "loop": {"compile": compile_with}}
    result = make_trainer(classifier(), loss_fn=classify, train_data=labelled(4, bad=(2,)), config=config).fit()
    assert [(i.step, i.trigger.signal) for i in result.incidents] == [(2, "labels")]


def test_nan_in_masked_targets_is_healthy(make_trainer):
    def loss_fn(model, batch):
        known = ~batch[1].isnan()
        return (model(batch[0])[known] - batch[1][known]).square().mean()

    batches = make_batches(10)
    for _, targets in batches:
        targets[3] = math.nan
    states = []
    for config in ({}, ON):
        torch.manual_seed(1)
        model = make_model()
        assert make_trainer(model, loss_fn=loss_fn, train_data=batches, config=config).fit().healthy
        states.append(model.state_dict())
    assert_same(*states)
    config = {"guards": {"batch": {"only_if_bad": False}}}
    assert make_trainer(loss_fn=loss_fn, train_data=batches, config=config).fit().steps == 0
    config = {"guards": {"batch": {"only_if_bad": False, "ignore": ["1"]}}}
    assert make_trainer(loss_fn=loss_fn, train_data=batches, config=config).fit().healthy


def test_with_deferred_reads_the_samples_are_still_found(make_trainer):
    config = {**ON, "loop": {"host_read_every": 4}}
    result = make_trainer(optimizer=fused_adamw, train_data=make_batches(9, bad=(5,)), config=config).fit()
    (incident,) = result.incidents
    assert (incident.step, incident.trigger.guard) == (5, "batch")
    assert "in row 0" in incident.decision.reasons[0]
