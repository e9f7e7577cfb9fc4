"""Checks of the initial weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..._private.modules import transposed_convolutions
from ...core.numbers import amount, listed
from ...tensors.devices import wide
from ...tensors.rng import seed_everything
from ...trainer.trainer import SafeTrainer
from ..outcome import Outcome, Problems, failed, graded, passed, warned, worst
from ..registry import preflight_check
from ..subject import Subject

MAX_REBUILT_BYTES = 2**30
HUGE = 1e6
"""No initialisation gives a weight this large, but uninitialised memory does."""
EXTREME, LARGE, SMALL = 100.0, 20.0, 1e-3
"""Limits of RMS(weight) * sqrt(fan_in). torch's default initialisation gives around 0.6."""


@preflight_check(
    looks_at="initial weights that are NaN or Inf, or were never written to",
    fails="one is",
    fix="initialise the parameter named",
)
def weights_finite(subject: Subject) -> Outcome:
    problems = Problems()
    for name, tensor in subject.model.named_parameters():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        values = tensor.detach().float()
        num_bad = int((~torch.isfinite(values)).sum())
        if num_bad and not tensor.requires_grad:
            continue  # a mask, say
        if num_bad:
            problems.fail(
                f"{name} holds {num_bad} NaN or Inf of {tensor.numel()} values",
                f"initialise {name} with finite values, or load weights that are (nn.init.xavier_uniform_, say)",
                parameter=name,
            )
        elif float(values.abs().max()) > HUGE:
            problems.fail(
                f"{name} holds {amount(float(values.abs().max()))}: uninitialised memory, or an initialisation gone wrong",
                f"initialise {name} (nn.init.xavier_uniform_ for a matrix, zeros for a bias); torch.empty does not",
                parameter=name,
            )
    rebuilt = _uninitialised(subject)
    for name in rebuilt or ():
        problems.fail(
            f"{name} is never initialised: it holds arbitrary memory",
            f"initialise {name} (nn.init.xavier_uniform_ for a matrix, zeros for a bias); torch.empty does not",
            parameter=name,
        )
    count = sum(p.numel() for p in subject.model.parameters())
    how = "all finite and initialised" if rebuilt is not None else "all finite"
    return worst(problems, passed(f"{count:,} weights, {how}", num_weights=count))


def _uninitialised(subject: Subject) -> list[str] | None:
    """Build the model again while torch fills new memory with NaN: parameters that are NaN were never initialised.

    None if that is not possible: the model was passed in, or is too large to have twice.
    """
    trainer = subject.trainer
    is_built_here = trainer.config.model is not None or type(trainer).build_model is not SafeTrainer.build_model
    size = sum(p.nbytes for p in subject.model.parameters())
    if not is_built_here or size > MAX_REBUILT_BYTES:
        return None
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with subject.clean(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if trainer.config.seed is not None:
                seed_everything(trainer.config.seed)
            torch.use_deterministic_algorithms(True, warn_only=True)
            again = trainer.build_model()
        except Exception:
            return None
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    own = dict(subject.model.named_parameters())
    found = dict(again.named_parameters())
    if [p.shape for p in own.values()] != [p.shape for p in found.values()]:
        return None  # the trainer has another model than build_model returns
    return [
        name
        for name, parameter in found.items()
        if parameter.is_floating_point() and bool(parameter.isnan().any()) and not bool(own[name].isnan().any())
    ]


@preflight_check(
    looks_at="initial weights that are extreme or near zero",
    fails="100 times too large, all near zero, or zeros that get no gradient",
    warns="20 times too large, or one near zero",
    fix="initialise with a deviation of 1/sqrt(fan_in)",
)
def weights_scale(subject: Subject) -> Outcome:
    problems = Problems()
    sizes = {name: _rms(weight) * math.sqrt(fan_in) for name, weight, fan_in in _matrices(subject.model)}
    tiny = [name for name, size in sizes.items() if size < SMALL]
    if len(tiny) > 1 and len(tiny) == len(sizes):
        problems.fail(
            f"every weight matrix is near zero: {listed(tiny)}",
            "initialise the weights at random with a deviation of about 1/sqrt(fan_in): nn.init.kaiming_uniform_, xavier_uniform_",
            parameters=tiny,
        )
    for name, size in sizes.items():
        problems += _judge(subject, name, size)
    if not sizes:
        return passed("no weight matrix")
    limits = f"{amount(min(sizes.values()))} to {amount(max(sizes.values()))}"
    return worst(problems, passed(f"RMS times sqrt(fan-in) from {limits}, usual is 0.5 to 2", sizes=sizes))


def _judge(subject: Subject, name: str, size: float) -> Iterator[Outcome]:
    if size > LARGE:
        yield graded(
            size > EXTREME,
            f"{name} is too large: its outputs are about {amount(size)} times as large as its inputs",
            f"scale the initialisation of {name} down {amount(size)}-fold: a deviation of about 1/sqrt(fan_in)",
            parameter=name,
            size=size,
        )
    elif 0 < size < SMALL:
        yield warned(
            f"{name} is near zero: its outputs are about {amount(size)} times as large as its inputs",
            f"initialise {name} with a deviation of about 1/sqrt(fan_in), or with exact zeros if the branch is to start at zero",
            parameter=name,
            size=size,
        )
    elif size == 0:
        gradient = subject.observed.gradients.get(name)
        # Zeros that get a gradient are a common initialisation of a branch; without a gradient they stay zero.
        if gradient is not None and not bool(gradient.any()):
            yield failed(
                f"{name} is all zeros and gets no gradient, so it stays zero",
                f"initialise {name} at random, or the layer before it: not both with zeros",
                parameter=name,
                size=0.0,
            )


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Weight matrices with their fan-in, except embeddings, which only look up."""
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(path, recurse=False):
            if weight.dim() < 2 or not weight.is_floating_point() or not weight.numel() or not weight.requires_grad:
                continue
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                continue
            transposed = isinstance(module, transposed_convolutions())
            fan_in = weight.shape[0 if transposed else 1] * math.prod(weight.shape[2:])
            yield name, weight.detach(), fan_in


def _rms(weight: Tensor) -> float:
    return float(torch.linalg.vector_norm(wide(weight))) / math.sqrt(max(weight.numel(), 1))
