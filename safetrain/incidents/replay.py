"""Runs the step of an incident's bundle again, and compares what happens with what was recorded.

from safetrain.incidents.bundle import read_bundle
from safetrain.incidents.replay import replay

replayed = replay(read_bundle("runs/first/incidents/step-000042"), model, loss_fn)
print(replayed.verdict, replayed.incident.render())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import CheckpointStore
from ..checkpoint.manifest import Damaged
from ..checkpoint.plain import from_loadable
from ..config import import_target
from ..core.incident import Incident, Outcome, Trigger
from ..errors import SafetrainError, UsageError
from ..forensics import Diagnosis, Effort, Step, diagnose
from ..forensics.patches import Patches
from ..forensics.sandbox import modules_behind
from ..precision import islands
from ..tensors.devices import note_in_use
from ..tensors.module_globs import named
from ..tensors.nest import to_device
from ..tensors.rng import RandomState
from .batch_codec import decode
from .bundle import REPLAY, Bundle

REPRODUCED, NOT_REPRODUCED, DIFFERENT = "reproduced", "not reproduced", "different"


@dataclass
class Replayed:
    verdict: str
    """`reproduced` as recorded, `not reproduced` (the step is healthy now), or `different`."""
    incident: Incident
    """What was found now."""
    differences: list[str] = field(default_factory=list)
    """From what was recorded, in words."""
    notes: list[str] = field(default_factory=list)
    """What could not be restored."""


def replay(
    bundle: Bundle,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    optimizer: Optimizer | None = None,
    effort: Effort | None = None,
    import_class: Callable[[str], Any] = import_target,
    beside: list[nn.Module] | None = None,
) -> Replayed:
    """Puts the bundle's weights into the model, runs its step there, and investigates it.

    `import_class` finds the classes of objects in the batch, and may raise. `beside` are auxiliary modules: those with weights
    that `loss_fn` uses besides the model, when they cannot be found in it.
    """
    with prepared(bundle, model, loss_fn, optimizer, import_class, beside) as (step, notes):
        diagnosis = diagnose(step, effort or Effort())
    return _compared(bundle.incident, diagnosis, notes)


@contextmanager
def prepared(
    bundle: Bundle,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    optimizer: Optimizer | None = None,
    import_class: Callable[[str], Any] = import_target,
    beside: list[nn.Module] | None = None,
) -> Iterator[tuple[Step, list[str]]]:
    """The step of a bundle with its weights in the model, and notes on what could not be restored."""
    contents = bundle.contents
    if contents["window"] is None:
        raise UsageError(
            f"the batch of {bundle.directory.name} was not kept: it could not be written, or was larger than "
            "forensics.max_bundle_mb.\nTo fix: train again with a larger forensics.max_bundle_mb, or a batch of tensors."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    patches = Patches()
    with _as_written(bundle):
        window = [to_device(decode(batch, import_class), device) for batch in contents["window"]]
        notes = _restore(bundle, model, list(modules_behind(loss_fn)) if beside is None else beside)
        if optimizer is not None:
            _restore_optimizer(optimizer, contents["optimizer"])
        patches.load_state_dict({"patches": contents["patches"]})
        random_state = RandomState.from_plain(contents["random_state"])
        note_in_use([device])
        if elsewhere := random_state.unplaced():
            notes.append(f"random numbers drawn on {', '.join(elsewhere)} (dropout masks) are other ones here")
        random_state.restore()
    notes += [f"with its patches: {', '.join(patches.descriptions())}"] if contents["patches"] else []
    notes += [f"with its float32 islands: {', '.join(contents['islands'])}"] if contents["islands"] else []
    step = Step(
        model,
        patches.around(loss_fn),
        window,
        optimizer,
        contents["precision"],
        contents["loss_scale"],
        random_state,
        loss=contents["loss"],
    )
    with ExitStack() as stack:
        with _as_written(bundle):
            for name in contents["islands"]:
                at = islands.loss_island(model) if name == islands.LOSS else islands.island(named(model, name))
                stack.callback(at)
        yield step, notes


@contextmanager
def _as_written(bundle: Bundle) -> Iterator[None]:
    """What a damaged or forged bundle makes its readers raise is said as what it is."""
    try:
        yield
    except SafetrainError:
        raise
    except Exception as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{bundle.directory / REPLAY} does not fit together, or not with this model: {type(error).__name__}: {what}\n"
            "To fix: get the bundle again, and use the model, and the version of its code, that the run was made with."
        ) from error


# ---- the state before the step -------------------------------------------------------------------------------------


def _restore(bundle: Bundle, model: nn.Module, beside: list[nn.Module]) -> list[str]:
    """Restore weights, buffers and modes as they were before the step; returns notes on what could not be restored."""
    contents, notes = bundle.contents, []
    weights, buffers = contents["model"], contents["buffers"]
    if weights is None:
        weights, buffers, note = _from_checkpoint(bundle)
        notes.append(note)
    if contents["is_late"]:
        notes.append("the weights are of some steps later: the step was read late (loop.host_read_every)")
    try:
        model.load_state_dict(from_loadable(weights), strict=True)
    except (RuntimeError, KeyError) as error:
        raise UsageError(
            f"the weights of the incident do not fit this model: {str(error).strip()}\n"
            "To fix: use the model, and the version of its code, that the run was made with."
        ) from error
    _restore_buffers(model, buffers)
    if len(contents["beside"]) == len(beside):
        for module, state in zip(beside, contents["beside"], strict=True):
            module.load_state_dict(from_loadable(state), strict=False)
    elif contents["beside"]:
        notes.append("the state of auxiliary modules was not restored: they were not found")
    model.train()
    for name, module in model.named_modules():
        if name in set(contents["eval_mode"]):
            module.training = False
    return notes


def _restore_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    modules = dict(model.named_modules())
    for name, saved in buffers.items():
        path, _, key = name.rpartition(".")
        current = modules[path]._buffers.get(key) if path in modules else None
        if current is not None and current.shape == saved.shape:
            current.copy_(saved)
        elif path in modules and key in modules[path]._buffers:
            modules[path]._buffers[key] = saved.clone()


def _from_checkpoint(bundle: Bundle) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Weights and buffers from the checkpoint that the bundle points to, with a note: they were too large for the bundle."""
    pointer = bundle.contents["checkpoint"]
    if pointer is None:
        raise UsageError(
            "the weights were too large for the bundle (forensics.max_bundle_mb), and there was no checkpoint yet.\n"
            "To fix: train again with a larger forensics.max_bundle_mb."
        )
    path = bundle.run_dir / "checkpoints" / str(pointer["path"]).rpartition("/")[2]
    try:
        loaded = CheckpointStore(path.parent).load(path)
    except Damaged as problem:
        raise UsageError(
            f"the weights are in the checkpoint {path}, which cannot be used: {problem}.\n"
            "To fix: bring it back, or train again with a larger forensics.max_bundle_mb or checkpoint.keep_last."
        ) from problem
    weights = loaded.state.part("model")
    for name, first in from_loadable(loaded.state.rest["tied"]).items():
        weights[name] = weights[first]
    weights |= from_loadable(loaded.state.rest["extra_state"])
    note = f"weights of the checkpoint {path.name}"
    if not pointer["is_exact"]:
        later = bundle.contents["num_committed"] - pointer["num_committed"]
        note += f", {later} committed steps before the incident: the numbers differ from those of the run"
    return weights, loaded.state.part("transient"), note


