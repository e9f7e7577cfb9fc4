"""The report of runs in every state, parsed without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from report_pages import Parsed, train

from safetrain.cli.main import program, run
from safetrain.core.rundir import RunLock
from safetrain.report import page as report_page
from safetrain.report import write_report
from safetrain.report.run import read_run

HOLD = "import sys; from pathlib import Path; from safetrain.core.rundir import RunLock; lock = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def report(run_dir: Path, out: Path | None = None, compare: Path | None = None) -> Parsed:
    page = Parsed.file(write_report(run_dir, out or run_dir.with_suffix(".html"), compare).path)
    page.check()
    return page


@pytest.fixture(scope="module")
def faulty_page(faulty_run: Path) -> Parsed:
    return report(faulty_run)


def lines(run_dir: Path) -> list[bytes]:
    return (run_dir / "journal.jsonl").read_bytes().splitlines(keepends=True)


@pytest.fixture
def copy(faulty_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may damage."""
    return shutil.copytree(faulty_run, tmp_path / "run", symlinks=True)


def test_every_section_is_there(faulty_page: Parsed) -> None:
    page = faulty_page
    assert "250 steps committed, with 12 incidents (6 repaired, 6 skipped)" in page.text
    for part in ("timeline", "incidents", "details"):
        assert part in page.text_of
    assert len(page.all("article", "incident")) == 12
    assert "NaN ×6" in page.text_of["timeline"]
    assert "checkpoints" in page.text_of["timeline"]
    assert "skipped" in page.text_of["timeline"]
    assert "1000, 1777, 2500" in page.text_of["details"]  # quarantined
    assert "CosineAnnealingLR" in page.text_of["details"]  # config


@pytest.mark.parametrize(
    ("incident", "place", "line", "cause", "fix", "written"),
    [
        (1, "sensors.py:50", "per_sensor = (error * weights).sum(1) / weights.sum(1)", "division_by_zero",
         "keep the divisor away from 0", "per_sensor = safe.div((error * weights).sum(1), weights.sum(1))"),
        (2, "sensors.py:32", "level = 10 * torch.log10(power)", "log_of_nonpositive",
         "keep the argument above 0", "level = 10 * (safe.log(power) / math.log(10))"),
        (3, "sensors.py:48", 'error = (model(batch["signal"]) - batch["target"]).square()', "bad_input_data",
         "clean or drop these samples", ""),
    ],
)  # fmt: skip
def test_an_incident_starts_with_what_to_change(
    faulty_page: Parsed, incident: int, place: str, line: str, cause: str, fix: str, written: str
) -> None:
    part = faulty_page.text_of[f"incident-{incident}"]
    top, _, rest = part.partition("Why")
    assert rest
    for shown in (place, line, cause, fix, written, "Tried on a replay of this step"):
        assert shown.lower() in top.lower()


def test_an_incident_has_its_evidence(faulty_run: Path, faulty_page: Parsed) -> None:
    page = faulty_page
    part = page.text_of["incident-2"]
    assert "log10 got self: 1 zero of 32 values" in part
    assert "samples: sample 17 of the batch left out" in part
    path = re.sub(r"\s+", " ", part.partition("From the origin to the loss")[2].partition("Samples")[0]).strip()
    assert path.startswith("loudness forwardencoder.0 forward")
    assert path.endswith("the loss")
    assert part.count("✔") >= 2
    assert "✘" in part
    assert f"safetrain replay {faulty_run}/incidents/step-000055" in part
    assert [a["aria-label"] for a in page.all("svg") if "Histogram" in a["aria-label"]][:3] == [
        "Histogram of self", "Histogram of other", "Histogram of self",
    ]  # fmt: skip


def test_a_healthy_run(healthy_run: Path) -> None:
    page = report(healthy_run)
    assert "Healthy" in page.text
    assert "30 steps committed, none refused" in page.text
    assert not page.all("article")
    assert "No step was refused." in page.text_of["incidents"]


def test_a_run_that_is_still_running(copy: Path) -> None:
    (copy / "journal.jsonl").write_bytes(b"".join(lines(copy)[:60]))
    (copy / "summary.json").unlink()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    page = report(copy)
    holder.communicate(b"")
    assert "Still running" in page.text
    assert "Cut off" in report(copy).text


def test_the_process_that_trains_can_write_the_report(copy: Path) -> None:
    (copy / "journal.jsonl").write_bytes(b"".join(lines(copy)[:60]))
    lock = RunLock(copy)
    assert "Still running" in report(copy).text
    refused = subprocess.run([sys.executable, "-c", HOLD, str(copy)], capture_output=True, stdin=subprocess.DEVNULL)
    lock.release()
    assert b"is being written to" in refused.stderr  # reading did not release the lock


def test_a_journal_that_ends_in_the_middle_of_a_line(copy: Path) -> None:
    all_lines = lines(copy)
    torn = next(i for i, line in enumerate(all_lines) if b'"event": "incident"' in line and i > 60)
    (copy / "journal.jsonl").write_bytes(b"".join(all_lines[:torn]) + all_lines[torn][:500])
    page = report(copy)
    assert "ends in the middle of a line" in page.text
    assert f"safetrain resume {copy}" in page.text
    # Incidents that the journal lacks are read from their directories.
    assert "is on disk but not in the journal" in page.text
    assert len(page.all("article", "incident")) == 12


