"""Events are readable as soon as they are written, and a disk without room costs no more than them."""

import logging
import resource
import signal

import pytest
from small import make_batches
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.summary_pb2 import Summary

from safetrain.telemetry.event_file import EventFile


def scalar(value):
    return Summary(value=[Summary.Value(tag="loss/train", simple_value=value)])


def steps_in(directory):
    return [event.step for path in sorted(directory.glob("events*")) for event in EventFileLoader(str(path)).Load()]


def test_each_event_is_there_at_once(tmp_path):
    events = EventFile(tmp_path)
    for step in range(3):
        events.add_summary(scalar(0.5), step)
        assert steps_in(tmp_path) == [0, *range(step + 1)]  # the first says of which kind the file is
    events.close()


def test_two_files_of_one_second_have_different_names(tmp_path):
    for _ in range(5):
        EventFile(tmp_path, ".end").close()
    assert len(list(tmp_path.glob("events.out.tfevents.*.end"))) == 5


@pytest.fixture
def no_room_beyond():
    """Files cannot grow beyond N bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_does_not_fit_is_an_error_and_the_rest_readable(tmp_path, no_room_beyond):
    def write_many():
        for step in range(20):
            events.add_summary(scalar(0.5), step)

    events = EventFile(tmp_path)
    no_room_beyond(200)
    with pytest.raises(OSError, match="No space left"):
        write_many()
    no_room_beyond(resource.RLIM_INFINITY)
    assert steps_in(tmp_path)[:3] == [0, 0, 1]
    events.close()


def test_a_run_continues_without_its_curves(make_trainer, tmp_path, no_room_beyond, caplog):
    config = {"loop": {"max_steps": 150, "log_every": 1}, "logging": {"console": "off"}}
    config["checkpoint"] = {"enabled": False, "save_final": False}
    trainer = make_trainer(train_data=make_batches(30), config=config, run_dir=tmp_path / "run")
    plain = trainer.training_step

    def step(model, batch):
        if trainer.step == 10:
            (path,) = (tmp_path / "run").glob("events*")
            no_room_beyond(path.stat().st_size + 100)
        if trainer.step == 110:  # steps are sent in batches of 50
            no_room_beyond(resource.RLIM_INFINITY)
        return plain(model, batch)

    trainer.training_step = step
    with caplog.at_level(logging.WARNING, "safetrain"):
        assert trainer.fit().steps == 150
    assert [r.message.partition(":")[0] for r in caplog.records].count("TensorBoard events are no longer written") == 1
