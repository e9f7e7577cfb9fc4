"""`scripts/verify_gpu`, for owners of accelerators, on the test device: a test of the script itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def verify(tmp_path, only):
    report = tmp_path / "report.json"
    setup = str(ROOT / "tests" / "device" / "backend")
    command = [
        sys.executable,
        str(ROOT / "scripts" / "verify_gpu.py"),
        "--setup",
        setup,
        "--device",
        "testdev",
        "--only",
        only,
    ]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=900, cwd=ROOT)
    return done, json.loads(report.read_text())["rows"] if report.exists() else []


@pytest.mark.parametrize(
    "only",
    [
        "waits,label_out_of_range,compile_modes",
        pytest.param(
            "waits_for_batches,bits,bad_sample,bad_gradient_with_atomics,corrupt_weight,spike,resume,resume_on_another_device,"
            "rollback_memory,out_of_memory,lost_device,snapshots,ddp,fsdp,speed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_check_passes_or_says_why_it_cannot_be_made(tmp_path, only):
    done, rows = verify(tmp_path, only)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {row["check"]: row["outcome"] for row in rows}
    assert list(outcomes) == only.split(",")
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"}
    assert skipped <= {"compile_modes", "ddp", "fsdp", "resume_on_another_device"}
    assert all(row["expected"] and row["found"] for row in rows if row["outcome"] == "pass")


def test_a_name_of_no_check_is_an_error(tmp_path):
    done, rows = verify(tmp_path, "wait")
    assert done.returncode == 2
    assert "there is no check 'wait'" in done.stderr
    assert rows == []
