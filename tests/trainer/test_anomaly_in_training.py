"""Anomaly mode over a whole run: an error that it raises is a refused step, not the end of the run."""

import math

import pytest
import torch
from small import assert_same, deep_state, fused_adamw, make_batches

from safetrain import SafeTrainer, TrainingStopped, UsageError

# torch reports the forward traceback as a warning
pytestmark = pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
ALWAYS = {"guards": {"anomaly": {"mode": "always"}}, "recovery": {"heal": []}}


def where_trap(model, batch):
    """A finite loss whose gradient is NaN if the first input is exactly 7: the square root is masked, its derivative is not."""
    out = model(batch[0])
    gap = (batch[0][0, 0] - 7.0) * out.sum()
    root = torch.where(gap == 0, torch.zeros(()), torch.sqrt(gap.abs()))
    return (out - batch[1]).square().mean() + 0.0 * root


def marked(count, bad):
    batches = make_batches(count)
    for index in bad:
        batches[index][0][0, 0] = 7.0
    return batches


def test_an_error_of_anomaly_mode_is_a_refused_step_with_its_message(make_trainer):
    seen = {}

    class Watching(SafeTrainer):
        def on_commit(self, view):
            seen["before"] = deep_state(self)

        def on_incident(self, incident):
            seen["incident"] = incident
            assert_same(deep_state(self), seen["before"])
            assert all(p.grad is None for p in self.model.parameters())

    trainer = make_trainer(cls=Watching, loss_fn=where_trap, train_data=marked(8, (5,)), config=ALWAYS)
    result = trainer.fit()
    assert (result.steps, result.skipped) == (7, 1)
    assert seen["incident"].step == 5
    assert seen["incident"].trigger.guard == "anomaly"
    assert "returned nan values in its 0th output" in seen["incident"].trigger.value
    assert math.isnan(result.losses[5])
    assert not torch.is_anomaly_enabled()


def test_refusals_by_anomaly_mode_are_bounded_like_all_others(make_trainer):
    config = {**ALWAYS, "recovery": {"max_refusals": 3, "heal": []}}
    trainer = make_trainer(loss_fn=where_trap, train_data=marked(8, range(8)), config=config)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.fit()
    assert stopped.value.result.skipped == 4
    assert not torch.is_anomaly_enabled()


def test_with_deferred_reads_the_step_numbers_stay_right(make_trainer):
    parts = {"optimizer": fused_adamw, "config": {**ALWAYS, "loop": {"host_read_every": 4}}}
    result = make_trainer(loss_fn=where_trap, train_data=marked(10, (5,)), **parts).fit()
    assert [incident.step for incident in result.incidents] == [5]
    assert result.steps == 9
    assert [math.isnan(loss) for loss in result.losses] == [step == 5 for step in range(10)]


def test_anomaly_mode_with_the_fp16_loss_scaler_is_an_error(make_trainer):
    config = {**ALWAYS, "loop": {"precision": "fp16"}}
    with pytest.raises(UsageError, match="mode=replay"):
        make_trainer(loss_fn=where_trap, train_data=marked(2, (0, 1)), config=config).fit()


def test_its_message_on_replay_is_part_of_the_explanation(make_trainer):
    config = {"guards": {"anomaly": {}}, "recovery": {"heal": []}}
    result = make_trainer(loss_fn=where_trap, train_data=marked(8, (5,)), config=config).fit()
    (incident,) = result.incidents
    assert "anomaly mode says: Function 'SqrtBackward0' returned nan values" in incident.cause.explanation
