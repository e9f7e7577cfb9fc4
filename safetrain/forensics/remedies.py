"""Remedies, tried by counterfactual replay, cheapest first: would the step have stayed finite?

A remedy is one function that gives `Remedy` entries; `REMEDIES` lists them in order. One that raises is "not applicable".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core import progress
from ..core.incident import Remedy
from ..precision.autocast import LOW_PRECISION, cast_floats, model_as
from ..precision.islands import kept_in_fp32
from ..tensors.devices import is_host
from ..tensors.gradients import collect, overflow_free_norm
from ..tensors.nest import map_tensors, tensors_in
from ..tensors.rng import RandomState
from .backward_functions import SUFFIX, find_function
from .finding import DATA, LOSS, Finding, locate, locate_buffer
from .on_host import MAX_ON_HOST, in_double_on_host
from .replay import Replayer, Result
from .substitutes import SUBSTITUTES, Patch, SafeVariant
from .trials import Trials
from .user_line import changed_line, library_option, parameter_in_range
from .values import numbers


def try_all(trials: Trials) -> list[Remedy]:
    for index, remedy in enumerate(REMEDIES):
        progress.note("remedies tried", index, len(REMEDIES))
        if not trials.has_budget:
            break
        try:
            trials.tried += remedy(trials)
        except Exception as error:
            name = getattr(remedy, "__name__", "remedy")
            trials.tried.append(Remedy(name, False, None, f"not applicable ({type(error).__name__}: {error})"[:160]))
    return trials.tried


def retry(trials: Trials) -> Iterator[Remedy]:
    yield trials.replay("retry", "the same step once more")


def retry_with_other_random_numbers(trials: Trials) -> Iterator[Remedy]:
    before = RandomState.capture(with_host=False)
    trials.replayer.sandbox.rewind()
    if before.same_of_torch(RandomState.capture(with_host=False)):
        return  # the step draws no random numbers
    before.restore()
    yield trials.replay("other_random_numbers", "the same step with other random numbers", rewind_random=False)


def drop_samples(trials: Trials) -> Iterator[Remedy]:
    samples = trials.samples
    if samples.guilty and samples.without is not None:
        result = samples.without
        yield Remedy("drop_samples", result.finite, result.loss_value, f"without samples {samples.guilty}")


def clean_input(trials: Trials) -> Iterator[Remedy]:
    """NaN and Inf in the batch set to 0."""
    if trials.finding.module != DATA:
        return
    window = [cast_bad_to_zero(batch) for batch in trials.replayer.step.window]
    yield trials.replay("clean_input", f"with the non-finite values of {trials.finding.owner} set to 0", window=window)


def repair_state(trials: Trials) -> Iterator[Remedy]:
    """Parameters and buffers that were bad before the step, with finite values in the bad places."""
    if trials.finding.phase == "params" and trials.finding.owner is not None:
        detail = f"with the non-finite values of {trials.finding.owner} replaced by the mean of its finite ones"
        remedy = trials.replay("repair_state", detail, _repaired(trials.models))
        yield remedy
        if not remedy.finite:
            detail = f"with all of {trials.finding.owner} set to 1"
            yield trials.replay("repair_state", detail, _repaired(trials.models, whole=True))


def fused_form(trials: Trials) -> Iterator[Remedy]:
    """The same function in one piece: log_softmax for the log of a softmax. Its gradient is right where the parts' is cut off."""
    finding = trials.finding
    if finding.place is None or finding.event is None or finding.phase == "optimizer":
        return
    variant = SafeVariant(finding.place, None, is_fused=True)
    remedy = trials.replay("fused_form", "", variant)
    if variant.num_hits:
        forms = " and ".join(variant.forms)
        where = f"{finding.place.file.rpartition('/')[2]}:{finding.place.line}"
        remedy.detail = f"with what {finding.name} at {where} is part of computed by {forms}"
        yield remedy
        if remedy.finite:
            finding.fused_form = forms
            trials.patch = Patch(finding.place, None, is_fused=True)


def safe_op(trials: Trials) -> Iterator[Remedy]:
    finding = trials.finding
    if finding.place is None or finding.event is None or finding.fused_form is not None:
        return
    name = finding.name or ""
    # First only the op that was blamed; then all of the line, when it has several that go wrong in the same place.
    for names in [{name}, None] if name in SUBSTITUTES else [None]:
        variant = SafeVariant(finding.place, names)
        where = f"{finding.place.file.rpartition('/')[2]}:{finding.place.line}"
        detail = f"with {name if names else 'the ops'} at {where} replaced by the safe variant"
        attempt = trials.update if finding.phase == "optimizer" else trials.replay
        remedy = attempt("safe_op", detail, variant)
        if variant.num_hits:
            yield remedy
            if remedy.finite:
                trials.patch = Patch(finding.place, frozenset(names) if names else None)
                return


