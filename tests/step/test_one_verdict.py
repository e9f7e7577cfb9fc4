"""Whatever goes wrong on one rank, all ranks decide the same, hold the same weights, and decide as a single process would."""

import math

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


@pytest.fixture
def alone(tmp_path):
    """The same scenario in one process."""

    def run(name):
        return train(scenarios(2)[name], str(tmp_path / name), 0, 1)

    return run


def assert_together(ranks):
    """All ranks ended in the same way, with bit-identical weights."""
    first = ranks[0]
    for other in ranks[1:]:
        assert other.summary == first.summary
        assert len(other.incidents) == len(first.incidents)
        assert [i["decision"] for i in other.incidents] == [i["decision"] for i in first.incidents]
        for one, two in zip([*first.weights, *first.moments], [*other.weights, *other.moments], strict=True):
            assert torch.equal(one, two)
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(first.losses, other.losses, strict=True))
    assert all(torch.isfinite(weight).all() for weight in first.weights)


def assert_decided_as(ranks, single):
    together = ranks[0]
    assert together.steps == single.steps
    assert [i["decision"]["action"] for i in together.incidents] == [i["decision"]["action"] for i in single.incidents]
    assert together.summary == single.summary
    for one, two in zip(together.weights, single.weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_healthy(records, alone):
    assert_together(records["healthy"])
    assert_decided_as(records["healthy"], alone("healthy"))
    assert not records["healthy"][0].incidents


def test_nan_on_each_rank_in_turn(records, alone):
    single = alone("nan-0")
    num_ranks = len(records["healthy"])
    for rank in range(num_ranks):
        ranks = records[f"nan-{rank}"]
        assert_together(ranks)
        assert_decided_as(ranks, single)
        for record in ranks:
            (incident,) = record.incidents
            assert (incident["step"], incident["rank"]) == (BAD_STEP, rank)
            assert incident["cause"]["label"] == "bad_input_data"
            assert [about["guilty"] for about in incident["ranks"]] == [r == rank for r in range(num_ranks)]
            innocent = next(about for about in incident["ranks"] if not about["guilty"])
            assert "from another rank" in innocent["says"]


def test_nan_in_one_micro_batch(records, alone):
    assert_together(records["micro-batch"])
    assert_decided_as(records["micro-batch"], alone("micro-batch"))
    (incident,) = records["micro-batch"][0].incidents
    assert incident["ranks"][-1]["micro_batch"] == 1


def test_a_bad_micro_batch_is_left_out_on_all_ranks(records, alone):
    assert_together(records["dropped-micro-batch"])
    assert_decided_as(records["dropped-micro-batch"], alone("dropped-micro-batch"))
    (incident,) = records["dropped-micro-batch"][0].incidents
    assert incident["decision"]["action"] == "commit"


def test_a_guilty_sample_is_left_out_on_its_rank(records):
    ranks = records["sample"]
    assert_together(ranks)
    (incident,) = ranks[0].incidents
    assert incident["decision"]["action"] == "commit"
    assert (incident["rank"], incident["samples"]) == (len(ranks) - 1, [0])
    assert any(f"batch of rank {len(ranks) - 1}" in reason for reason in incident["decision"]["reasons"])


@pytest.mark.parametrize("name", ["buffers", "weights"])
def test_bad_state_on_one_rank_is_rolled_back_on_all(records, name):
    ranks = records[name]
    assert_together(ranks)
    (incident,) = ranks[0].incidents
    assert incident["decision"]["action"] == "rollback"
    assert ranks[0].summary["rollbacks"] == 1
    assert "not finite" in " ".join(incident["decision"]["reasons"])


def test_bad_weights_are_handled_as_in_one_process(records, alone):
    assert_decided_as(records["weights"], alone("weights"))


def test_bad_buffers_of_rank_0_are_handled_as_in_one_process(records, alone):
    single = alone("buffers")
    assert records["buffers"][0].steps == single.steps


def test_spike_on_one_rank(records, alone):
    assert_together(records["spike"])
    assert_decided_as(records["spike"], alone("spike"))
    (incident,) = records["spike"][0].incidents
    assert (incident["trigger"]["guard"], incident["rank"]) == ("spike", len(records["spike"]) - 1)


def test_an_exception_caused_by_data_is_a_refused_step(records, alone):
    assert_together(records["index-error"])
    assert_decided_as(records["index-error"], alone("index-error"))
    (incident,) = records["index-error"][0].incidents
    assert incident["origin"]["op"] == "cross_entropy"


def test_skip_and_backoff(records, alone):
    assert_together(records["backoff"])
    assert_decided_as(records["backoff"], alone("backoff"))
    assert min(scale for _, _, scale in records["backoff"][0].steps) < 1.0


def test_rollback(records, alone):
    assert_together(records["retry-budget"])
    assert_decided_as(records["retry-budget"], alone("retry-budget"))
    assert records["retry-budget"][0].summary["rollbacks"] == 1


def test_stop(records, alone):
    assert_together(records["stop"])
    assert_decided_as(records["stop"], alone("stop"))
    assert {record.error for record in records["stop"]} == {"TrainingStopped"}


def test_a_signal_on_one_rank_saves_on_all_at_the_same_step(records, alone):
    assert_together(records["sigterm"])
    assert_decided_as(records["sigterm"], alone("sigterm"))
    assert {record.error for record in records["sigterm"]} == {"Interrupted"}
    assert records["sigterm"][0].summary["steps"] == BAD_STEP + 1
    assert any(f"{BAD_STEP + 1:06d}" in name for name in records["sigterm"][0].checkpoints)


@pytest.mark.parametrize(
    ("name", "says"), [("user-error", "a mistake in user code"), ("backward-error", "backward hook")]
)
def test_an_exception_of_user_code_on_one_rank_ends_all_ranks(records, name, says):
    *others, guilty = records[name]
    assert guilty.error == "KeyError"
    assert {record.error for record in others} == {"RankError"}
    for record in others:
        assert f"rank {len(others)} raised KeyError" in record.message
        assert says in record.message
        assert f"step {BAD_STEP}" in record.message
    assert_together(records[name])
    assert guilty.summary["steps"] == BAD_STEP


def test_the_state_is_saved_when_user_code_raises(records):
    assert any(f"{BAD_STEP:06d}" in name for name in records["user-error"][0].checkpoints)


def test_a_metric_that_only_one_rank_returns(records):
    assert_together(records["metric"])
    assert len(records["metric"][0].losses) == NUM_STEPS


def test_evaluation_is_sharded_and_equal_on_all_ranks(records, alone):
    assert_together(records["evaluation"])
    evaluations = [record.evaluations for record in records["evaluation"]]
    assert all(each == evaluations[0] for each in evaluations)
    assert [e["step"] for e in evaluations[0]] == [e["step"] for e in alone("evaluation").evaluations]


def test_the_fp16_scaler_agrees(records):
    assert_together(records["fp16"])
    assert [i["step"] for i in records["fp16"][0].incidents] == [BAD_STEP]


def test_an_island_is_grown_on_all_ranks(records):
    assert_together(records["island"])
    assert all(record.islands == records["island"][0].islands for record in records["island"])
    (incident,) = records["island"][0].incidents
    assert incident["rank"] == len(records["island"]) - 1
    assert incident["decision"]["action"] == "commit"
    assert records["island"][0].islands
