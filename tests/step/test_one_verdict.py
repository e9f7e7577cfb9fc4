"""Whatever goes wrong on one rank, all ranks decide the same, hold the same weights, and decide as a single process would."""

import math
from functools import cache

import pytest
import torch
from joint_runs import BAD_STEP, NUM_STEPS, Scenario, train, train_all
from process_group import run_ranks

NO_FORENSICS = {"forensics": {"enabled": False}, "recovery": {"heal": []}}
DROPPING = {"loop": {"grad_accum": 2}, "guards": {"finite": {"drop_micro_batch": True}}, "recovery": {"heal": []}}


def scenarios(world_size):
    last = world_size - 1
    made = {f"nan-{rank}": Scenario("nan", rank) for rank in range(world_size)}
    made |= {
        "healthy": Scenario("none"),
        "micro-batch": Scenario("nan_micro", last, {"loop": {"grad_accum": 2}}),
        "dropped-micro-batch": Scenario("nan_micro", last, DROPPING),
        "sample": Scenario("nan_sample", last),
        "buffers": Scenario("bad_buffers", 0, norm=True),
        "weights": Scenario("bad_weights", last),
        "spike": Scenario("spike", last, num_steps=46),
        "index-error": Scenario("index_error", last),
        "backoff": Scenario("nan", last, NO_FORENSICS),
        "retry-budget": Scenario("nan", 0, {"recovery": {"ladder": ["rollback"]}}),
        "stop": Scenario("nan", last, {"recovery": {"ladder": []}}),
        "sigterm": Scenario("sigterm", last),
        "user-error": Scenario("user_error", last),
        "late-user-error": Scenario("late_user_error", last),
        "backward-error": Scenario("backward_error", last),
        "metric": Scenario("metric_on_one", last),
        "evaluation": Scenario("evaluation", config={"loop": {"eval_every": 5}}, norm=True),
        "fp16": Scenario("nan", last, {"loop": {"precision": "fp16"}}),
        "island": Scenario("huge", last, {"loop": {"precision": "fp16"}}),
    }
    return made


def run_all(rank, world_size, directory):
    return train_all(rank, world_size, scenarios(world_size), directory)