def finite_backward(trials: Trials) -> Iterator[Remedy]:
    """For the backward of a custom function: zeros where it returns bad gradients."""
    place, event = trials.finding.place, trials.finding.event
    name = (event.node or "").removesuffix("Backward") if event is not None else ""
    if trials.finding.phase != "backward" or place is None or find_function(name) is None:
        return
    patch = Patch(place, frozenset({f"{name}{SUFFIX}"}))
    remedy = trials.replay("safe_op", "with the non-finite gradients of this backward set to 0", patch.active())
    yield remedy
    if remedy.finite:
        trials.patch = patch


def larger_eps(trials: Trials) -> Iterator[Remedy]:
    optimizer = trials.optimizer
    if optimizer is None or "eps" not in optimizer.param_groups[0]:
        return
    for eps in (1e-4, 1e-3):
        remedy = trials.update(
            "optimizer_eps", f"with eps={eps} in the optimizer", _group_option(optimizer, "eps", eps)
        )
        yield remedy
        if remedy.finite:
            return


def finite_learning_rate(trials: Trials) -> Iterator[Remedy]:
    optimizer = trials.optimizer
    if optimizer is not None and trials.finding.notes:
        lr = float(optimizer.defaults.get("lr") or 1e-3)
        detail = f"with the learning rate {lr:g} that the optimizer began with"
        yield trials.update("learning_rate", detail, _group_option(optimizer, "lr", lr))


def clipped_gradient(trials: Trials) -> Iterator[Remedy]:
    """For a gradient that is finite and too large for the optimizer's arithmetic: its square overflows, say."""
    optimizer = trials.optimizer
    if optimizer is not None and not trials.has_success:
        yield trials.update("clip", "with the gradient clipped to a norm of 1", _gradient_of_norm_1(optimizer))


def fresh_optimizer_state(trials: Trials) -> Iterator[Remedy]:
    optimizer = trials.optimizer
    if optimizer is not None and optimizer.state and not trials.has_success:
        yield trials.update("optimizer_reset", "with the optimizer's state reset", _without_state(optimizer))


def whole_step_in_fp32(trials: Trials) -> Iterator[Remedy]:
    if uses_low_precision(trials.replayer):
        yield trials.judged("fp32", "the whole step in single precision", in_fp32(trials.replayer))


def island(trials: Trials) -> Iterator[Remedy]:
    """The blamed module in fp32, then ever more of its surroundings."""
    path = trials.finding.module
    if trials.replayer.step.precision == "fp32" or path is None or path in (LOSS, DATA):
        return
    while path and trials.has_budget:
        module = trials.replayer.model.get_submodule(path)
        remedy = trials.replay("fp32_island", f"with {path} kept in fp32", kept_in_fp32(module))
        if not remedy.finite and trials.replayer.step.loss_scale > 1:
            # Scaled gradients that overflow are for the loss scaler to handle.
            remedy = trials.replay("fp32_island", f"with {path} kept in fp32", kept_in_fp32(module), loss_scale=1.0)
        yield remedy
        if remedy.finite:
            trials.island = path
            return
        path = path.rpartition(".")[0]


def smaller_loss_scale(trials: Trials) -> Iterator[Remedy]:
    finding, scale = trials.finding, trials.replayer.step.loss_scale
    if finding.phase != "backward" or not uses_low_precision(trials.replayer):
        return
    for divisor in (2**8, 2**16):
        remedy = trials.replay("loss_scale", f"with the loss scaled by 1/{divisor}", loss_scale=scale / divisor)
        yield remedy
        if remedy.finite:
            return


def double_precision(trials: Trials) -> Iterator[Remedy]:
    if trials.finding.phase == "optimizer":
        return
    detail = "the whole step in double precision"
    tensors = [*trials.replayer.parameters.values(), *trials.replayer.model.buffers()]
    if all(is_host(tensor.device) for tensor in tensors):
        window = [cast_floats(batch, torch.float64) for batch in trials.replayer.step.window]
        yield trials.replay("fp64", detail, model_as(trials.models, torch.float64), window=window)
    elif sum(tensor.numel() for tensor in tensors) <= MAX_ON_HOST:
        # A device that training has filled has no room for it, and may not have that type at all.
        yield trials.judged("fp64", f"{detail}, on the host", in_double_on_host(trials.replayer))


