"""Windows of micro-batches, and clipping between backward and the optimizer step."""

import math
from functools import partial

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch import nn

from safetrain import SafeTrainer, TrainingStopped

DROP = {"finite": {"drop_micro_batch": True}, "backoff": None}
ONLY_MICRO_BATCHES = {"heal": []}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_dropping_a_bad_micro_batch_equals_a_window_without_it(make_trainer, precision):
    batches = make_batches(12, bad=(5,))
    states = []
    for data, accum in ((batches, [4, 4, 4]), (batches[:5] + batches[6:], [4, 3, 4])):
        torch.manual_seed(1)
        model = make_model(dropout=0.0)
        config = {"loop": {"grad_accum": 4, "precision": precision}, "guards": DROP, "recovery": ONLY_MICRO_BATCHES}
        trainer = make_trainer(model, train_data=data, config=config, optimizer=partial(torch.optim.SGD, lr=0.1))
        sizes = iter(accum)
        take = trainer.stream.take
        trainer.stream.take = lambda count, take=take, sizes=sizes: take(next(sizes, count))
        result = trainer.fit()
        states.append(model.state_dict())
        assert result.steps + result.overflows == 3
    assert_same(*states)


def test_a_dropped_micro_batch_is_an_incident_that_names_it(make_trainer):
    config = {"loop": {"grad_accum": 4}, "guards": DROP, "recovery": ONLY_MICRO_BATCHES}
    result = make_trainer(train_data=make_batches(8, bad=(2, 3)), config=config).fit()
    (incident,) = result.incidents
    assert (result.steps, result.skipped, result.healthy) == (2, 0, False)
    assert incident.decision.action == "commit"
    assert any("micro-batch 2, 3 of 4 left out" in reason for reason in incident.decision.reasons)


@pytest.mark.parametrize(("guards", "bad", "accum", "outcome"), [(DROP, (0, 1), 2, (3, 1)), ({}, (2,), 4, (1, 1))])
def test_a_window_is_refused_if_all_is_bad_or_nothing_may_be_dropped(make_trainer, guards, bad, accum, outcome):
    config = {"loop": {"grad_accum": accum}, "guards": guards, "recovery": ONLY_MICRO_BATCHES}
    result = make_trainer(train_data=make_batches(8, bad=bad), config=config).fit()
    assert (result.steps, result.skipped) == outcome


def test_a_short_window_is_normalised_by_its_true_count(make_trainer):
    model, seen, batches = nn.Linear(6, 1), [], make_batches(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    config = {"loop": {"grad_accum": 3}, "guards": None}
    make_trainer(model, optimizer=optimizer, train_data=batches, config=config).fit()
    for grad, window in zip(seen, (batches[:3], batches[3:]), strict=True):
        model.zero_grad()
        (sum(mse(model, b) for b in window) / len(window)).backward()
        torch.testing.assert_close(grad, model.weight.grad)


def gradients_seen(make_trainer, model, loss_fn, clip, groups=None):
    seen = []
    optimizer = torch.optim.SGD(groups or model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
    config = {"guards": {"clip": clip}, "loop": {"max_steps": 1}}
    trainer = make_trainer(model, loss_fn=loss_fn, optimizer=optimizer, train_data=make_batches(1), config=config)
    return trainer.fit(), seen[0]


def scaled(factor):
    return lambda model, batch: mse(model, batch) * factor


def norm(tensors):
    return torch.linalg.vector_norm(torch.stack([t.double().norm() for t in tensors])).item()


@pytest.mark.parametrize(
    ("factor", "mode"), [(100.0, "norm"), (1e25, "norm"), (1e25, "group_norm")]
)  # the norm of the huge ones overflows
def test_the_norm_is_clipped_after_backward_and_before_the_step(make_trainer, factor, mode):
    clip = {"mode": mode, "max_norm": 0.5}
    result, grads = gradients_seen(make_trainer, make_model(), scaled(factor), clip)
    assert result.healthy
    assert norm(grads) == pytest.approx(0.5, rel=1e-4)
    assert min(g.abs().max().item() for g in grads if g.abs().max() > 0) > 0


def test_value_clipping(make_trainer):
    _, grads = gradients_seen(make_trainer, make_model(), scaled(100.0), {"mode": "value", "max_value": 0.01})
    assert max(g.abs().max().item() for g in grads) == pytest.approx(0.01)


def test_each_parameter_group_is_clipped_separately(make_trainer):
    model = make_model(norm=False)
    parts = [list(model[0].parameters()), list(model[4].parameters())]
    groups = [{"params": part} for part in parts]
    _, grads = gradients_seen(make_trainer, model, scaled(100.0), {"mode": "group_norm", "max_norm": 0.3}, groups)
    assert norm(grads[:2]) == pytest.approx(0.3, rel=1e-4)
    assert norm(grads[2:]) == pytest.approx(0.3, rel=1e-4)


def views_seen(make_trainer, clip, data, **parts):
    views = []
    trainer = make_trainer(train_data=data, config={"guards": {"clip": clip}}, **parts)
    trainer.on_commit = views.append
    trainer.fit()
    return views


def test_a_norm_overflow_is_reported_with_the_true_norm(make_trainer):
    (view,) = views_seen(make_trainer, {"mode": "norm"}, make_batches(1), loss_fn=scaled(1e25))
    assert view.norm_overflow
    assert 1e23 < view.grad_norm < 1e27


def test_a_norm_overflow_without_clipping_is_refused(make_trainer):
    config = {"guards": {"clip": None}, "recovery": {"max_refusals": 0}}
    with pytest.raises(TrainingStopped, match="norm overflow"):
        make_trainer(loss_fn=scaled(1e25), train_data=make_batches(1), config=config).fit()


def test_sparse_gradients_are_measured_and_clipped(make_trainer):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True)
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            return self.fc(self.table(x)).mean()

    model = Bag()
    data = [torch.tensor([[1, 1, 2]]), torch.tensor([[3, 1, 2]])]
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(norm([model.table.weight.grad.to_dense(), *(p.grad for p in model.fc.parameters())]))
    )
    config = {"guards": {"clip": {"mode": "norm", "max_norm": 0.01}}}
    parts = {"optimizer": optimizer, "train_data": data, "config": config}
    assert make_trainer(model, loss_fn=lambda m, b: m(b) * 100, **parts).fit().healthy
    assert seen == pytest.approx([0.01, 0.01], rel=1e-3)


def test_the_logged_norm_is_the_one_before_clipping(make_trainer):
    model = make_model(dropout=0.0)
    (batch,) = make_batches(1)
    mse(model, batch).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    model.zero_grad()
    model[1].reset_running_stats()
    (view,) = views_seen(make_trainer, {"mode": "norm", "max_norm": 1e-3}, [batch], model=model)
    assert view.grad_norm == expected


def test_groups_that_are_added_during_the_run_are_clipped_too(make_trainer):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)

    class Unfreezing(SafeTrainer):
        def on_commit(self, view):
            if view.step == 0:
                self.optimizer.add_param_group({"params": list(self.model[0].parameters())})
                self.before = [p.detach().clone() for p in self.model[0].parameters()]

    config = {"guards": {"clip": {"mode": "group_norm", "max_norm": 1e-3}}}
    parts = {"loss_fn": scaled(100.0), "optimizer": optimizer, "train_data": make_batches(2), "config": config}
    trainer = make_trainer(model, Unfreezing, **parts)
    trainer.fit()
    moved = [(p.detach() - b).square().sum() for p, b in zip(model[0].parameters(), trainer.before, strict=True)]
    assert 0 < torch.stack(moved).sum().sqrt() <= 1.01e-3
