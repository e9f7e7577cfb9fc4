"""Training that runs and does not learn is noticed with its cause; of a healthy run nothing is said, and it is not changed."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from process_group import run_ranks
from torch import nn

from safetrain import SafeTrainer, TrainingStopped
from safetrain.guards.fingerprint import Sample, digests

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.silentbench import run
from scripts.silentbench_cases import CASES, STEPS, blobs, mlp

sys.path.pop(0)
FAULTS = {case.name: case for case in CASES if case.expected}
HEALTHY = {case.name: case for case in CASES if not case.expected}
AT_ONCE = [
    *("rate_of_zero", "optimizer_that_returns", "low_precision_weights", "head_replaced_after_the_optimizer"),
    *("optimizer_of_a_copy", "layers_in_a_list", "branch_that_is_not_used", "softmax_before_cross_entropy"),
    *("left_in_eval_mode_by_the_loss", "autocast_turned_off_inside"),
]


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("safetrain").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("safetrain").setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", FAULTS)
def test_a_silent_error_is_noticed_with_its_cause(name):
    score = run(FAULTS[name])
    assert set(score.labels) & set(score.expected), score
    if name in AT_ONCE:
        assert score.first <= 1


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_run(name):
    assert run(HEALTHY[name]).labels == ()


def weights_after(name, **guards):
    torch.manual_seed(0)
    problem = HEALTHY[name].build()
    config = {**problem.config, "guards": guards, "logging": {"console": "off", "tensorboard": False}}
    parts = {"loss_fn": problem.loss, "optimizer": problem.optimizer, "scheduler": problem.scheduler}
    problem.trainer(problem.model, train_data=problem.data, config=config, **parts).fit()
    return list(problem.model.state_dict().values())


@pytest.mark.parametrize("name", ["plain", "variational_autoencoder", "boltzmann_machine"])
def test_a_healthy_run_is_bit_for_bit_the_same_without_the_guard(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(torch.equal, weights_after(name), weights_after(name, sanity=None)))


def test_nothing_can_be_learned_so_the_run_stops(make_trainer):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-18)
    trainer = make_trainer(model, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), train_data=blobs())
    with pytest.raises(TrainingStopped) as stopped:
        trainer.fit()
    incident = stopped.value.incident
    assert (incident.trigger.guard, incident.cause.label) == ("sanity", "weights_unchanged")
    assert "learning rate" in incident.fix
    assert stopped.value.result.steps < STEPS


def test_strict_stops_at_the_first_finding(make_trainer):
    model = nn.Sequential(mlp(), nn.Softmax(1))
    config = {"guards": {"sanity": {"strict": True}}}
    with pytest.raises(TrainingStopped, match="softmax"):
        make_trainer(model, loss_fn=nn.CrossEntropyLoss(), train_data=blobs(), config=config).fit()


def test_a_warning_is_said_once_with_names_and_advice_and_can_be_turned_off(make_trainer):
    def fit(**options):
        model = mlp(10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[2] = nn.Linear(32, 4)
        parts = {"optimizer": optimizer, "loss_fn": nn.CrossEntropyLoss(), "train_data": blobs()}
        return make_trainer(model, config={"guards": {"sanity": options}}, **parts).fit()

    (warning,) = fit().warnings
    assert warning["names"] == ["2.weight", "2.bias"]
    assert "requires_grad_(False)" in warning["advice"]
    assert fit(ignore=["not_in_optimizer"]).warnings == []


def test_a_schedule_that_ends_at_zero_with_the_run_is_no_finding(make_trainer):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 50))
    parts = {"optimizer": optimizer, "scheduler": schedule, "loss_fn": nn.CrossEntropyLoss()}
    result = make_trainer(model, train_data=blobs(54), config={"loop": {"max_steps": 54}}, **parts).fit()
    assert (result.steps, result.warnings) == (54, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_one_bit_changes_a_fingerprint(dtype):
    tensors = [torch.randn(7, 5).to(dtype), torch.randn(3).to(dtype)]
    before = digests(tensors)
    tensors[0].view(torch.uint8)[2, 1] ^= 4
    assert (digests(tensors) != before).tolist() == [True, False]


def test_a_sample_sees_that_weights_move_and_that_they_have_moved_away():
    layer = nn.Linear(300, 300)
    sample = Sample(list(layer.parameters()))
    before = sample.take()
    with torch.no_grad():
        layer.weight += 1e-3
    assert sample.take() != before
    assert sample.is_current(list(layer.parameters()))
    layer.weight.data = layer.weight.data.clone()
    assert not sample.is_current(list(layer.parameters()))


class Straying(SafeTrainer):
    def on_commit(self, view):
        if view.step == 6 and self.machine.rank == 1:
            self.model[2].bias.data[1] += 1e-6


def train(rank, fault, run_dir):
    torch.manual_seed(3)
    model = mlp()
    data = blobs(24)
    if fault == "same data":
        data = [batch for batch in data[:12] for _ in range(2)]
    trainer = (Straying if fault == "replicas" else SafeTrainer)(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        train_data=data,
        config={
            "loop": {"device": "cpu"},
            "checkpoint": {"snapshot_every": 2},
            "logging": {"console": "off", "tensorboard": False},
        },
        run_dir=run_dir,
    )
    result = trainer.fit()
    found = [(w["step"], w["label"]) for w in result.warnings]
    about = [(i.step, i.cause.label, i.cause.explanation, i.rank, i.decision.action) for i in result.incidents]
    return found, about, model[2].bias.tolist()


@pytest.mark.parametrize("fault", ["none", "replicas", "same data"])
def test_ranks_that_differ_or_train_on_the_same_data(tmp_path, fault):
    first, second = run_ranks(train, 2, fault, str(tmp_path / "run"), timeout=90)
    assert first[2] == second[2]
    if fault == "none":
        assert (first[:2], second[:2]) == (([], []), ([], []))
    elif fault == "replicas":
        ((step, label, explanation, _, action),) = first[1]
        assert (step, label, action) == (7, "replicas_differ", "rollback"), "of two it is not known which is right"
        assert explanation == "the ranks differ in 1 of 4 weights: 2.bias"
    else:
        assert first[0][0][1] == "repeated_data"
        assert first[0][0][0] <= 2


def test_a_rank_that_differs_from_most_takes_over_what_they_have(tmp_path):
    outcomes = run_ranks(train, 3, "replicas", str(tmp_path / "run"), timeout=90)
    for _, incidents, bias in outcomes:
        ((step, label, explanation, rank, action),) = incidents
        assert (step, label, rank, action) == (7, "replicas_differ", 1, "commit")
        assert explanation == "rank 1 differs in 1 of 4 weights: 2.bias"
        assert bias == outcomes[0][2]


def test_an_update_that_sums_to_zero_changes_the_fingerprint():
    before = torch.tensor([-10.0, -10.0, -10.0])
    after = before + torch.tensor([0.25, 0.25, -0.5])
    assert not torch.equal(digests([before]), digests([after]))
