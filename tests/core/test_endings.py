"""How a run ended is read from its files, and the same fault twice at the same step is not tried a third time."""

import json

import pytest

from safetrain.core import endings
from safetrain.core.endings import KILLED, Ending, of_resumed, read_ending
from safetrain.errors import UsageError

STEPS = [{"event": "start"}, *({"event": "step", "step": step} for step in range(5))]


def write_journal(run_dir, *events):
    (run_dir / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(
    ("end", "step", "cause"),
    [
        ([], 5, KILLED),
        ([{"event": "end", "status": "error", "error": "KeyError: 'x'", "attempted": 6}], 6, "KeyError: 'x'"),
        ([{"event": "end", "status": "error", "attempted": 6}], 6, "an error"),
        ([{"event": "end", "status": "done", "attempted": 5}], 5, None),
        ([{"event": "end", "status": "interrupted", "attempted": 5}], 5, None),
    ],
)
def test_the_last_line_of_the_journal_says_how_it_ended(tmp_path, end, step, cause):
    write_journal(tmp_path, *STEPS, *end)
    found = read_ending(tmp_path)
    assert (found.step, found.cause) == (step, cause)


def test_a_line_that_was_torn_by_the_end_is_passed_over(tmp_path):
    write_journal(tmp_path, *STEPS)
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"event": "st')
    assert (read_ending(tmp_path).step, read_ending(tmp_path).cause) == (5, KILLED)
    assert read_ending(tmp_path / "nothing here") is None


@pytest.mark.parametrize(
    ("cause", "step", "is_like"),
    [
        ("RuntimeError: port 9962", 5, True),
        ("RuntimeError: port 9963", 5, True),
        ("RuntimeError: port 9962", 6, False),
        ("KeyError: port 9962", 5, False),
        (None, 5, False),
    ],
)
def test_the_same_fault_is_the_same_whatever_its_numbers(cause, step, is_like):
    assert Ending(step, cause, 0.0).is_like(Ending(5, "RuntimeError: port 9962", 0.0)) is is_like


def test_a_program_is_not_let_restart_the_same_fault_again_and_a_person_is(tmp_path, monkeypatch):
    for name in endings._RESTARTS:
        monkeypatch.delenv(name, raising=False)
    write_journal(tmp_path, *STEPS)
    position = (tmp_path / "journal.jsonl").read_bytes().index(b'{"event": "step", "step": 2')
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert of_resumed(tmp_path, position).steps_repeated == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(UsageError, match="failed twice in the same way at step 5"):
        of_resumed(tmp_path, position)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert of_resumed(tmp_path, position) is not None
