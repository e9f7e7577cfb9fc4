"""What a run leaves behind: valid, complete, never overwritten, and NaN is never left out."""

import io
import json
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from records import journal, strict
from small import make_batches, make_model, mse

from safetrain import Interrupted, RunDirectoryError, SafeTrainer, TrainingStopped, Verdict, load_config
from safetrain.core.files import to_json
from safetrain.core.verdict import merge
from safetrain.core.view import StepView
from safetrain.telemetry import StepRecord
from safetrain.telemetry.journal import _fields, _line


@pytest.fixture
def train(make_trainer, tmp_path):
    """A trainer whose fourth batch is bad; sections of the config as keywords."""

    def make(cls=SafeTrainer, *, data=None, run_dir=tmp_path / "run", loss_fn=mse, **config):
        data = make_batches(8, bad=(3,)) if data is None else data
        return make_trainer(cls=cls, loss_fn=loss_fn, train_data=data, config=config, run_dir=run_dir)

    return make


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a run of eight steps, the fourth of them refused."""
    torch.manual_seed(0)
    config = {"seed": 3, "logging": {"console": "off"}, "loop": {"log_every": 1}}
    run_dir, data = tmp_path_factory.mktemp("records") / "run", make_batches(8, bad=(3,))
    return SafeTrainer(make_model(), loss_fn=mse, train_data=data, config=config, run_dir=run_dir).fit()


def test_the_journal_has_one_valid_line_per_decision(result):
    lines = journal(result)
    events = ["start", "checkpoint", *["step"] * 4, "incident", *["step"] * 4, "checkpoint", "end"]
    assert [line["event"] for line in lines] == events
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(8))
    assert [line["action"] for line in steps] == ["commit"] * 3 + ["skip"] + ["commit"] * 4
    assert (steps[3]["loss"], steps[3]["grad_norm"]) == ("nan", "nan")
    assert [line["loss"] for line in steps if line["action"] == "commit"] == [v for v in result.losses if v == v]


LINES = {
    "plain": {},
    "tiny": {"loss": 1e-300, "grad_norm": 5e-324},
    "huge": {"loss": 1.7e308, "grad_norm": 1.7e308},
    "negative zero": {"loss": -0.0},
    "not finite": {"loss": math.nan, "grad_norm": math.inf},
    "metrics": {"metrics": {"accuracy": 0.5}},
    "micro-batches": {"micro_losses": (0.5, 1.5)},
    "one micro-batch": {"micro_losses": (1.0,)},
    "loss scale": {"loss_scale": 1024.0},
    "norm overflow": {"norm_overflow": True},
    "repaired": {"refused_loss": math.nan},
    "of NumPy": {"loss": np.float64(0.1), "grad_norm": np.float64(0.2)},
}


@pytest.mark.parametrize(
    "verdict",
    [Verdict(reason="odd"), *(Verdict(lr_scale=scale) for scale in (1.0, 0.25, np.float64(0.1), np.float32(0.1)))],
)
@pytest.mark.parametrize("outcome", ["commit", "skip"])
@pytest.mark.parametrize("fields", LINES.values(), ids=LINES)
def test_a_line_is_the_same_json_however_it_is_made(fields, outcome, verdict):
    view = StepView(**{"step": 7, "loss": 1.0, "grad_norm": 0.3, "lrs": (0.1, 0.2), "epoch": 2, **fields})
    record = StepRecord(view, merge([("guard", verdict)]), outcome, 5)
    line = _line(record)
    assert strict(line) == json.loads(to_json(_fields(record)))
    assert line == to_json(_fields(record)) + "\n"


def test_the_journal_is_complete_up_to_an_incident(train):
    class Reading(SafeTrainer):
        def on_incident(self, incident):
            lines = journal(self.run.dir)
            assert [line["step"] for line in lines if line["event"] == "step"] == [0, 1, 2, 3]
            assert lines[-1]["event"] == "incident"

    assert train(Reading).fit().steps == 7


def test_values_that_cannot_be_logged_are_reported_once(train):
    def loss_fn(model, batch):
        return {"loss": mse(model, batch), "logits": model(batch[0]), "size": 3, "by_class": [1.0, 2.0], "none": None}

    result = train(data=make_batches(4), loss_fn=loss_fn, loop={"grad_accum": 2}).fit()
    lines = journal(result)
    assert [line["text"] for line in lines if line["event"] == "note" and "not logged" in line["text"]] == [
        "not logged, because not numeric: logits, by_class (returned by training_step)"
    ]
    assert all(line["metrics"] == {"size": 3.0} for line in lines if line["event"] == "step")


def test_a_step_is_written_soon_even_if_nothing_else_happens(train, monkeypatch):
    from safetrain.telemetry import sink

    monkeypatch.setattr(sink, "FLUSH_SECONDS", -1.0)

    class Reading(SafeTrainer):
        def on_commit(self, view):
            assert journal(self.run.dir)[-1]["step"] == view.step

    assert train(Reading).fit().steps == 7


def test_summary_and_config_describe_the_run(result):
    summary = strict((result.run_dir / "summary.json").read_text())
    assert summary == strict(json.dumps(summary))
    assert (summary["status"], summary["steps"], summary["skipped"], summary["healthy"]) == ("done", 7, 1, False)
    assert summary["incidents"][0]["trigger"] == {"guard": "finite", "signal": "loss", "value": "nan"}
    config = load_config(result.run_dir / "config.yaml")
    assert (config.seed, config.loop.log_every) == (3, 1)


def test_result_counts_and_keeps_nan(result):
    assert (result.steps, result.attempted, result.skipped, result.rollbacks) == (7, 8, 1, 0)
    assert [math.isnan(loss) for loss in result.losses] == [i == 3 for i in range(8)]
    assert result.final_loss == result.losses[-1]
    assert result.summary()["steps"] == 7
    assert not result.healthy


def test_a_stopped_run_has_its_incident_and_its_result(train):
    trainer = train(recovery={"max_refusals": 0})
    with pytest.raises(TrainingStopped) as stopped:
        trainer.fit()
    assert stopped.value.incident.step == 3
    assert stopped.value.incident is stopped.value.result.incidents[-1]
    assert stopped.value.result.steps == 3
    summary = strict((trainer.run.dir / "summary.json").read_text())
    assert summary["status"] == "stopped"


def test_an_incident_is_written_with_the_fields_of_its_schema(result):
    (incident,) = result.incidents
    written = strict((result.run_dir / "incidents" / "step-000003" / "incident.json").read_text())
    assert written == strict(json.dumps(incident.to_dict()))
    fields = "schema id step rank time trigger decision origin cause samples propagation remedies fix replay"
    assert {*fields.split()} <= written.keys()
    text = incident.render()
    assert all(word in text for word in ("step 3", "finite", "loss = nan"))


def test_the_number_of_complete_incidents_is_limited(train):
    result = train(data=make_batches(8, bad=(1, 3, 5)), forensics={"max_incidents": 2}).fit()
    assert len(result.incidents) == 3
    assert sorted(p.name for p in (result.run_dir / "incidents").iterdir()) == ["step-000001", "step-000003"]


def test_a_run_directory_is_never_overwritten(train, result):
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        train(run_dir=result.run_dir).fit()


def test_without_a_directory_each_run_gets_its_own(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dirs = {train(data=make_batches(1), run_dir=None, name="a/b c").fit().run_dir for _ in range(3)}
    assert len(dirs) == 3
    assert all(path.parent == Path("runs") and path.name.startswith("a_b_c-") for path in dirs)


def test_tensorboard_shows_nan_as_it_is(result):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(result.run_dir), size_guidance={"scalars": 0}).Reload()
    losses = {event.step: event.value for event in events.Scalars("loss/train")}
    assert sorted(losses) == list(range(8))
    assert [math.isnan(losses[step]) for step in range(8)] == [step == 3 for step in range(8)]
    assert events.Scalars("health/skipped")[-1].value == 1


def test_plain_lines_without_control_codes_when_there_is_no_terminal(train, capsys):
    result = train(logging={"console": "auto", "tensorboard": False}, loop={"log_every": 1}).fit()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "INCIDENT at step 3" in out
    assert "step refused" in out
    assert "loss nan" in out
    assert "7 steps committed, 1 skipped" in out
    assert f"tensorboard --logdir {result.run_dir}" in out


def test_json_lines_on_request(train, capsys):
    train(logging={"console": "json", "tensorboard": False}).fit()
    events = [strict(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert (events[0], events[-1], events.count("step")) == ("start", "end", 8)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_finish(train, signum):
    class Interrupting(SafeTrainer):
        def training_step(self, model, batch):
            if self.step == 2:
                os.kill(os.getpid(), signum)
            return super().training_step(model, batch)

    trainer = train(Interrupting)
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted) as interrupted:
        trainer.fit()
    assert interrupted.value.signum == signum
    assert interrupted.value.result.steps == 3
    assert signal.getsignal(signum) is before
    assert strict((trainer.run.dir / "summary.json").read_text())["status"] == "interrupted"


class Closed(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("console", ["json", "plain"])
def test_training_continues_when_the_output_pipe_is_closed(train, monkeypatch, console):
    monkeypatch.setattr(sys, "stdout", Closed())
    assert train(logging={"console": console, "tensorboard": False}).fit().steps == 7


def test_names_that_the_output_cannot_show_are_spelt_out(train, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    train(name="lauf-ä→", logging={"console": "plain", "tensorboard": False}).fit()
    out.flush()
    assert b"lauf-\\xe4\\u2192" in out.buffer.getvalue()


def test_a_run_stays_in_its_directory_when_the_working_directory_changes(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    class Wandering(SafeTrainer):
        def on_commit(self, view):
            os.chdir(tmp_path / "elsewhere")

    result = train(Wandering, run_dir="run").fit()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "run" / "checkpoints" / "final.safetensors").exists()
    assert result.run_dir == Path("run")
