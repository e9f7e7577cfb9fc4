"""Evaluation leaves no trace in training; the EMA follows committed steps only."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from small import assert_same, fused_adamw, make_batches, make_model, mse
from torch.optim.lr_scheduler import ReduceLROnPlateau

from safetrain import SafeTrainer, SafetrainError, UsageError


def test_a_model_in_eval_mode_is_put_in_train_mode(make_trainer):
    model = make_model().eval()
    trainer = make_trainer(model, train_data=make_batches(2))
    assert all(module.training for module in model.modules())
    trainer.fit()
    assert model[1].num_batches_tracked == 2


def test_submodules_in_eval_mode_stay_in_it_after_evaluation(make_trainer):
    model = make_model()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    config = {"loop": {"eval_every": 2}}
    make_trainer(model, train_data=make_batches(4), eval_data=make_batches(1), config=config).fit()
    assert [module.training for module in model.modules()] == modes
    assert model[1].num_batches_tracked == 0


def test_evaluation_runs_in_eval_mode_without_gradients(make_trainer):
    seen = []

    class Watching(SafeTrainer):
        def evaluation_step(self, model, batch):
            seen.append((any(m.training for m in model.modules()), torch.is_grad_enabled()))
            return mse(model, batch)

    make_trainer(None, Watching, train_data=make_batches(2), eval_data=make_batches(3)).fit()
    assert seen == [(False, False)] * 3


@pytest.mark.parametrize(
    ("loop", "at"),
    [
        ({"max_epochs": 3}, [4, 8, 12]),
        ({"max_epochs": 3, "eval_every": 5}, [5, 10, 12]),
        ({"max_steps": 10, "eval_every": 5}, [5, 10]),
        ({"max_steps": 6}, [4, 6]),
    ],
)
def test_when_evaluation_is_due(make_trainer, loop, at):
    result = make_trainer(train_data=make_batches(4), eval_data=make_batches(1), config={"loop": loop}).fit()
    assert [evaluation["step"] for evaluation in result.evaluations] == at


@pytest.mark.parametrize("every", [1, 3, 8])
def test_evaluation_is_due_at_the_same_committed_steps_with_deferred_reads(make_trainer, every):
    config = {"loop": {"host_read_every": every, "eval_every": 5, "max_epochs": 1}}
    parts = {"optimizer": fused_adamw, "train_data": make_batches(24, bad=(6, 7)), "eval_data": make_batches(1)}
    at = []

    class Watching(SafeTrainer):
        def evaluation_step(self, model, batch):
            at.append(self.run.result.steps)
            return mse(model, batch)

    make_trainer(cls=Watching, config=config, **parts).fit()
    assert at == [5, 10, 15, 20, 22]


def test_metrics_are_means_over_samples_including_nan(make_trainer):
    sizes = iter([1.0, 2.0, math.nan, 4.0])

    class Scripted(SafeTrainer):
        def evaluation_step(self, model, batch):
            return {"loss": mse(model, batch), "size": float(len(batch[0])), "some": next(sizes)}

    data = [make_batches(1, size=size)[0] for size in (2, 6, 2, 0)]  # one without samples does not count
    (evaluation,) = make_trainer(None, Scripted, train_data=make_batches(1), eval_data=data).fit().evaluations
    assert evaluation["size"] == pytest.approx((2 * 2 + 6 * 6 + 2 * 2) / 10)
    assert math.isnan(evaluation["some"])
    assert math.isfinite(evaluation["loss"])


@pytest.mark.parametrize(("mode", "best"), [("min", 2.0), ("max", 5.0)])
def test_nan_is_the_worst_value_never_the_best(make_trainer, mode, best):
    values = iter([math.nan, 4.0, 2.0, math.nan, 5.0])

    class Scripted(SafeTrainer):
        def evaluation_step(self, model, batch):
            return {"loss": mse(model, batch), "score": next(values)}

    config = {"loop": {"eval_every": 1, "monitor": "score", "monitor_mode": mode, "eval_check": False}}
    result = make_trainer(None, Scripted, train_data=make_batches(5), eval_data=make_batches(1), config=config).fit()
    assert result.best["score"] == best
    assert [math.isnan(e["score"]) for e in result.evaluations] == [True, False, False, True, False]


def test_the_ema_follows_committed_steps_and_holds_the_buffers(make_trainer):
    model = make_model(dropout=0.0)
    decay, expected = 0.8, {name: p.detach().clone() for name, p in model.named_parameters()}

    class Following(SafeTrainer):
        def on_commit(self, view):
            for name, parameter in self.model.named_parameters():
                expected[name].lerp_(parameter.detach(), 1 - decay)

    trainer = make_trainer(model, Following, train_data=make_batches(12, bad=(3, 7)), config={"loop": {"ema": decay}})
    trainer.fit()
    state = trainer.ema.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert_same({name: state[name] for name in expected}, expected)
    assert_same(state["1.running_mean"], model.state_dict()["1.running_mean"])


def test_evaluation_uses_the_ema_and_restores_the_weights(make_trainer):
    model = make_model(dropout=0.0)
    weights = []

    class Watching(SafeTrainer):
        def evaluation_step(self, model, batch):
            weights.append(copy.deepcopy(self.model.state_dict()))
            return mse(model, batch)

    parts = {"train_data": make_batches(6), "eval_data": make_batches(1), "config": {"loop": {"ema": 0.5}}}
    trainer = make_trainer(model, Watching, **parts)
    trainer.fit()
    assert_same(dict(weights[-1]), {name: trainer.ema.state_dict()[name] for name in weights[-1]})
    assert not torch.equal(model[0].weight, weights[-1]["0.weight"])


def test_a_plateau_schedule_is_stepped_with_the_metric_and_needs_one(make_trainer):
    parts = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "scheduler": partial(ReduceLROnPlateau, patience=0, threshold=10.0, factor=0.5),
    }
    config = {"loop": {"eval_every": 2}}
    trainer = make_trainer(train_data=make_batches(6), eval_data=make_batches(1), config=config, **parts)
    trainer.fit()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    with pytest.raises(UsageError, match="there is no evaluation data"):
        make_trainer(train_data=make_batches(2), **parts)


def test_metrics_are_means_over_the_batches_that_gave_them(make_trainer):
    class Some(SafeTrainer):
        def evaluation_step(self, model, batch):
            extra = {"rare": np.float32(4.0), "wide": np.float64(2.0)} if batch[0][0, 0] > 0 else {}
            return {"loss": mse(model, batch), **extra}

    batches = [(torch.full((4, 6), sign), torch.zeros(4, 1)) for sign in (1.0, -1.0, 1.0)]
    result = make_trainer(cls=Some, train_data=make_batches(1), eval_data=batches).fit()
    assert result.evaluations[0]["rare"] == 4.0
    assert result.evaluations[0]["wide"] == 2.0


@pytest.mark.parametrize(
    ("metrics", "data", "monitor", "message"),
    [
        ({"step": 1.0}, None, "loss", "a metric called 'step'"),
        ({3: 1.0}, None, "loss", "a metric under 3"),
        ({"accuracy": 1.0}, None, "acuracy", "loop.monitor is 'acuracy'"),
        ({}, None, "accuracy", "it returned loss"),
        ({}, [], "loss", "the evaluation data is empty"),
        ({}, [(torch.zeros(0, 6), torch.zeros(0, 1))], "loss", "the evaluation data has no samples"),
    ],
)
def test_an_error_in_the_evaluation_saves_a_checkpoint_first(make_trainer, metrics, data, monitor, message):
    class Mistaken(SafeTrainer):
        def evaluation_step(self, model, batch):
            return {"loss": mse(model, batch), **metrics}

    data = make_batches(2) if data is None else data
    config = {"loop": {"eval_every": 3, "monitor": monitor, "eval_check": False}}
    trainer = make_trainer(cls=Mistaken, train_data=make_batches(6), eval_data=data, config=config)
    with pytest.raises(SafetrainError, match=message):
        trainer.fit()
    assert (trainer.run.dir / "checkpoints" / "last").resolve().name == "step-00000003"