@pytest.fixture(scope="module", params=[2, 3])
def records(request, tmp_path_factory):
    """Of every scenario: the records of all ranks."""
    directory = tmp_path_factory.mktemp(f"ranks-{request.param}")
    by_rank = run_ranks(run_all, request.param, request.param, str(directory), timeout=400)
    return {name: [records[name] for records in by_rank] for name in scenarios(request.param)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same scenario in one process."""

    @cache
    def run(name):
        return train(scenarios(2)[name], str(tmp_path_factory.mktemp(name)), 0, 1)

    return run


def test_all_ranks_end_in_the_same_way(records):
    """With bit-identical weights."""
    for name, (first, *others) in records.items():
        for other in others:
            assert other.summary == first.summary, name
            assert len(other.incidents) == len(first.incidents), name
            assert [i["decision"] for i in other.incidents] == [i["decision"] for i in first.incidents], name
            for one, two in zip([*first.weights, *first.moments], [*other.weights, *other.moments], strict=True):
                assert torch.equal(one, two), name
            for one, two in zip(first.losses, other.losses, strict=True):
                assert one == two or (math.isnan(one) and math.isnan(two)), name
        assert all(torch.isfinite(weight).all() for weight in first.weights), name


AS_ALONE = [
    *("healthy", "micro-batch", "dropped-micro-batch", "weights", "spike", "index-error", "backoff", "retry-budget"),
    *("stop", "sigterm", "nan-0", "nan-1", "nan-2"),
]


@pytest.mark.parametrize("name", AS_ALONE)
def test_ranks_decide_as_a_single_process_would(records, alone, name):
    if name not in records:
        pytest.skip("there is no such rank")
    single, together = alone("nan-0" if name.startswith("nan") else name), records[name][0]
    assert together.steps == single.steps
    assert [i["decision"]["action"] for i in together.incidents] == [i["decision"]["action"] for i in single.incidents]
    assert together.summary == single.summary
    for one, two in zip(together.weights, single.weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_bad_buffers_of_rank_0_are_handled_as_in_one_process(records, alone):
    assert records["buffers"][0].steps == alone("buffers").steps


def test_nan_on_each_rank_in_turn(records):
    num_ranks = len(records["healthy"])
    for rank in range(num_ranks):
        for record in records[f"nan-{rank}"]:
            (incident,) = record.incidents
            assert (incident["step"], incident["rank"]) == (BAD_STEP, rank)
            assert incident["cause"]["label"] == "bad_input_data"
            assert [about["guilty"] for about in incident["ranks"]] == [r == rank for r in range(num_ranks)]
            innocent = next(about for about in incident["ranks"] if not about["guilty"])
            assert "from another rank" in innocent["says"]


def the_incident(ranks):
    (incident,) = ranks[0].incidents
    return incident


def test_where_one_process_is_at_fault_the_incident_says_so(records):
    last = len(records["healthy"]) - 1
    assert not records["healthy"][0].incidents
    assert the_incident(records["micro-batch"])["ranks"][-1]["micro_batch"] == 1
    spike = the_incident(records["spike"])
    assert (spike["trigger"]["guard"], spike["rank"]) == ("spike", last)
    assert the_incident(records["index-error"])["origin"]["op"] == "cross_entropy"
    assert the_incident(records["fp16"])["step"] == BAD_STEP
    assert the_incident(records["dropped-micro-batch"])["decision"]["action"] == "commit"


def test_a_guilty_sample_is_left_out_on_its_rank(records):
    ranks = records["sample"]
    incident = the_incident(ranks)
    assert incident["decision"]["action"] == "commit"
    assert (incident["rank"], incident["samples"]) == (len(ranks) - 1, [0])
    assert any(f"batch of rank {len(ranks) - 1}" in reason for reason in incident["decision"]["reasons"])


@pytest.mark.parametrize("name", ["buffers", "weights"])
def test_bad_state_on_one_rank_is_rolled_back_on_all(records, name):
    incident = the_incident(records[name])
    assert incident["decision"]["action"] == "rollback"
    assert records[name][0].summary["rollbacks"] == 1
    assert "not finite" in " ".join(incident["decision"]["reasons"])


def test_backoff_rollback_and_stop(records):
    assert min(scale for _, _, scale in records["backoff"][0].steps) < 1.0
    assert records["retry-budget"][0].summary["rollbacks"] == 1
    assert {record.error for record in records["stop"]} == {"TrainingStopped"}


def test_a_signal_on_one_rank_saves_on_all_at_the_same_step(records):
    assert {record.error for record in records["sigterm"]} == {"Interrupted"}
    assert records["sigterm"][0].summary["steps"] == BAD_STEP + 1
    assert any(f"{BAD_STEP + 1:06d}" in name for name in records["sigterm"][0].checkpoints)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("user-error", "a mistake in user code"),
        ("late-user-error", "after the model was called"),
        ("backward-error", "backward hook"),
    ],
)
def test_an_exception_of_user_code_on_one_rank_ends_all_ranks(records, name, says):
    *others, guilty = records[name]
    assert guilty.error == "KeyError"
    assert {record.error for record in others} == {"RankError"}
    for record in others:
        assert f"rank {len(others)} raised KeyError" in record.message
        assert says in record.message
        assert f"step {BAD_STEP}" in record.message
    assert guilty.summary["steps"] == BAD_STEP
    assert name == "backward-error" or any(f"{BAD_STEP:06d}" in saved for saved in records[name][0].checkpoints)


def test_metrics_of_one_rank_and_evaluation_are_equal_on_all_ranks(records, alone):
    assert len(records["metric"][0].losses) == NUM_STEPS
    evaluations = [record.evaluations for record in records["evaluation"]]
    assert all(each == evaluations[0] for each in evaluations)
    assert [e["step"] for e in evaluations[0]] == [e["step"] for e in alone("evaluation").evaluations]


def test_an_island_is_grown_on_all_ranks(records):
    ranks = records["island"]
    incident = the_incident(ranks)
    assert all(record.islands == ranks[0].islands for record in ranks)
    assert ranks[0].islands
    assert (incident["rank"], incident["decision"]["action"]) == (len(ranks) - 1, "commit")
