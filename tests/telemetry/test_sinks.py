"""A sink of the user's receives everything, cannot end the run, and is closed however the run ends."""

import logging
import sys
import textwrap

import pytest
import torch
from records import journal
from small import make_batches

from safetrain import ConfigError, SafeTrainer, TrainingStopped, load_config
from safetrain.telemetry import Sink, Telemetry

SINK = """
from pathlib import Path
from safetrain.telemetry import Sink


class Lines(Sink):
    def __init__(self, path, raises=()):
        self._file, self._raises = Path(path).open("w"), raises

    def _line(self, what, *about):
        print(what, *about, file=self._file)
        if what in self._raises:
            raise OSError(f"no connection for {what}")

    def started(self, about):
        self._line("started", about["name"])

    def stepped(self, records):
        for record in records:
            self._line("step", record.view.step, record.outcome, record.num_committed)

    def noted(self, text):
        self._line("noted", text)

    def incident(self, incident):
        self._line("incident", incident.step, incident.decision.action)

    def finished(self, result):
        self._line("finished", result.status, result.steps)

    def close(self):
        with self._file:
            self._line("closed")


class Mute(Sink):
    pass


class NoSink:
    pass
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(SINK))


@pytest.fixture
def train(make_trainer):
    def run(sinks, data=None, cls=SafeTrainer, **config):
        config = {"logging": {"console": "off", "tensorboard": False, "sinks": sinks}, **config}
        data = make_batches(8, bad=(3,)) if data is None else data
        torch.manual_seed(0)
        return make_trainer(cls=cls, train_data=data, config=config).fit()

    return run


def lines(**options):
    return {"_target_": "./mine.py:Lines", "path": "seen.txt", **options}


def test_it_receives_what_happens_in_order_and_is_closed_last(train, tmp_path):
    result = train([lines()])
    steps = [f"step {i} commit {i + 1}" for i in range(3)], [f"step {i} commit {i}" for i in range(4, 8)]
    assert (tmp_path / "seen.txt").read_text().splitlines() == [
        "started run",
        *steps[0],
        "step 3 skip 3",
        "incident 3 skip",
        *steps[1],
        "finished done 7",
        "closed",
    ]
    assert result.steps == 7


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ValueError, "finished error 2"),
        (KeyboardInterrupt, "finished interrupted 2"),
        (TrainingStopped, "finished stopped 3"),
    ],
)
def test_it_is_closed_when_the_run_ends_early(train, tmp_path, error, end):
    class Failing(SafeTrainer):
        def on_commit(self, view):
            if view.step == 1 and error is not TrainingStopped:
                raise error

    with pytest.raises(error):
        train([lines()], cls=Failing, recovery={"max_refusals": 0})
    assert (tmp_path / "seen.txt").read_text().splitlines()[-2:] == [end, "closed"]


@pytest.mark.parametrize("raises", ["started", "step", "incident", "finished", "closed"])
def test_an_error_in_it_is_reported_once_and_training_continues(train, tmp_path, caplog, raises):
    with caplog.at_level(logging.WARNING, "safetrain"):
        result = train([lines(raises=[raises]), {"_target_": "./mine.py:Mute"}])
    assert (result.steps, result.status) == (7, "done")
    assert [r.getMessage().count(f"OSError: no connection for {raises}") for r in caplog.records] == [1]
    assert "the sink Lines raised in" in caplog.text
    assert "mine.py" in caplog.text  # with its traceback
    notes = [line["text"] for line in journal(result) if line["event"] == "note"]
    assert len(notes) == (raises not in ("finished", "closed"))
    assert all("the sink Lines raised" in note for note in notes)
    assert (tmp_path / "seen.txt").read_text().splitlines()[-2:] == ["finished done 7", "closed"]
    assert journal(result)[-1]["event"] == "end"


def test_the_weights_are_those_of_a_run_without_it(train):
    batches = make_batches(5)
    with_sink, without = train([lines()], batches), train([], batches)
    assert with_sink.losses == without.losses


@pytest.mark.parametrize(
    ("sinks", "problem"),
    [
        ("./mine.py:Lines", "give a list"),
        ({"_target_": "./mine.py:Mute"}, "give a list"),
        (["./mine.py:Mute"], "is not a target"),
        ([{"path": "x"}], "_target_ is missing"),
        ([{"_target_": "./mine.py:Line"}], "did you mean 'Lines'"),
        ([{"_target_": "./mine.py:Lines", "paht": "x"}], "unknown argument 'paht', did you mean 'path'"),
        ([{"_target_": "./no_such.py:Lines"}], "there is no file"),
    ],
)
def test_mistakes_are_found_in_the_config(sinks, problem):
    with pytest.raises(ConfigError) as raised:
        load_config({"logging": {"sinks": sinks}})
    assert "logging.sinks" in str(raised.value)
    assert problem in str(raised.value)


def test_what_is_no_sink_is_an_error_at_the_start(train):
    with pytest.raises(ConfigError, match=r"derive it from safetrain\.telemetry\.Sink"):
        train([{"_target_": "./mine.py:NoSink"}])


def test_a_file_is_found_from_the_config_s_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c.yaml").write_text("logging:\n  sinks:\n    - {_target_: ./mine.py:Mute}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config("../c.yaml")
    assert config.logging.sinks == [{"_target_": f"{tmp_path / 'mine.py'}:Mute"}]
    assert load_config(config) == config


def test_a_misspelt_method_is_an_error():
    with pytest.raises(TypeError, match="did you mean evaluated"):
        type("Wrong", (Sink,), {"evaluate": lambda self, metrics, is_best: None})
    with pytest.raises(TypeError, match=r"cannot be called as logged\(self, record, vitals\)"):
        type("Wrong", (Sink,), {"logged": lambda self, record: None})
    type("Right", (Sink,), {"logged": lambda self, record, vitals: None, "upload": lambda self: None})


def test_a_broken_pipe_of_a_sink_leaves_standard_output_alone(capfd):
    class Remote(Sink):
        def noted(self, text):
            raise BrokenPipeError("the server has gone")

    telemetry = Telemetry([], outside=[Remote()])
    telemetry.noted("one")
    telemetry.noted("two")
    print("still there")
    sys.stdout.flush()
    assert capfd.readouterr().out == "still there\n"
