"""What follows from the numbers that ranks exchange. Plain numbers, no processes."""

import math

import pytest
import torch

from safetrain.core.verdict import Action, Verdict, merge
from safetrain.distributed.agreement import (
    Layout,
    RankDecision,
    RankReports,
    RankState,
    RankStatus,
    largest_over,
    mean_over,
    merged,
    tallied,
)

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def reports(*rows, statuses=None):
    statuses = statuses or [RankState.STEP] * len(rows)
    return RankReports([RankStatus(status) for status in statuses], [tallied(row) for row in rows])


def test_packing_and_unpacking_a_vector_round_trips():
    layout = Layout()
    layout.extend(["loss/0", "metric/accuracy", "metric/elsewhere"])
    word = RankStatus(RankState.FAILED, signal=15, out_of_time=True, trail=2**32 - 1, last_norm=0.1, num_unknown=2)
    values = {"loss/0": [torch.tensor(1.5)], "metric/accuracy": [0.25, torch.tensor(0.75)]}
    reports = layout.unpack(layout.pack(word, values, CPU).numpy()[None])
    (unpacked,), (row,) = reports.statuses, reports.rows
    assert unpacked == word
    assert row == tallied(values)
    assert "metric/elsewhere" not in row


def test_the_layout_only_grows():
    layout = Layout()
    layout.extend(["a", "b", "a"])
    layout.extend(["c", "b"])
    assert layout.names == ["a", "b", "c"]
    assert layout.num_unknown({"b": [1.0], "d": [1.0]}) == 1


@pytest.mark.parametrize(
    ("values", "mean", "largest"),
    [
        ([1.0, 3.0], 2.0, 3.0),
        ([1.0, NAN], NAN, NAN),
        ([NAN, 1.0], NAN, NAN),
        ([INF, 1.0], INF, INF),
        ([INF, -INF], NAN, INF),
    ],
)
def test_non_finite_numbers_of_any_rank_show_in_mean_and_maximum(values, mean, largest):
    rows = [tallied({"x": [value]}) for value in values]
    assert mean_over(rows, "x") == pytest.approx(mean, nan_ok=True)
    assert largest_over(rows, "x") == pytest.approx(largest, nan_ok=True)


def test_a_metric_of_some_ranks_is_averaged_over_them():
    rows = [tallied({"x": [1.0, 2.0]}), tallied({}), tallied({"x": [6.0]})]
    assert mean_over(rows, "x") == 3.0


@pytest.mark.parametrize(
    ("exchange", "suspects"),
    [
        (reports({"loss/0": [1.0]}, {"loss/0": [NAN]}), [1, 0]),
        (reports({"loss/0": [1.0]}, {"loss/0": [2.0]}), [1, 0]),
        (reports({"loss/0": [2.0]}, {"loss/0": [2.0]}), [0, 1]),
        (reports({"loss/0": [2.0]}, {"loss/0": [INF]}, {"loss/0": [NAN], "signal/b": [INF]}), [2, 1, 0]),
        (reports({"loss/0": [NAN]}, {}, statuses=[RankState.STEP, RankState.FAILED]), [1, 0]),
    ],
)
def test_suspects(exchange, suspects):
    assert exchange.suspects == suspects


@pytest.mark.parametrize(
    ("statuses", "diverged"),
    [
        ([RankStatus(RankState.STEP, trail=1), RankStatus(RankState.STEP, trail=1)], []),
        ([RankStatus(RankState.STEP, trail=1), RankStatus(RankState.STEP, trail=2)], [1]),
        ([RankStatus(RankState.STEP, last_norm=1.0), RankStatus(RankState.STEP, last_norm=1.01)], [1]),
        ([RankStatus(RankState.STEP, last_norm=NAN), RankStatus(RankState.STEP, last_norm=NAN)], []),
    ],
)
def test_diverged_ranks_are_detected(statuses, diverged):
    assert RankReports(statuses).diverged == diverged


def test_a_signal_or_time_limit_on_any_rank_holds_for_all():
    fields = ({}, {"signal": 15}, {"out_of_time": True})
    exchange = RankReports([RankStatus(RankState.STEP, **given) for given in fields])
    assert exchange.signal == 15
    assert exchange.out_of_time


def test_the_most_severe_verdict_of_any_rank_wins():
    mild = RankDecision(merge([("finite", Verdict(Action.SKIP, reason="nan")), ("spike", Verdict())]))
    severe = RankDecision(merge([("finite", Verdict(Action.ROLLBACK, reason="bad state", bad_state={"w": "NaN"}))]))
    for opinions, rank in (([mild, severe], 1), ([severe, mild], 0)):
        decision = merged(opinions, suspects=[0, 1])
        assert decision.action is Action.ROLLBACK
        assert decision.verdicts["finite"].evidence["rank"] == rank


def test_of_equal_verdicts_the_one_of_the_first_suspect_is_kept():
    opinions = [RankDecision(merge([("finite", Verdict(Action.SKIP, reason=f"of rank {rank}"))])) for rank in range(3)]
    assert merged(opinions, suspects=[2, 0, 1]).reasons == ["finite: of rank 2"]


def test_a_verdict_that_names_samples_is_preferred():
    blank = RankDecision(merge([("batch", Verdict(Action.SKIP, reason="something is bad"))]))
    named = RankDecision(merge([("batch", Verdict(Action.SKIP, reason="sample 3", bad_samples={0: [3]}))]))
    assert merged([blank, named], suspects=[0, 1]).reasons == ["batch: sample 3"]


def test_verdicts_of_ranks_that_did_not_raise_are_ignored():
    guilty = RankDecision(merge([("loop", Verdict(Action.SKIP, reason="IndexError"))]))
    bystander = RankDecision(merge([("loop", Verdict(Action.STOP, reason="RankError"))]), is_bystander=True)
    assert merged([bystander, guilty], suspects=[1, 0]).reasons == ["loop: IndexError"]


def test_an_error_in_backward_refuses_the_step_even_if_the_guards_do_not():
    fine = RankDecision(merge([("finite", Verdict())]))
    failed = RankDecision(merge([("finite", Verdict())]), late_error="backward raised RuntimeError: nan")
    decision = merged([fine, failed], suspects=[1, 0])
    assert decision.action is Action.SKIP
    assert "on rank 1, backward raised" in decision.reasons[0]


@pytest.mark.parametrize("world_size", [2, 3, 1024])
def test_the_means_of_a_table_are_those_of_its_rows(world_size):
    """Bit for bit, and NaN on a rank shows."""
    torch.manual_seed(0)
    layout = Layout()
    layout.extend(["a", "b", "c"])
    values = [
        {"a": [torch.rand(())], "b": [1.0] * (rank % 2), "c": [math.nan if rank == world_size - 1 else float(rank)]}
        for rank in range(world_size)
    ]
    status = RankStatus(RankState.STEP, trail=7, last_norm=math.nan)
    reports = layout.unpack(torch.stack([layout.pack(status, each, CPU) for each in values]).numpy())
    assert reports.are_alike
    assert (reports.diverged, reports.in_state(RankState.FATAL), reports.signal) == ([], [], None)
    rows = list(reports.rows)
    for name in ("a", "b", "c"):
        assert str(mean_over(reports.rows, name)) == str(mean_over(rows, name))
        assert str(largest_over(reports.rows, name)) == str(largest_over(rows, name))
    other = torch.stack(
        [layout.pack(RankStatus(RankState.STEP, signal=15 * (rank == 1)), {}, CPU) for rank in range(world_size)]
    )
    reports = layout.unpack(other.numpy())
    assert not reports.are_alike
    assert reports.signal == 15
