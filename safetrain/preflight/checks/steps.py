"""Checks of the first steps, with the initial weights."""

from __future__ import annotations

import math
import os
import re
import time
import traceback
from typing import Any

import torch
from torch import nn

from ...core.files import relative_to
from ...core.numbers import amount, listed
from ...forensics import Effort, Step, diagnose
from ...forensics.scan import is_healthy
from ...precision import islands
from ...tensors.devices import wide
from ...tensors.rng import seed_everything
from ..observer import FP16_MAX, FP16_MIN
from ..outcome import Outcome, Problems, failed, passed, skipped, warned, worst
from ..registry import preflight_check
from ..sample import CannotRead, Read
from ..subject import Subject

MAX_UNUSUAL = 12
"""Batches with unusual samples: tried first, and given more time."""


@preflight_check(
    looks_at="loss and gradients of batches from all over the data, the last one of the epoch included",
    fails="one is not finite, or the step raises; the first bad operation, its cause and its samples are named",
    warns="it was not finite only once",
    fix="the change at that line, tried on a replay",
)
def finite_steps(subject: Subject) -> Outcome:
    """Forward and backward of as many batches as the budget allows; the first non-finite one is investigated."""
    if (error := subject.observed.error) is not None:
        return _raised(subject, error)
    num_batches = num_samples = 0
    bad: Read | None = None
    subject.scan  # noqa: B018  a cached property: computed here, before the deadlines below start
    deadline, latest = subject.budget.deadline(0.15), subject.budget.deadline(0.3)
    with subject.clean():
        try:
            for read in subject.sample.batches(before=subject.scan.unusual[:MAX_UNUSUAL]):
                num_batches += 1
                seed_everything(read.position)  # every step draws other random numbers
                num_samples += read.size
                if not is_healthy(_step(subject, read)):
                    bad = read
                    break
                if time.perf_counter() > (deadline if num_batches >= MAX_UNUSUAL else latest):
                    break
        except CannotRead:
            pass  # `readable` reports it
    seen: dict[str, Any] = {"num_batches": num_batches, "seen": num_samples, "of": subject.sample.num_samples}
    total = f" of {subject.sample.num_batches}" if subject.sample.num_batches is not None else ""
    if bad is None:
        return passed(f"loss and gradients are finite in {num_batches}{total} batches", **seen)
    return _investigated(subject, bad, seen)


def _step(subject: Subject, read: Read) -> Step:
    trainer = subject.trainer
    return Step(subject.model, trainer.training_step, [read.batch], precision=trainer.precision.name)


def _investigated(subject: Subject, read: Read, seen: dict[str, Any]) -> Outcome:
    """The first bad operation of this batch, its cause, and the fix that was tried on a replay."""
    with subject.clean():
        seed_everything(read.position)
        diagnosis = diagnose(_step(subject, read), Effort(max_replays=24))
    if diagnosis.error is not None and diagnosis.is_error_of_the_program:
        return _raised(subject, diagnosis.error)
    if diagnosis.healthy:
        return warned(
            f"batch {read.position} was not finite once, and finite when it was run again",
            "make the step repeatable, see replay; then check again",
            **seen,
        )
    origin = diagnosis.origin
    samples = [read.name(row) for row in (diagnosis.samples or ([0] if read.size == 1 else []))]
    where = f" at {_short(origin.file)}:{origin.line}" if origin.file else ""
    whose = f", sample{'s' if len(samples) > 1 else ''} {listed(samples)}" if samples else ""
    what = origin.name or origin.op or origin.phase
    code = f" `{origin.code.strip()}`" if origin.code else ""
    return failed(
        f"batch {read.position}{whose}: the {diagnosis.signal} is not finite; first {what}{where}{code}: {diagnosis.cause.label}",
        _ROWS.sub(
            f"without sample{'s' if len(samples) > 1 else ''} {listed(samples)}",
            diagnosis.fix or diagnosis.cause.explanation,
        ),
        batch=read.position,
        samples=samples,
        cause=diagnosis.cause.label,
        op=origin.op,
        module=origin.module,
        file=origin.file,
        line=origin.line,
        **seen,
    )


_ROWS = re.compile(r"without samples \[[\d, ]*\]")
"""Row numbers within a batch, which are replaced by the names of the samples."""


def _short(file: str) -> str:
    below = relative_to(file)
    return os.path.basename(file) if below.startswith("..") else below


def _raised(subject: Subject, error: Exception) -> Outcome:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    own = [frame for frame in frames if "/safetrain/" not in frame.filename] or frames
    place = f" at {_short(own[-1].filename)}:{own[-1].lineno}" if own else ""
    message = str(error).splitlines()[0] if str(error) else ""
    return failed(
        f"the first step raises {type(error).__name__}: {message}{place}",
        _advice(error),
        error=type(error).__name__,
        message=str(error),
    )


