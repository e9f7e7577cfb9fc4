"""The islands guard in a run: from the config, and removed at the end."""

import pytest
import torch
from small import make_batches, make_model, mse
from torch import nn

from safetrain import TrainingStopped, UsageError
from safetrain.cli.main import run
from safetrain.precision.islands import islands_of


def test_named_modules_and_the_loss_are_float32_in_a_bf16_run_and_hooks_are_removed(make_trainer):
    seen = {}

    def loss_fn(model, batch):
        seen["islands"] = islands_of(model)
        out = model(batch[0])
        seen["outside"] = (out @ out.T).dtype, torch.is_autocast_enabled("cpu")
        return (out - batch[1]).square().mean()

    model = make_model()
    model[2].register_forward_hook(lambda module, args, out: seen.update(island=out.dtype))
    model[0].register_forward_hook(lambda module, args, out: seen.update(rest=out.dtype))
    config = {"loop": {"precision": "bf16"}, "guards": {"islands": {"modules": ["Tanh"], "loss": True}}}
    result = make_trainer(model, loss_fn=loss_fn, train_data=make_batches(3), config=config).fit()
    assert result.healthy
    assert seen["islands"] == ["2", "loss"]
    assert (seen["rest"], seen["island"]) == (torch.bfloat16, torch.float32)
    assert seen["outside"] == (torch.float32, False)
    assert islands_of(model) == []
    assert "forward" not in vars(model)


@pytest.mark.parametrize("compile_with", [False, "aot_eager"])
def test_evaluation_and_a_compiled_run_have_the_islands_too(make_trainer, compile_with):
    seen = set()

    def loss_fn(model, batch):
        out = model(batch[0])
        seen.add((model.training, out.dtype))
        return (out - batch[1]).square().mean()

    config = {
        "loop": {"precision": "bf16", "compile": compile_with},
        "guards": {"islands": {"modules": ["BatchNorm1d"], "loss": True}},
    }
    trainer = make_trainer(loss_fn=loss_fn, train_data=make_batches(4), eval_data=make_batches(2), config=config)
    assert trainer.fit().steps == 4
    assert seen == {(True, torch.float32), (False, torch.float32)}


def test_an_island_saves_a_run_whose_module_overflows_in_fp16(make_trainer):
    def make():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 1))
        with torch.no_grad():
            model[0].weight.mul_(1e3)
        return model

    batches = [(x * 1e3, y) for x, y in make_batches(10)]
    fp16 = {"loop": {"precision": "fp16"}}
    with pytest.raises(TrainingStopped) as stopped:
        make_trainer(make(), train_data=batches, config={**fp16, "recovery": {"heal": []}}).fit()
    assert stopped.value.result.steps == 0
    guards = {"islands": {"modules": ["0", "1"]}}
    result = make_trainer(make(), train_data=batches, config={**fp16, "guards": guards}).fit()
    assert result.incidents == []
    assert result.steps >= 5  # the scaler finds its scale in the others


def test_a_misspelt_glob_stops_the_run_before_its_first_step(make_trainer):
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        return mse(model, batch)

    config = {"guards": {"islands": {"modules": ["Tahn"]}}}
    trainer = make_trainer(loss_fn=loss_fn, train_data=make_batches(1), config=config)
    with pytest.raises(UsageError, match="'Tahn' matches no module of Sequential, did you mean 'Tanh'"):
        trainer.fit()
    assert calls == []


def test_explain_shows_the_islands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("guards: {islands: {modules: ['*.norm'], loss: true}}\n")
    assert run(["explain", "a.yaml"]) == 0
    text = capsys.readouterr().out
    assert "islands installs its hooks on the model, once" in text
    assert "modules=['*.norm'] (default []), loss=True" in text
