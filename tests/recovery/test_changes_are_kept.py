"""Islands and patches of recovery survive a resume, and the end of the run says how to make them permanent."""

import json
import math
import re

import pytest
import torch
import yaml
from checkpoint_cases import Gone
from small import Scaled, assert_same, float_mse, make_batches, make_model
from torch import nn

from safetrain import SafeTrainer
from safetrain.precision.islands import islands_of


class Dying(SafeTrainer):
    def on_commit(self, view):
        if view.step == 6:
            raise Gone


def rooted(model, batch):
    out = model(batch[0])
    return out.square().mean() + (out * batch[1]).square().sqrt().mean()


def overflowing(**parts):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Scaled(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 1))
    return {"model": model, "loss_fn": float_mse, "config": {"loop": {"precision": "fp16"}}, "recovery": {}, **parts}


def singular(**parts):
    return {"model": make_model(dropout=0.0), "loss_fn": rooted, "config": {}, "recovery": {"heal": ["patch"]}, **parts}


def batches_with_zero():
    batches = make_batches(14)
    batches[2][1].zero_()
    return batches


@pytest.mark.parametrize("faulty", [overflowing, singular])
def test_islands_and_patches_survive_a_resume(make_trainer, tmp_path, faulty):
    batches, results, states = batches_with_zero(), [], []
    for name, deaths in (("whole", 0), ("pieces", 1)):
        for life in range(deaths + 1):
            torch.manual_seed(1)
            parts = faulty()
            config = {**parts.pop("config"), "checkpoint": {"every_steps": 4}}
            cls = Dying if life < deaths else SafeTrainer
            trainer = make_trainer(cls=cls, train_data=batches, config=config, run_dir=tmp_path / name, **parts)
            if cls is Dying:
                with pytest.raises(Gone):
                    trainer.fit()
            else:
                results.append(trainer.fit(resume=life > 0))
        states.append([trainer.model.state_dict(), trainer.optimizer.state_dict()])
        assert islands_of(trainer.model) == []  # the model is handed back as it was
    assert_same(*states)
    whole, pieces = results
    assert len(pieces.incidents) == 1  # it did not come again
    assert (whole.islands, whole.patches) == (pieces.islands, pieces.patches)
    assert bool(whole.islands) == (faulty is overflowing)
    assert bool(whole.patches) == (faulty is singular)
    summary = json.loads((pieces.run_dir / "summary.json").read_text())
    assert (summary["islands"], summary["patches"]) == (pieces.islands, pieces.patches)


def test_the_printed_yaml_makes_an_island_permanent(make_trainer):
    torch.manual_seed(1)
    result = make_trainer(train_data=make_batches(8), **overflowing()).fit()
    assert [incident.decision.action for incident in result.incidents] == ["commit"]
    permanent = yaml.safe_load(result.islands["yaml"])
    torch.manual_seed(1)
    parts = overflowing()
    parts["config"] |= permanent
    again = make_trainer(train_data=make_batches(8), **parts).fit()
    assert again.incidents == []


@pytest.mark.parametrize("faulty", [overflowing, singular])
def test_islands_and_patches_are_printed_at_the_end(make_trainer, capsys, faulty):
    parts = faulty()
    parts["config"]["logging"] = {"console": "plain", "tensorboard": False}
    make_trainer(train_data=batches_with_zero(), **parts).fit()
    end = capsys.readouterr().out.rpartition("done: ")[2]
    if faulty is overflowing:
        found = re.search(
            r"to\s+make\s+it\s+permanent,\s+add\s+to\s+the\s+config:\n", end
        )  # wrapped where the path is long
        assert found
        assert yaml.safe_load("".join(end[found.end() :].splitlines(True)[:4])) == {
            "guards": {"islands": {"modules": ["2"]}}
        }
    else:
        end = " ".join(end.split())  # wrapped where the path is long
        assert "sqrt at" in end
        assert "ran as its safe variant, 12 times" in end
        assert "return out.square().mean() + (out * batch[1]).square().sqrt().mean()" in end
        assert "to make it permanent: " in end
        assert "safetrain.safe.sqrt(x)" in end


LOSS = """
def loss(model, batch):
    out = model(batch[0])
    return out.square().mean() + (out * batch[1]).square().sqrt().mean()
"""


def test_a_patch_of_an_edited_line_is_not_installed(make_trainer, tmp_path, caplog):
    source = tmp_path / "loss_to_edit.py"
    edits = {"as it was": LOSS, "fixed": LOSS.replace(".sqrt()", ".add(1e-12).sqrt()")}
    for name, text in edits.items():
        source.write_text(text)
        scope = {}
        exec(compile(text, str(source), "exec"), scope)
        torch.manual_seed(1)
        first = name == "as it was"
        parts = singular(loss_fn=scope["loss"], config={"checkpoint": {"every_steps": 4}}, run_dir=tmp_path / "run")
        trainer = make_trainer(cls=Dying if first else SafeTrainer, train_data=batches_with_zero(), **parts)
        if first:
            with pytest.raises(Gone):
                trainer.fit()
            assert len(trainer.run.result.patches) == 1
        else:
            result = trainer.fit(resume=True)
            assert result.patches == []
            assert math.isfinite(result.final_loss)
    assert "has changed, its patch is no longer in" in caplog.text