def _advice(error: Exception) -> str:
    text = str(error)
    if "To fix: " in text:
        return text.partition("To fix: ")[2]
    if isinstance(error, IndexError) or "out of range" in text or "out of bounds" in text:
        return "bring labels and indices into range, see labels"
    if "shape" in text or "size" in text:
        return "make the shapes of batch, model and loss fit each other; -v shows the traceback"
    return "correct the code at that place"


# ---- what the layers give ----------------------------------------------------------------------------------------------

LARGE_OUTPUT, HUGE_OUTPUT = 1e4, 1e8


@preflight_check(
    looks_at="the output of each layer",
    fails="above 1e8, or not finite",
    warns="above 1e4",
    fix="standardise the inputs, scale the initialisation down, or normalise before the layer named",
)
def output_scale(subject: Subject) -> Outcome:
    layers = subject.steps.observer.layers
    if not layers:
        return skipped("no module of the model was called")
    problems = Problems()
    for name, layer in layers.items():
        if not layer.max_abs < LARGE_OUTPUT:
            problems.add(
                not layer.max_abs < HUGE_OUTPUT,
                f"{name} ({layer.kind}) gives values up to {amount(layer.max_abs)}",
                _smaller(subject, name, layer.max_abs),
                layer=name,
                largest=layer.max_abs,
            )
            break  # the layers after it only propagate it
    largest = max(layers, key=lambda name: layers[name].max_abs)
    fine = passed(
        f"{len(layers)} layers, the largest output is {amount(layers[largest].max_abs)} ({largest})",
        rms={name: layer.rms for name, layer in layers.items()},
    )
    return worst(problems, fine)


def _smaller(subject: Subject, name: str, largest: float) -> str:
    fields = {path: max(known.peaks) for path, known in subject.scan.fields.items() if known.peaks}
    path = max(fields, key=lambda path: fields[path], default=None)
    if path is not None and fields[path] > largest / 100:
        return f"standardise field {path!r}, which reaches {amount(fields[path])}, where the data is read: (x - mean) / std"
    return f"scale the initialisation of {name}, or of what comes before it, down; or put a normalisation (nn.LayerNorm) before it"