def test_a_journal_truncated_anywhere(healthy_run: Path, tmp_path: Path) -> None:
    content = (healthy_run / "journal.jsonl").read_bytes()
    damaged = tmp_path / "run"
    damaged.mkdir()
    for end in range(0, len(content), max(1, len(content) // 60)):
        (damaged / "journal.jsonl").write_bytes(content[:end])
        whole = content.rfind(b"\n", 0, end + 1) + 1  # a line that lacks only its newline counts
        assert read_run(damaged).num_attempted == content[:whole].count(b'"event": "step"')
    assert "Cut off" in report(damaged).text


def test_damaged_journal_lines_are_skipped(copy: Path) -> None:
    all_lines = lines(copy)
    all_lines[5], all_lines[9], all_lines[12] = b"\xff\xfe\n", b"[1, 2]\n", b'{"event": "step", "step": "x"}\n'
    (copy / "journal.jsonl").write_bytes(b"".join(all_lines))
    page = report(copy)
    assert "3 lines of journal.jsonl could not be read" in page.text
    (copy / "journal.jsonl").unlink()
    page = report(copy)
    assert "journal.jsonl is missing" in page.text
    assert len(page.all("article", "incident")) == 12


def test_a_resumed_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, "loop.max_steps=20", "loop.max_epochs=null")
    train(run_dir, "loop.max_steps=45", "loop.max_epochs=null", resume=True)
    found = read_run(run_dir)
    assert (found.status, found.num_committed, found.resumes[0][0]) == ("done", 45, 20)
    page = report(run_dir)
    assert "before step 20, from step-00000020" in page.text_of["details"]
    assert "resumed" in page.text_of["timeline"]


def test_comparison_of_two_runs(faulty_run: Path, healthy_run: Path) -> None:
    page = report(faulty_run, compare=healthy_run)
    assert "Finished" in page.text
    assert "Healthy" in page.text
    assert re.search(r"loop\.max_steps\s*null\s*30", page.text_of["settings"])
    assert "optimizer.lr" not in page.text_of["settings"]
    assert "A incidents" in page.text_of["timeline"]
    assert "B checkpoints" in page.text_of["timeline"]
    assert "incident-a1" in page.text_of


@pytest.mark.parametrize("made", ["nothing", "empty directory", "file"])
def test_a_path_without_a_run_is_an_error(tmp_path: Path, made: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "there"
    if made == "empty directory":
        path.mkdir()
    elif made == "file":
        path.touch()
    assert run(["report", str(path)]) == 2
    message = capsys.readouterr().err
    assert "To fix: give the directory of a run" in message
    assert len(message.splitlines()) <= 10
    assert run(["report", str(tmp_path), "--compare", str(path)]) == 2


def test_the_command(faulty_run: Path, healthy_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke = CliRunner().invoke
    done = invoke(program, ["report", str(healthy_run)])
    assert done.exit_code == 0
    assert f"report: {healthy_run}/report.html" in done.output
    done = invoke(program, ["report", str(faulty_run), "--out", str(tmp_path), "--json"])
    fields = json.loads(done.output)
    assert fields["report"] == str(tmp_path / "report.html")
    assert fields["incidents"] == 12
    assert fields["bytes"] == (tmp_path / "report.html").stat().st_size
    done = invoke(program, ["report", str(faulty_run), "--compare", str(healthy_run), "-q", "--out", str(tmp_path)])
    assert done.output == ""
    assert (tmp_path / "comparison.html").exists()
    assert run(["report", str(healthy_run), "--out", str(tmp_path / "report.html" / "below.html")]) == 2


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named(
    healthy_run: Path, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    report_page._environment.cache_clear()
    assert run(["report", str(healthy_run)]) == 2
    assert f"pip install {package}" in capsys.readouterr().err


def test_no_torch_is_needed(healthy_run: Path) -> None:
    program = "import sys; from safetrain.report import write_report; write_report(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program, str(healthy_run)], check=False).returncode == 0


def test_matplotlib_settings_are_restored(healthy_run: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    report(healthy_run)
    assert dict(matplotlib.rcParams) == before


EXTREMES = [
    [1.7e308, -1.7e308, 5e-324, 0.0],
    [5e-324, 1.0, 1e308],
    [-3.0, -2.0, -3.0, -3.0, 1e9],
    ["nan", "inf", "-inf"],
    [1.0],
]


@pytest.mark.parametrize("values", EXTREMES)
def test_numbers_of_any_size_can_be_plotted(tmp_path: Path, values: list[Any]) -> None:
    fields = {"event": "step", "lr_scale": 1.0, "epoch": 0, "committed": 1}
    steps = [
        {**fields, "step": step, "action": ("skip", "commit")[step % 2], "loss": value, "grad_norm": value, "lr": value}
        for step, value in enumerate(values)
    ]
    impossible = [
        {"event": "eval", "step": 10**400, "loss": 1.0},
        {"event": "checkpoint", "step": -1},
        {"event": "end", "patches": [1]},
    ]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*steps, *impossible]))
    page = report(run_dir)
    assert "2 lines of journal.jsonl could not be read" in page.text
    assert ("NaN ×1" in page.text_of["timeline"]) == ("nan" in values)
