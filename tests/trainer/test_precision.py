"""fp32, bf16 and fp16: the configured precision is used, and overflows of the loss scaler are normal up to a limit."""

import math
from functools import partial

import pytest
import torch
from small import make_batches, make_model, mse
from torch import nn

from safetrain import TrainingStopped, UsageError


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_pass_runs_in_the_precision_asked_for(make_trainer, precision, dtype):
    seen = set()

    def loss_fn(model, batch):
        out = model(batch[0])
        seen.add(out.dtype)
        return (out.float() - batch[1]).square().mean()

    result = make_trainer(loss_fn=loss_fn, train_data=make_batches(5), config={"loop": {"precision": precision}}).fit()
    assert seen == {dtype}
    assert not result.incidents


def test_scaler_overflow_is_counted_and_no_incident(make_trainer):
    """65536, the first scale, times a gradient of a few hundred does not fit fp16."""

    config = {"loop": {"precision": "fp16"}}
    trainer = make_trainer(loss_fn=lambda m, b: mse(m, b) * 100, train_data=make_batches(20), config=config)
    result = trainer.fit()
    assert result.overflows > 0
    assert result.skipped == result.overflows
    assert result.incidents == []
    assert result.healthy
    assert trainer.precision._scaler.get_scale() == 65536 * 0.5**result.overflows


def test_an_overflowed_step_changes_only_the_loss_scale(make_trainer):
    model = make_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = {"loop": {"precision": "fp16"}}
    trainer = make_trainer(model, loss_fn=lambda m, b: mse(m, b) * 1e4, train_data=make_batches(1), config=config)
    result = trainer.fit()
    assert (result.steps, result.overflows) == (0, 1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not trainer.optimizer.state


@pytest.mark.parametrize(
    ("finite", "reason"),
    [
        ({"max_overflows": 5}, "6 fp16 overflows in a row"),
        ({"min_loss_scale": 2048.0}, "loss scale collapsed to 1.02e\\+03"),
    ],
)
def test_a_collapsing_scale_is_an_incident(make_trainer, finite, reason):
    def loss_fn(model, batch):
        out = model(batch[0]).float()
        return out.mean() + (out - out.detach()).abs().sqrt().sum()  # an infinite gradient at every scale

    config = {"loop": {"precision": "fp16"}, "guards": {"finite": {"max_consecutive": 3, **finite}}}
    with pytest.raises(TrainingStopped, match=reason) as stopped:
        make_trainer(loss_fn=loss_fn, train_data=make_batches(40), config=config).fit()
    assert stopped.value.result.incidents[0].trigger.signal == "loss_scale"
    assert stopped.value.result.overflows in (5, 6)


@pytest.mark.parametrize(
    ("environment", "loop", "message"),
    [
        ({}, {"precision": "fp16"}, "float32"),
        ({}, {"device": "cuda:99"}, r"loop\.device is 'cuda:99'"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "launched with mixed precision fp16"),
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE is 2 but"),
    ],
)
def test_what_cannot_be_used_is_an_error_at_the_start(make_trainer, monkeypatch, environment, loop, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = make_model().half() if "precision" in loop else make_model()
    with pytest.raises(UsageError, match=message):
        make_trainer(model, train_data=make_batches(1), config={"loop": loop})


def test_learning_in_fp16_matches_fp32_closely(make_trainer):
    x = torch.randn(64, 6)
    data = [(x, x.sum(1, keepdim=True))] * 150
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        torch.manual_seed(1)
        parts = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "config": {"loop": {"precision": precision}}}
        trainer = make_trainer(make_model(dropout=0.0, norm=False), train_data=data, **parts)
        losses[precision] = trainer.fit().final_loss
    assert losses["fp32"] < 0.5
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.3)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.3)


def test_loss_that_is_nan_in_fp16_is_an_incident_at_once(make_trainer):
    class Overflowing(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1e5  # more than fp16 can hold

    config = {"loop": {"precision": "fp16"}, "recovery": {"max_refusals": 0}}
    with pytest.raises(TrainingStopped) as stopped:
        make_trainer(Overflowing(6, 1), train_data=make_batches(2), config=config).fit()
    assert stopped.value.incident.trigger.signal == "loss"
    assert not math.isfinite(stopped.value.incident.trigger.value)


class TwoParts(nn.Module):
    """Only one of its parts is given to the optimizer; which part computes the loss changes."""

    def __init__(self):
        super().__init__()
        self.moved, self.other = nn.Linear(6, 1), nn.Linear(6, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.other(x) + (self.moved(x) if self.calls != 3 else 0.0)


def test_the_scaler_unscales_trainable_parameters_without_an_optimizer(make_trainer):
    norms = {}
    for precision in ("fp32", "fp16"):
        torch.manual_seed(1)
        model = TwoParts()
        optimizer = torch.optim.SGD(model.moved.parameters(), lr=1e-3)
        seen = norms.setdefault(precision, [])
        parts = {"optimizer": optimizer, "train_data": make_batches(5), "config": {"loop": {"precision": precision}}}
        trainer = make_trainer(model, loss_fn=lambda m, b: mse(m, b) * 1e-2, **parts)  # so small that nothing overflows
        trainer.on_commit = lambda view, seen=seen: seen.append(view.grad_norm)
        result = trainer.fit()
        assert (result.steps, result.skipped) == (5, 0)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.02)
