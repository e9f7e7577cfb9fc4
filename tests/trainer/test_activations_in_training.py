"""The activations guard in a run, alone and with the other guards that install hooks."""

import json

import pytest
import torch
from small import fused_adamw, make_batches, make_model

ALL = {
    "islands": {"modules": ["BatchNorm1d"], "loss": True},
    "activations": {"every": 2, "max_abs": 1e6},
    "batch": {"only_if_bad": False},
    "anomaly": {"mode": "always"},
}


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_removed_when_the_run_ends_in_an_exception(make_trainer):
    def loss_fn(model, batch):
        assert num_hooks(model) > 0
        raise KeyError("mine")

    model = make_model()
    with pytest.raises(KeyError, match="mine") as error:
        make_trainer(model, loss_fn=loss_fn, train_data=make_batches(2), config={"guards": ALL}).fit()
    assert error.traceback[-1].name == "loss_fn"
    assert num_hooks(model) == 0
    assert not [m for m in model.modules() if "forward" in vars(m)]
    assert not torch.is_anomaly_enabled()


def test_activations_are_recorded_after_a_refusal_and_a_limit_refuses(make_trainer):
    views = []
    batches = make_batches(8, bad=(4,))
    batches[6][0].mul_(1e9)
    guards = {"activations": {"every": 3, "modules": ["0"], "max_abs": 1e7}}
    trainer = make_trainer(make_model(norm=False), train_data=batches, config={"guards": guards})
    trainer.on_commit = views.append
    result = trainer.fit()
    watched = [view.step for view in views if any(name.startswith("activations.") for name in view.signals)]
    assert watched == [0, 3, 5, 7]
    assert [(i.step, i.trigger.guard) for i in result.incidents] == [(4, "finite"), (6, "activations")]


def test_a_compiled_model_is_recorded_on_the_steps_that_are_due(make_trainer):
    views = []
    config = {"loop": {"compile": "aot_eager"}, "guards": {"activations": {"every": 2, "modules": ["0"]}}}
    trainer = make_trainer(train_data=make_batches(5), config=config)
    trainer.on_commit = views.append
    trainer.fit()
    assert [view.step for view in views if view.signals.get("activations.0.max_abs", 0.0) > 0.0] == [0, 2, 4]
    assert torch.compiler.is_compiling() is False


def test_with_deferred_reads_the_numbers_belong_to_their_step(make_trainer):
    views, name = [], "activations.2.max_abs"
    config = {"loop": {"host_read_every": 4}, "guards": {"activations": {"every": 3, "modules": ["2"]}}}
    trainer = make_trainer(optimizer=fused_adamw, train_data=make_batches(8), config=config)
    trainer.on_commit = views.append
    trainer.fit()
    seen = {view.step: view.signals[name] for view in views if name in view.signals}
    assert list(seen) == [0, 3, 6]
    assert all(0.0 < value <= 1.0 for value in seen.values())  # a tanh


def test_the_flight_recorder_is_kept_with_the_incident(make_trainer):
    config = {"guards": {"activations": {"modules": ["0"], "every": 1}}}
    result = make_trainer(train_data=make_batches(8, bad=(5,)), config=config).fit()
    (incident,) = result.incidents
    recorded = json.loads((result.run_dir / incident.path / "flight_recorder.json").read_text())["activations"]
    assert [record["step"] for record in recorded["before"]][-3:] == [2, 3, 4]
    assert recorded["refused"]["0"]["max_abs"] == "nan"
