"""One test per rule: each fires, as the first that does, on a failure made for it."""

from __future__ import annotations

import math

import pytest
import test_failures_backward
import test_failures_forward
import test_failures_precision
import test_failures_state
import torch
from forensic_cases import Case, Tiny, incident_of
from torch import nn

from safetrain.forensics import causes, raised
from safetrain.forensics import remedies as remedy_trials
from safetrain.forensics.finding import Finding, locate
from safetrain.forensics.replay import Replayer
from safetrain.forensics.step import Step
from safetrain.forensics.update import locate_in_update


def negative_running_variance():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[1].running_var.fill_(-1)
    model[1].eval()
    return model, lambda m, b: m(b).mean(), torch.randn(3, 4)


def masks_of_the_lowest_number_added_up():
    def loss_fn(model, batch):
        mask = torch.zeros(3, 3)
        mask[1] = torch.finfo(torch.float32).min
        return (model(batch) + (mask + mask)).softmax(1)[:, 0].mean()

    return Tiny(), loss_fn, torch.randn(3, 4)


def second_moment_overflows_in_half():
    model = Tiny().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.5))
    return model, lambda m, b: m(b).float().sum() * 2e3, torch.ones(3, 4).half(), optimizer


def learning_rate_beyond_all_bounds():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    return model, lambda m, b: m(b).sum() * 1e15, torch.ones(3, 4), optimizer


# Rule -> the failure that only this rule explains.
EXAMPLES = {
    "corrupt_parameter": "weight_that_was_never_initialised",
    "negative_running_variance": negative_running_variance,
    "bad_input_data": "infinite_feature_in_a_nested_batch",
    "custom_backward_bug": "custom_backward_divides_by_norm",
    "optimizer_underflow": "adam_eps_in_half",
    "optimizer_overflow_in_half": second_moment_overflows_in_half,
    "update_overflows": learning_rate_beyond_all_bounds,
    "optimizer_numerics": "schedule_that_gives_nan",
    "infeasible_target": "ctc_target_longer_than_input",
    "neg_inf_mask": "attention_over_no_neighbours",
    "lowest_number_as_mask": masks_of_the_lowest_number_added_up,
    "empty_reduction": "every_label_ignored",
    "degenerate_decomposition": "eigenvectors_with_repeated_eigenvalues",
    "fp16_underflow": "eps_that_vanishes_in_half",
    "fp16_overflow": "attention_scores_without_scaling",
    "masked_branch_gradient": "where_hides_log_of_zero",
    "singular_gradient": "euclidean_distance_of_equal_points",
    "exp_overflow": "softmax_written_by_hand",
    "outside_support": "beta_density_on_the_edge",
    "log_of_nonpositive": "log_of_relu_output",
    "division_by_zero": "instance_statistics_without_eps",
    "invalid_domain": "hyperbolic_distance_below_one",
    "divergence": "recurrence_that_explodes",
}
_FILES = (test_failures_forward, test_failures_backward, test_failures_precision, test_failures_state)
CASES: dict[str, Case] = {case.id: case for file in _FILES for case in file.cases}


def find(example: object) -> Finding:
    case = CASES[example] if isinstance(example, str) else None
    model, loss_fn, batch, *rest = case.build() if case else example()  # type: ignore[operator]
    step = Step(model, loss_fn, [batch], *rest, **(case.options if case else {}))
    with Replayer(step) as replayer:
        trace = replayer.traced()
        finding = locate(trace, replayer) or locate_in_update(replayer, trace)
        assert finding is not None
        if finding.is_low_precision:
            finding.finite_in_fp32 = remedy_trials.in_fp32(replayer).finite
    return finding


@pytest.mark.parametrize("label_and_rule", causes.RULES, ids=lambda pair: pair[1].__name__)
def test_rule(label_and_rule: tuple[str, causes.Rule]) -> None:
    label, rule = label_and_rule
    finding = find(EXAMPLES[rule.__name__])
    first = next(r for _, r in causes.RULES if r(finding) is not None)
    assert first is rule
    cause = causes.judge(finding)
    assert cause.label == label
    assert cause.explanation


def test_what_no_rule_explains_is_unknown_with_the_operands() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * float("nan")).mean()

    cause = causes.judge(find(lambda: (Tiny(), loss_fn, torch.randn(3, 4))))
    assert cause.label == "unknown"
    assert "of 9 values" in cause.explanation


def test_explanations_are_made_of_the_measured_numbers() -> None:
    explanation = causes.judge(find("log_of_relu_output")).explanation
    assert "1 zero of 3 values" in explanation


@pytest.mark.parametrize(
    ("message", "label"),
    [
        ("Target 7 is out of bounds.", "bad_input_data"),
        ("index out of range in self", "bad_input_data"),
        ("Expected more than 1 value per channel when training, got input size [1, 3]", "empty_reduction"),
        ("linalg.svd: The algorithm failed to converge", "degenerate_decomposition"),
        ("value cannot be converted to type at::Half without overflow", "fp16_overflow"),
        ("all elements of input should be between 0 and 1", "invalid_domain"),
        ("mat1 and mat2 shapes cannot be multiplied (3x5 and 4x3)", "unknown"),
    ],
)
def test_messages_of_torch(message: str, label: str) -> None:
    assert raised.explain_error(RuntimeError(message)).label == label
    assert raised.is_numeric(RuntimeError(message)) is (label != "unknown")


def test_forbidden_transitions_in_a_parameter_are_meant() -> None:
    """-inf in a parameter that is added to scores: the bad value is elsewhere."""
    model = Tiny()
    model.transitions = nn.Parameter(torch.tensor([0.0, -math.inf, 1.0]))

    def loss_fn(m, x):
        scores = torch.logsumexp(m(x) + m.transitions, 1)
        return (scores / x.sum(1)).mean()

    batch = torch.rand(5, 4)
    batch[3] = 0
    incident = incident_of(model, loss_fn, batch)
    assert (incident.origin.name, incident.cause.label, incident.samples) == ("div", "division_by_zero", [3])
