"""Long curves keep their extremes and NaN in bounded memory."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import Parsed

from safetrain.report import write_report
from safetrain.report.run import read_run
from safetrain.report.series import NUM_BINS, Marks, Series


def test_a_short_curve_is_kept_unchanged() -> None:
    series = Series()
    values = [3.0, math.nan, 1.0, math.inf, -math.inf, 2.0]
    for step, value in enumerate(values):
        series.add(step, value)
    steps, kept = series.points()
    assert steps.tolist() == [0, 2, 5]
    assert kept.tolist() == [3.0, 1.0, 2.0]
    assert [span.first for span in series.nan.spans(0)] == [1]
    assert [(span.first, span.last, span.count) for span in series.inf.spans(1)] == [(3, 4, 2)]


def test_a_long_curve_keeps_its_extremes_in_place() -> None:
    series = Series()
    values = np.random.default_rng(0).normal(size=300_000)
    values[123_456], values[222_222] = 1e6, -1e6
    for step, value in enumerate(values.tolist()):
        series.add(step, value)
    steps, kept = series.points()
    assert len(steps) <= 2 * NUM_BINS + 2
    assert (np.diff(steps) > 0).all()
    assert steps[kept.argmax()] == 123_456
    assert steps[kept.argmin()] == 222_222
    assert (values[steps.astype(int)] == kept).all()
    assert (steps[0], steps[-1]) == (0, 299_999)
    # Every section of the curve keeps its range.
    for start in range(0, 300_000, 10_000):
        inside = (steps >= start) & (steps < start + 10_000)
        piece = values[start : start + 10_000]
        assert kept[inside].max() >= np.sort(piece)[-3]
        assert kept[inside].min() <= np.sort(piece)[2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=300), st.floats(0, 100))
def test_marks_are_merged_and_none_is_lost(found: list[int], gap: float) -> None:
    marks = Marks()
    for step in sorted(found):
        marks.add(step)
    spans = marks.spans(gap)
    assert sum(span.count for span in spans) == len(found)
    assert all(any(span.first <= step <= span.last for span in spans) for step in found)
    assert all(later.first - earlier.last > gap for earlier, later in itertools.pairwise(spans))


@pytest.mark.slow
def test_a_million_steps_in_seconds_and_a_small_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with open(run_dir / "journal.jsonl", "w", encoding="utf-8") as journal:
        journal.write(json.dumps({"event": "start", "name": "long", "parameters": 1, "guards": ["finite"]}) + "\n")
        for step in range(1_000_000):
            is_bad = step % 9973 == 5000 or 600_000 <= step < 600_500
            loss = '"nan"' if is_bad else "777.0" if step == 333_333 else f"{2.0 + step % 97 / 100}"
            journal.write(
                f'{{"event": "step", "step": {step}, "action": "{"skip" if is_bad else "commit"}", "loss": {loss}, '
                f'"grad_norm": {loss}, "lr": 0.001, "lr_scale": 1.0, "epoch": 0, "committed": {step}}}\n'
            )
            if is_bad:
                incident = {"event": "incident", "step": step, "trigger": {"guard": "finite", "signal": "loss", "value": "nan"},
                            "decision": {"action": "skip", "reasons": ["finite: the loss is nan"]}}  # fmt: skip
                journal.write(json.dumps(incident) + "\n")
    started = time.process_time()
    written = write_report(run_dir)
    assert time.process_time() - started < 60  # under ten on an idle core
    assert written.num_bytes < 5_000_000
    found = read_run(run_dir)
    steps, values = found.loss.points()
    assert (steps[values.argmax()], values.max()) == (333_333, 777.0)
    assert found.refused_loss.nan.count == 600
    page = Parsed.file(written.path)
    page.check()
    assert "NaN ×600" in page.text_of["timeline"]
