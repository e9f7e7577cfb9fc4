"""Measures an op while its operands are alive: the evidence for the cause rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..tensors.devices import widest_float
from .histogram import histogram
from .schemas import schema_of
from .values import FINITE, bad_positions, kind_of, marked_rows, numbers, statistics, values_at

MAX_ROWS = 4096
MAX_HISTOGRAMS = 4
"""Operands that get a histogram: an op over a list of tensors has hundreds."""
LARGEST_COPY = 200_000_000
"""Operands with more values than this together are not repeated in double precision."""


@dataclass
class AtBad:
    """The values of one operand at the positions where the output is bad."""

    count: int
    zeros: int
    smallest: float


@dataclass
class Facts:
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    at_bad: dict[str, AtBad] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    """Indices of the first dimension of the output with a bad value."""
    num_rows: int = 0
    empty_input: bool = False
    dtype: torch.dtype | None = None
    kind_in_fp64: int | None = None
    """What the same op gives on the same operands in double precision; None when it could not be repeated."""
    peak_in_fp64: float = 0.0
    scalars: dict[str, float] = field(default_factory=dict)
    all_masked_rows: int = 0
    """softmax and logsumexp: rows that hold nothing but -inf."""
    num_reduced: int | None = None
    """Reductions: how many values go into one output value."""
    targets: str = ""
    """nll_loss: what is special about the targets."""
    operand_rows: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    """Per operand: rows with a non-finite value, and how many rows it has."""


def examine(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Mapping[str, Tensor], outputs: Sequence[Tensor]
) -> Facts:
    name = schema_of(func).name
    worst = max(outputs, key=kind_of)
    bad = bad_positions(worst)
    facts = Facts(
        inputs=[
            examined(argument, tensor, bad) if index < MAX_HISTOGRAMS else statistics(argument, tensor)
            for index, (argument, tensor) in enumerate(operands.items())
        ],
        outputs=[statistics("output", worst)],
        empty_input=any(t.numel() == 0 for t in operands.values()),
        dtype=worst.dtype,
        scalars={
            argument: float(value)
            for argument, value in [*zip(schema_of(func).arguments, args, strict=False), *kwargs.items()]
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        },
    )
    if bad is not None:
        _measure_at(bad, operands, facts)
    for argument, tensor in operands.items():
        mask = bad_positions(tensor)
        if mask is not None and mask.dim() and mask.numel():
            facts.operand_rows[argument] = (marked_rows(mask)[:MAX_ROWS], mask.shape[0])
    _repeat_in_fp64(func, args, kwargs, operands, facts)
    _look_at_special_ops(name, args, kwargs, operands, worst, facts)
    return facts


def examined(name: str, tensor: Tensor, bad: Tensor | None = None) -> dict[str, Any]:
    """Statistics and histogram of an operand, with the values at the positions in `bad` counted separately."""
    spread = histogram(tensor, bad)
    return statistics(name, tensor) | ({} if spread is None else {"histogram": spread})


def zero_where_bad(operands: Sequence[tuple[str, Tensor]], output: Tensor) -> frozenset[str]:
    """The operands that are 0 wherever the output is bad."""
    bad = bad_positions(output)
    if bad is None:
        return frozenset()
    values = ((name, values_at(tensor, bad)) for name, tensor in operands)
    return frozenset(name for name, at_bad in values if at_bad is not None and not bool(at_bad.any()))


def _measure_at(bad: Tensor, operands: Mapping[str, Tensor], facts: Facts) -> None:
    if bad.dim():
        facts.rows, facts.num_rows = marked_rows(bad)[:MAX_ROWS], bad.shape[0]
    for argument, tensor in operands.items():
        values = numbers(tensor)
        if values is None or tensor.is_complex() or tensor.layout is not torch.strided:
            continue
        values = values_at(values, bad)
        if values is not None and values.numel():
            facts.at_bad[argument] = AtBad(values.numel(), int((values == 0).sum()), float(values.abs().min()))


def _repeat_in_fp64(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Mapping[str, Tensor], facts: Facts
) -> None:
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return
    if sum(tensor.numel() for tensor in operands.values()) > LARGEST_COPY:
        return
    named = dict(zip(schema_of(func).arguments, args, strict=False))
    try:
        result = func(
            *(_doubled(operands.get(argument, value)) for argument, value in named.items()),
            **{argument: _doubled(operands.get(argument, value)) for argument, value in kwargs.items()},
        )
    except Exception:  # many kernels have no double version, or want one dtype for all: then this fact stays unknown
        return
    results = [item for item in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(item, Tensor)]
    if results:
        facts.kind_in_fp64 = max(kind_of(item) for item in results)
        if facts.kind_in_fp64 == FINITE:
            peaks = [values.abs().max().item() for item in results if (values := numbers(item)) is not None]
            facts.peak_in_fp64 = max(peaks, default=0.0)


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            value.detach().to(widest_float(value.device), copy=True)
            if value.is_floating_point()
            else value.detach().clone()
        )
    if isinstance(value, (list, tuple)):
        return type(value)(_doubled(item) for item in value)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


def _look_at_special_ops(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    operands: Mapping[str, Tensor],
    output: Tensor,
    facts: Facts,
) -> None:
    first = next(iter(operands.values()), None)
    if first is None:
        return
    if name in ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp"):
        dims = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        for dim in dims if isinstance(dims, (list, tuple)) else [dims]:
            facts.all_masked_rows += int((first == -math.inf).all(dim).sum())
    elif name.startswith("nll_loss") and "target" in operands:
        ignored = args[4] if len(args) > 4 else -100
        target = operands["target"]
        if bool((target == ignored).all()):
            facts.targets = f"all {target.numel()} targets are ignore_index ({ignored})"
    elif name in ("mean", "var", "std", "var_mean", "std_mean", "nanmean", "sum") and output.numel():
        facts.num_reduced = first.numel() // output.numel()