def zero_bad_values(trials: Trials) -> Iterator[Remedy]:
    """The last resort shows at least that the blamed op is the only thing wrong: its bad results are set to 0."""
    if trials.has_success or trials.finding.phase == "optimizer":
        return
    interventions: dict[int, Any] = {}
    finding: Finding | None = trials.finding
    for _ in range(4):
        event = None if finding is None else finding.event or next(iter(finding.blame.path[-1:]), None)
        if event is None or event.number < 0:
            break
        interventions[event.number] = zeroed
        trace = trials.replayer.traced(interventions, trials.finding.trace.micro_batch)
        if trace.error is not None:
            break
        if trace.finite and not trials.replayer.watched_buffers & trace.bad_buffers.keys():
            loss = float(trace.loss) if trace.loss is not None else None
            detail = f"with the non-finite results of {trials.finding.name} set to 0"
            yield Remedy("zero_bad_values", True, loss, detail)
            return
        finding = locate(trace, trials.replayer) or locate_buffer(trace, trials.replayer)
    yield Remedy("zero_bad_values", False, None, f"with the non-finite results of {trials.finding.name} set to 0")


REMEDIES: list[Callable[[Trials], Iterator[Remedy]]] = [
    retry,
    retry_with_other_random_numbers,
    drop_samples,
    clean_input,
    repair_state,
    changed_line,
    library_option,
    parameter_in_range,
    fused_form,
    safe_op,
    finite_backward,
    larger_eps,
    finite_learning_rate,
    clipped_gradient,
    fresh_optimizer_state,
    whole_step_in_fp32,
    island,
    smaller_loss_scale,
    double_precision,
    zero_bad_values,
]


def uses_low_precision(replayer: Replayer) -> bool:
    return replayer.step.precision != "fp32" or any(p.dtype in LOW_PRECISION for p in replayer.parameters.values())


def in_fp32(replayer: Replayer) -> Result:
    """The step with nothing in half precision: autocast off, half parameters, buffers and batch as float32."""
    models = [replayer.model, *replayer.sandbox.loss_modules]
    window = [cast_floats(batch, torch.float32, LOW_PRECISION) for batch in replayer.step.window]
    return replayer.plain(window=window, changes=[model_as(models, torch.float32, LOW_PRECISION)])


def cast_bad_to_zero(batch: Any) -> Any:
    def cleaned(item: Any) -> Any:
        if isinstance(item, Tensor) and item.is_floating_point():
            return torch.nan_to_num(item, nan=0.0, posinf=0.0, neginf=0.0)
        return item

    return map_tensors(batch, cleaned)


@contextmanager
def _repaired(models: list[nn.Module], whole: bool = False) -> Iterator[None]:
    tensors = [t for model in models for t in [*model.parameters(), *model.buffers()]]
    saved = []
    for tensor in tensors:
        values = numbers(tensor)
        if values is not None and not bool(torch.isfinite(values).all()):
            saved.append((tensor, tensor.detach().clone()))
            finite = values[torch.isfinite(values)]
            fill = float(finite.float().mean()) if finite.numel() else 1.0
            repaired = torch.where(torch.isfinite(tensor.data), tensor.data, torch.full_like(tensor.data, fill))
            tensor.data.copy_(torch.ones_like(repaired) if whole else repaired)
    try:
        yield
    finally:
        for tensor, value in saved:
            tensor.data.copy_(value)


@contextmanager
def _group_option(optimizer: torch.optim.Optimizer, key: str, value: float) -> Iterator[None]:
    for group in optimizer.param_groups:
        group[key] = value
    yield


@contextmanager
def _without_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    optimizer.state = defaultdict(dict)
    yield


@contextmanager
def _gradient_of_norm_1(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    gradients = collect([p for group in optimizer.param_groups for p in group["params"]])
    norm = overflow_free_norm(gradients)
    if norm is not None and norm > 1.0:
        for gradient in gradients:
            gradient.div_(norm)
    yield


def zeroed(result: Any) -> Any:
    """In place, so that autograd saves the repaired values too."""
    for tensor in tensors_in(result):
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            tensor.copy_(torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor)))
    return result
