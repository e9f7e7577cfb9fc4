"""What a person sees in a terminal, and in a file."""

import io
import re
import sys

import pytest
from rich.console import Console as RichConsole
from small import make_batches

from safetrain import SafeTrainer
from safetrain.core import numbers
from safetrain.core.incident import Cause, Incident, Origin, Outcome, Trigger
from safetrain.core.result import FitResult
from safetrain.core.verdict import Verdict, merge
from safetrain.core.view import StepView
from safetrain.telemetry import live, sink, summary
from safetrain.telemetry.console import coloured
from safetrain.telemetry.live import ProgressLine
from safetrain.telemetry.sink import StepRecord
from safetrain.telemetry.vitals import Vitals


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A function that makes standard output a terminal, on which every step is drawn; returns what is written to it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sink, "FLUSH_SECONDS", -1.0)
    monkeypatch.setattr(live, "REDRAW_SECONDS", 0.0)

    def begin():  # in the test itself: between a fixture and its test, pytest sets the output anew
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return begin


@pytest.fixture
def train(make_trainer, tmp_path):
    def run(data, cls=SafeTrainer, **config):
        config = {"loop": {"log_every": 1}, "logging": {"console": "auto", "tensorboard": False}, **config}
        return make_trainer(cls=cls, train_data=data, config=config, run_dir=tmp_path / "run").fit()

    return run


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_progress_below_and_incidents_above(terminal, train):
    screen = terminal()
    train(make_batches(12, bad=(5,)))
    text = plain(screen.getvalue())
    drawn = re.findall(r"epoch 0  step (\d+)/12  [━─]+ +(\d+)%", text)
    assert drawn[0] == ("1", "8")
    assert drawn[-1] == ("11", "92")
    assert re.search(r"loss nan  grad nan  lr 1\.00e-03  (refused|investigating)", text)
    block = text.index("INCIDENT at step 5")
    assert "step 5/12" in text[:block]
    assert "step 11/12" in text[block:]  # it goes on below
    assert "investigating step 5" in text
    end = text[text.index("done: 11 steps committed, 1 skipped") :]
    assert not re.search("[━─]", end)
    for label in ("incidents", "recovery", "cost", "checkpoint", "next"):
        assert f"\n  {label:14}" in end


def test_a_user_who_prints_does_not_disturb_it(terminal, train):
    class Talking(SafeTrainer):
        def on_commit(self, view):
            print("said", view.step)

    screen = terminal()
    train(make_batches(4), Talking)
    assert re.findall(r"said \d", plain(screen.getvalue())) == ["said 0", "said 1", "said 2", "said 3"]


def test_the_cursor_is_given_back_when_user_code_raises(terminal, train):
    class Raising(SafeTrainer):
        def on_commit(self, view):
            raise KeyError("mine")

    screen = terminal()
    with pytest.raises(KeyError):
        train(make_batches(4), Raising)
    text = screen.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert sys.stdout is screen


def test_without_a_terminal_one_line_per_interval(train, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    train(make_batches(12, bad=(5,)), loop={"log_every": 5})
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\r" not in out
    lines = [line for line in out.splitlines() if line.startswith("epoch ")]
    assert [line[:24].rstrip() for line in lines] == [f"epoch 0  step {step:6}/12" for step in (0, 5, 10)]
    assert re.search(r"loss nan +grad nan +lr 1\.00e-03 .*refused \(1 skipped\)", lines[1])


def test_quiet_prints_nothing(train, capfd):
    train(make_batches(6, bad=(2,)), logging={"console": "off", "tensorboard": False})
    assert capfd.readouterr() == ("", "")


def vitals(step=1234, total=5000, loss=2.5, outcome="commit", lr_scale=1.0):
    state = Vitals()
    state.begin(total)
    view = StepView(step, loss, 0.5, lrs=(0.004,), epoch=2)
    state.add(StepRecord(view, merge([("g", Verdict(lr_scale=lr_scale))]), outcome, step))
    state.num_rollbacks = 1
    return state


def drawn(line, width, **console):
    out = RichConsole(width=width, file=io.StringIO(), **console)
    out.print(line)
    return out.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 149, 150, 200])