def _restore_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    try:
        optimizer.load_state_dict(from_loadable(state))
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"the optimizer's state does not fit this optimizer: {error}\nTo fix: use the optimizer of the run."
        ) from error


# ---- the same as recorded? -----------------------------------------------------------------------------------------


def _compared(recorded: Incident, diagnosis: Diagnosis, notes: list[str]) -> Replayed:
    found = Incident(
        recorded.step,
        recorded.time,
        Trigger("replay", diagnosis.signal, diagnosis.value),
        Outcome("none", [_seen(diagnosis)]),
        rank=recorded.rank,
    )
    diagnosis.fill(found)
    value = recorded.trigger.value
    was_bad = recorded.origin.phase != "unknown" or (isinstance(value, float) and not math.isfinite(value))
    if diagnosis.healthy and was_bad:
        if recorded.replay.reproduced is False:
            notes = [*notes, "it did not happen again in the run either: a transient fault"]
        return Replayed(NOT_REPRODUCED, found, ["every number of the step is finite now"], notes)
    differences = [] if diagnosis.healthy else _differences(recorded, found)
    if not was_bad and not diagnosis.healthy:
        differences = [f"recorded as finite, now {diagnosis.signal} is not"]
    if diagnosis.replay.reproduced is False:
        differences.append("the loss is not the recorded one, neither bit for bit nor nearly")
    elif diagnosis.replay.bitwise is False:
        notes = [
            *notes,
            "the loss is that of the run but for its last bits: its sums are made in no fixed order, or elsewhere",
        ]
    return Replayed(DIFFERENT if differences else REPRODUCED, found, differences, notes)


def _seen(diagnosis: Diagnosis) -> str:
    if diagnosis.error is not None:
        return f"the step raises {type(diagnosis.error).__name__}: {diagnosis.error}"
    return "every number of the step is finite" if diagnosis.healthy else f"bad {diagnosis.signal}"


def _differences(recorded: Incident, found: Incident) -> list[str]:
    if recorded.origin.phase == "unknown":
        return []  # it was not investigated, or nothing was found
    pairs = [
        ("phase", recorded.origin.phase, found.origin.phase),
        ("operation", recorded.origin.op, found.origin.op),
        ("module", recorded.origin.module, found.origin.module),
        ("line", recorded.origin.code, found.origin.code),
        ("cause", recorded.cause.label, found.cause.label),
        ("samples", recorded.samples, found.samples),
    ]
    return [f"{what}: {now} now, {then} recorded" for what, then, now in pairs if then != now]
