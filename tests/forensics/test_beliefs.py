"""Examples that people believe to know, and what is true of them."""

from __future__ import annotations

import torch
from forensic_cases import Tiny
from torch import nn

from safetrain.forensics import investigate


def test_division_by_a_difference_of_equals_gives_inf_in_forward() -> None:
    """x / (x - x): anomaly mode says nothing of it, because no backward op returns NaN first."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch)
        return (x / (x - x)).mean()

    incident = investigate(Tiny(), loss_fn, torch.rand(3, 4))
    assert incident is not None
    assert (incident.origin.phase, incident.origin.name, incident.cause.label) == ("forward", "div", "division_by_zero")


def test_log_of_a_softmax_that_underflowed() -> None:
    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        p = torch.softmax(1e3 * model(x), 1)
        return -(y * torch.log(p)).sum(1).mean()  # 0 * -inf where the probability is 0

    y = nn.functional.one_hot(torch.tensor([0, 1, 2]), 3).float()
    incident = investigate(Tiny(), loss_fn, (torch.randn(3, 4), y))
    assert incident is not None
    assert (incident.origin.phase, incident.origin.name, incident.cause.label) == (
        "forward",
        "log",
        "log_of_nonpositive",
    )
    assert "torch.log(p)" in (incident.origin.code or "")


def test_repeated_squaring_is_divergence_at_the_square_that_overflows() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        h = model(batch) + 10
        for _ in range(8):
            h = h * h
        return h.mean()

    incident = investigate(Tiny(), loss_fn, torch.randn(3, 4))
    assert incident is not None
    assert (incident.origin.phase, incident.origin.name, incident.cause.label) == ("forward", "mul", "divergence")


def test_where_hides_nan_in_forward_but_not_in_backward() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = model(batch) ** 2
        root = torch.sqrt(x)
        return torch.where(x > 0, root, torch.zeros_like(x)).mean()

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    batch = torch.randn(3, 4)
    batch[1] = 0
    incident = investigate(model, loss_fn, batch)
    assert incident is not None
    assert (incident.origin.phase, incident.origin.name) == ("backward", "sqrt")
    assert incident.cause.label == "masked_branch_gradient"
    assert incident.samples == [1]


def test_clipping_before_backward_does_nothing() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).pow(2).sum(1).sqrt().mean()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    incident = investigate(model, loss_fn, torch.zeros(3, 4))
    assert incident is not None
    assert (incident.origin.phase, incident.origin.name, incident.cause.label) == (
        "backward",
        "sqrt",
        "singular_gradient",
    )


def test_sigmoid_then_log_at_saturation() -> None:
    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        p = torch.sigmoid(1e4 * model(x)[:, 0])
        positive = y * torch.log(p)
        negative = (1 - y) * torch.log(1 - p)
        return -(positive + negative).mean()

    incident = investigate(Tiny(), loss_fn, (torch.randn(3, 4), torch.tensor([0.0, 1.0, 0.0])))
    assert incident is not None
    assert (incident.origin.phase, incident.origin.name, incident.cause.label) == (
        "forward",
        "log",
        "log_of_nonpositive",
    )
    assert "safetrain.safe.log" in incident.fix