@pytest.mark.parametrize("doing", [None, "investigating step 1234"])
def test_the_line_fits_every_width(width, doing):
    line = ProgressLine()
    line.vitals, line.doing = vitals(lr_scale=0.5, loss=float("nan"), outcome="skip"), doing
    lines = drawn(line, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 1 if width >= 150 else len(lines) <= 4
    text = "  ".join(lines)
    assert "step 1,234/5,000" in text
    assert "loss nan" in text
    assert "lr 2.00e-03 (backed off x0.5)" in text or width < 60
    assert (doing or "refused (1 skipped, 1 rolled back)") in text


def test_before_the_first_step_and_without_a_known_end():
    line = ProgressLine()
    line.doing, line.part = "saving a checkpoint", "MB written 12/40"
    assert drawn(line, 60) == ["saving a checkpoint: MB written 12/40"]
    line.doing, line.part, line.vitals = None, "", vitals(total=None)
    assert drawn(line, 60)[0].rstrip() == "epoch 2  step 1,234"


def test_labels_titles_and_the_blamed_line_stand_out():
    assert coloured("INCIDENT at step 3", "red").style == "bold red"
    assert [span.style for span in coloured("  WHY           because", "red").spans] == ["cyan"]
    assert coloured("                >  193  a / b", "red").style == "bold"
    assert coloured("  safetrain replay runs/first/incidents/step-000001", "red").spans == []


def incident(step, label, line, action="skip"):
    origin = Origin("forward", "aten.log.default", "log", "", file="model.py", line=line, code="x.log()")
    found = Incident(step, "now", Trigger("finite", "loss", float("nan")), Outcome(action, ["finite: the loss is nan"]))
    found.origin, found.cause, found.path = origin, Cause(label, ""), f"incidents/{found.id}"
    return found


def test_the_summary_says_what_happened(tmp_path):
    result = FitResult("done", steps=90, skipped=3, rollbacks=1, steps_undone=7, final_loss=float("nan"), seconds=100.0)
    result.incidents = [incident(1, "a", 5), incident(2, "b", 6, "commit"), incident(3, "b", 6)]
    result.best = {"step": 80, "loss": 0.25, "accuracy": 0.5}
    result.timing = {"recovery": 5.0, "guards": 1.0, "evaluation": 2.0}
    result.checkpoints = {"newest": "step-00000090", "verified": True}
    result.run_dir = tmp_path
    assert summary.headline(result) == "done: 90 steps committed, 3 skipped, final loss nan, 1:40"
    rows = summary.summary_rows(result)
    assert rows == [
        ("best", "loss 0.25, accuracy 0.5 (evaluated at step 80)"),
        ("incidents", f"3 (at step 1, 2, 3), each kept in {tmp_path}/incidents"),
        ("", "2 x b at model.py:6: 1 repaired, 1 skipped"),
        ("", "1 x a at model.py:5: 1 skipped"),
        ("recovery", "1 rollback, 7 committed steps undone, 5.0 s (5.0%) lost to recovery"),
        ("cost", "guards 1.0% of the time, evaluation 2.0 s"),
        ("checkpoint", f"{tmp_path}/checkpoints/step-00000090, verified"),
    ]
    assert [command for command, _ in summary.next_commands(result)] == [
        f"safetrain diagnose {tmp_path}",
        f"safetrain report {tmp_path}",
        f"tensorboard --logdir {tmp_path}",
    ]
    result.status = "interrupted"
    assert summary.next_commands(result)[0][0] == f"safetrain resume {tmp_path}"
    result.checkpoints["verified"] = False
    assert "DAMAGED" in summary.summary_rows(result)[-1][1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.04 s"), (6.84, "6.8 s"), (725, "12:05"), (11400, "3:10:00"), (90000, "1 d 1:00:00")]
)
def test_durations(seconds, text):
    assert numbers.duration(seconds) == text


def test_the_record_says_where_the_time_went(train, tmp_path):
    data = make_batches(8, bad=(3,))
    result = train(data, logging={"console": "off", "tensorboard": False})
    assert result.timing["recovery"] > 0
    assert result.timing["guards"] > 0
    assert sum(result.timing.values()) < result.seconds
    assert result.checkpoints["verified"] is True
    assert (tmp_path / "run" / "checkpoints" / result.checkpoints["newest"]).is_dir()
