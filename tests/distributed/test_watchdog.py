"""One process: what takes much longer than usual is named while it hangs, and ended at its limit."""

import threading

import pytest
import torch
from records import journal
from small import make_batches, make_model, mse
from torch.utils.data import DataLoader, Dataset

from safetrain import SafeTrainer
from safetrain.distributed import activity
from safetrain.distributed.activity import BATCH, STEP, Activity
from safetrain.errors import HangError

SLOW_STEP = 4


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when the test says so."""

    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(activity, "monotonic", made)
    return made


def spend(done, clock, unit, seconds, count=1):
    for _ in range(count):
        done.begin(unit)
        clock.now += seconds


@pytest.mark.parametrize(
    ("usual", "seconds", "is_late"),
    [(0.01, 4.9, False), (0.01, 5.1, True), (2.0, 9.9, False), (2.0, 10.1, True)],
)
def test_late_is_what_takes_many_times_the_usual_and_not_just_moments(clock, usual, seconds, is_late):
    done = Activity()
    spend(done, clock, STEP, usual, count=9)
    spend(done, clock, STEP, seconds)
    late = done.late()
    assert (late is not None) is is_late
    if late is not None:
        assert (late.unit, late.usual) == (STEP, pytest.approx(usual))


def test_what_was_never_done_before_is_given_more_time(clock):
    done = Activity()
    spend(done, clock, STEP, 29.0)
    assert done.late() is None
    clock.now += 2.0
    assert "for the first time" in done.late().describe()


def test_an_evaluation_is_not_part_of_the_step_it_interrupts(clock):
    done = Activity()
    spend(done, clock, STEP, 0.1, count=5)
    done.doing("evaluating")
    for _ in range(100):
        spend(done, clock, BATCH, 1.0)
        assert done.late() is None
    clock.now += 5.0
    assert done.late().unit == BATCH
    done.doing(None)
    assert done.late() is None
    clock.now += 5.1
    assert done.late().unit == STEP


def test_an_investigation_may_take_long(clock):
    done = Activity()
    spend(done, clock, STEP, 0.1, count=5)
    done.doing("investigating step 3")
    clock.now += 100.0
    assert done.late() is None
    clock.now += 21.0
    assert done.late().unit == "investigating"


def test_the_seconds_of_this_process_leave_out_the_waiting(clock):
    done = Activity()
    done.take_own_seconds()
    for phase, waiting, seconds in [
        ("wait for training data", False, 1.0),
        ("forward pass", False, 2.0),
        ("backward pass", False, 4.0),
        ("wait for the numbers", True, 8.0),
        ("decision", False, 16.0),
    ]:
        done.at(phase, waiting=waiting)
        clock.now += seconds
    done.at("step")
    data, rest = done.take_own_seconds()
    assert (data, rest - done.own_seconds["forward"]) == (1.0, 18.0)


class Hanging(SafeTrainer):
    """Hangs in one step until it was reported."""

    reported = threading.Event()

    def training_step(self, model, batch):
        if self.step == SLOW_STEP:
            self.reported.wait(30)
        return mse(model, batch)


def make(cls, data, run_dir, **loop):
    model = make_model()
    config = {
        "data": {"batch_size": 4},
        "loop": {"device": "cpu", **loop},
        "logging": {"console": "off", "tensorboard": False},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return cls(model, loss_fn=mse, optimizer=optimizer, train_data=data, config=config, run_dir=run_dir)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(activity, "FLOOR_SECONDS", 0.3)


def reporting(trainer, event, monkeypatch):
    telemetry_hangs = type(trainer.run.telemetry).hangs if trainer.has_run else None
    assert telemetry_hangs is None
    from safetrain.telemetry.sink import Telemetry

    hangs = Telemetry.hangs

    def noted(self, about):
        hangs(self, about)
        event.set()

    monkeypatch.setattr(Telemetry, "hangs", noted)


def test_a_step_that_hangs_is_named_and_training_goes_on(tmp_path, impatient, monkeypatch):
    Hanging.reported.clear()
    trainer = make(Hanging, make_batches(8), tmp_path / "run")
    reporting(trainer, Hanging.reported, monkeypatch)
    result = trainer.fit()
    hang, over = [line for line in journal(tmp_path / "run") if line["event"] == "hang"]
    place = hang["places"]["0"]
    assert (hang["step"], place["phase"], place["code"]) == (SLOW_STEP, "forward pass", "self.reported.wait(30)")
    assert place["file"] == __file__
    assert "MainThread" in place["stacks"]
    assert over["over"]
    assert result.steps == 8
    assert [(s["step"], s["unit"]) for s in result.summary()["hangs"]] == [(SLOW_STEP, "step")]


def test_a_limit_ends_it_at_the_line_where_it_hangs(tmp_path, impatient):
    Hanging.reported.clear()
    trainer = make(Hanging, make_batches(8), tmp_path / "run", hang_timeout_seconds=0.5)
    with pytest.raises(HangError, match=f"in its forward pass of step {SLOW_STEP}") as raised:
        trainer.fit()
    assert any(entry.name == "training_step" for entry in raised.traceback)


class StuckInWorker(Dataset):
    def __init__(self, gate):
        self.gate = gate

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 17:
            wait_in_worker(self.gate)
        return torch.ones(6), torch.ones(1)


def wait_in_worker(gate):
    gate.wait(30)


def test_the_worker_and_the_samples_that_a_step_waits_for_are_named(tmp_path, impatient, monkeypatch):
    gate = torch.multiprocessing.get_context("fork").Event()
    data = StuckInWorker(gate)
    trainer = make(SafeTrainer, data, tmp_path / "run")
    trainer.stream.source.sampler.shuffle = False
    trainer.stream.source.loader = DataLoader(
        data,
        batch_sampler=trainer.stream.source.sampler,
        num_workers=1,
        multiprocessing_context="fork",
        prefetch_factor=1,
    )
    reporting(trainer, gate, monkeypatch)
    trainer.fit()
    hang = next(line for line in journal(tmp_path / "run") if line["event"] == "hang")
    assert hang["places"]["0"]["phase"] == "wait for training data"
    assert "it waits for loader worker 0 (pid" in hang["text"]
    assert "which loads samples 16, 17, 18, 19" in hang["text"]
    assert "wait_in_worker" in hang["text"], "the worker's own stack"