@preflight_check(
    looks_at="the gradient of each parameter",
    fails="all zero, vanishing 1e7-fold over the layers, or a norm above 1e8",
    warns="parameters that are not reached, zero in a matrix, vanishing 1e5-fold, or a norm above 1e4",
    fix="do not detach; use or freeze the parameters named; residual connections, normalisation, `guards.clip`",
)
def gradient_scale(subject: Subject) -> Outcome:
    seen = subject.steps
    problems = Problems()
    missing = [name for name, gradient in seen.gradients.items() if gradient is None]
    sizes = {
        name: float(wide(g).square().mean().sqrt())
        for name, g in seen.gradients.items()
        if g is not None and g.numel() and g.layout is torch.strided
    }
    norm = math.sqrt(sum(float(wide(g).square().sum()) for g in seen.gradients.values() if g is not None)) / max(
        len(seen.losses), 1
    )
    if not any(sizes.values()):
        return failed(
            "no parameter gets a gradient" if not sizes else "every gradient is zero",
            "compute the loss from the model's output without .detach(), torch.no_grad() or argmax, and check that the output "
            "depends on the weights (no dead activation, no zero factor)",
        )
    if missing:
        problems.warn(
            f"the loss does not reach {len(missing)} of {len(seen.gradients)} parameters: {listed(missing)}",
            "use them in forward, or leave them out of the optimizer (requires_grad=False)",
            unreached=missing,
        )
    # Few rows of an embedding are used in a step, and a bias before a normalisation gets no gradient.
    embeddings = {id(m.weight) for m in subject.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    matrices = {
        name: sizes[name]
        for name, p in subject.model.named_parameters()
        if p.dim() > 1 and name in sizes and id(p) not in embeddings
    }
    zero = [name for name, size in matrices.items() if size == 0]
    if zero and not _has_zero_init_branch(subject, matrices):
        problems.warn(
            f"the gradient is exactly zero in {listed(zero)}",
            "look at what comes after them: an activation that is dead, weights that are zero, a detach()",
            zero=zero,
        )
    alive = {name: size for name, size in matrices.items() if size > 0 and math.isfinite(size)}
    if len(alive) > 1:
        low, high = min(alive, key=lambda name: alive[name]), max(alive, key=lambda name: alive[name])
        ratio = alive[low] / alive[high]
        if ratio < 1e-5:
            problems.add(
                ratio < 1e-7,
                f"the gradient vanishes: {amount(alive[low])} in {low}, {amount(alive[high])} in {high}",
                "add residual connections or normalisation, use ReLU or GELU in place of sigmoid or tanh, and initialise with "
                "a deviation of 1/sqrt(fan_in)",
                ratio=ratio,
            )
    if not norm < 1e4:
        problems.add(
            not norm < 1e8,
            f"the gradient norm is {amount(norm)}",
            "standardise inputs and targets, average the loss instead of summing it, or bound it: guards.clip.mode=norm",
            norm=norm,
        )
    return worst(problems, passed(f"norm {amount(norm)}, all {len(sizes)} parameters reached", norm=norm, rms=sizes))


def _has_zero_init_branch(subject: Subject, gradients: dict[str, float]) -> bool:
    """A zero matrix that gets a gradient, as in LoRA: what comes before it gets no gradient until the matrix has changed."""
    parameters = dict(subject.model.named_parameters())
    return any(size > 0 and not bool(parameters[name].any()) for name, size in gradients.items())


@preflight_check(
    looks_at="units of ReLU that never activate, and saturated tanh and sigmoid",
    fails="nine tenths of a layer are dead",
    warns="half of a layer is dead, or nine tenths of its values are saturated",
    fix="start biases at 0 and weights at `kaiming_uniform_`, or use LeakyReLU or GELU",
)
def dead_units(subject: Subject) -> Outcome:
    units = subject.steps.observer.units
    if not units:
        return skipped("the model uses no ReLU, tanh or sigmoid")
    problems, total, dead = Problems(), 0, 0
    for name, known in units.items():
        total += len(known.alive)
        dead += known.num_dead
        share = known.num_dead / max(len(known.alive), 1)
        if share >= 0.5:
            problems.add(
                share >= 0.9,
                f"{known.num_dead} of {len(known.alive)} units of {name} ({known.op}) give the same value for all "
                f"{subject.steps.num_samples} samples",
                f"start the bias before {name} at 0 and its weights at nn.init.kaiming_uniform_, or use LeakyReLU or GELU there",
                layer=name,
                num_dead=known.num_dead,
                num_units=len(known.alive),
            )
        saturated = known.num_saturated / max(known.num_values, 1)
        if saturated > 0.9:
            problems.warn(
                f"{saturated:.0%} of the values of {name} ({known.op}) are saturated: their gradient is near zero",
                f"scale down what goes into {name}: smaller weights, standardised inputs, or a normalisation before it",
                layer=name,
                saturated=saturated,
            )
    seen = f"{dead} of {total} units are dead, seen with {subject.steps.num_samples} samples"
    return worst(problems, passed(seen, num_dead=dead, num_units=total))


@preflight_check(
    looks_at="the largest value and the smallest gradient against the range of float16",
    fails="`loop.precision` is fp16 and a value is above 65504, or nine tenths of the gradients are lost",
    warns="fp16 with a value above an eighth of that, or a tenth of the gradients lost",
    fix="standardise the inputs, `loop.precision=bf16`, or `guards.islands.modules`",
)
def amp_headroom(subject: Subject) -> Outcome:
    observer, precision = subject.steps.observer, subject.trainer.precision.name
    in_fp32 = [name for name in islands.islands_of(subject.model) if name != islands.LOSS]
    low = {name: size for name, size in observer.largest.items() if not _is_below(name, in_fp32)}
    if not low:
        return skipped("no module computes in floating point")
    where = max(low, key=lambda name: math.inf if math.isnan(low[name]) else low[name])
    peak, place = low[where], where or type(subject.model).__name__
    gradients = [layer for layer in observer.layers.values() if layer.num_gradients]
    lost = sum(layer.num_lost for layer in gradients) / max(sum(layer.num_gradients for layer in gradients), 1)
    smallest = min((layer.smallest for layer in gradients), default=math.nan)
    numbers = {"largest": peak, "module": where, "fp16_max": FP16_MAX}
    numbers |= {"smallest_gradient": smallest, "share_lost": lost}
    problems = Problems()
    if precision == "fp16":
        if not peak < FP16_MAX / 8:
            problems.add(
                not peak < FP16_MAX,
                f"the largest value in {place} is {amount(peak)}, float16 ends at {FP16_MAX:.0f}",
                f"standardise the inputs, use loop.precision=bf16, or keep it in float32: guards.islands.modules=[{where or '*'}]",
                **numbers,
            )
        if lost > 0.1:
            problems.add(
                lost > 0.9,
                f"{lost:.0%} of the gradients are too small for float16, even with loss scaling (smallest {amount(smallest)}, "
                f"float16 begins at {amount(FP16_MIN)})",
                "use loop.precision=bf16 or fp32, or scale the loss up",
                **numbers,
            )
    fits = peak < FP16_MAX / 8 and lost <= 0.1
    note = f"largest value {amount(peak)} in {place}, {amount(FP16_MAX / peak) if peak else 'inf'} times below float16's limit"
    if not peak < FP16_MAX:
        note = f"largest value {amount(peak)} in {place}, beyond float16"
    if precision != "fp16":
        note += f" ({precision} is used{', fp16 would do' if fits else '; fp16 would not do'})"
    return worst(problems, passed(note, **numbers))


def _is_below(name: str, roots: list[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)
