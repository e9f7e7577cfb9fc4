"""An incident on disk: its text, and everything that a replay of its step needs.

    incidents/step-000042/   incident.json   what was found, for programs
                             report.md       the same, for people
                             report.html     the same, as a page
                             replay.pt       batch, random state, weights, buffers, modes, patches, islands, optimizer

The config that builds the model is that of the run, two directories up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.plain import load_plain, misfits, rebuild, to_loadable
from ..core.files import read_text, replacing, to_json, write_text
from ..core.incident import SCHEMA, Incident, describe_operand, restore_numbers
from ..core.rundir import CHECKPOINTS
from ..errors import UsageError
from ..forensics.patches import Patches
from ..precision.islands import islands_of
from ..tensors.nest import num_bytes
from ..tensors.rng import RandomState
from ..tensors.sharded import is_sharded
from . import render as incident_report
from .batch_codec import encode

INCIDENT, REPLAY, INCIDENTS = "incident.json", "replay.pt", "incidents"
REPLAY_SCHEMA = 1
CONTENTS: dict[str, tuple[type, ...]] = {
    "schema": (int,), "random_state": (dict,), "precision": (str,), "loss_scale": (int, float), "loss": (float, type(None)),
    "num_committed": (int,), "is_late": (bool,), "eval_mode": (list,), "islands": (list,), "patches": (list,),
    "window": (list, type(None)), "model": (dict, type(None)), "buffers": (dict,), "beside": (list,),
    "checkpoint": (dict, type(None)), "optimizer": (dict,),
}  # fmt: skip
"""What `replay.pt` holds, and of which types."""


def write_report(directory: Path, incident: Incident) -> None:
    write_text(directory / INCIDENT, to_json(incident.to_dict(), indent=2) + "\n")
    incident_report.write_report(incident, directory)


# ---- writing what a replay needs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedStep:
    """A refused step, while the state is that from before it."""

    incident: Incident
    window: Sequence[Any]
    random_state: RandomState
    model: nn.Module
    auxiliary_modules: Sequence[nn.Module]
    """Modules that the step uses and that are not part of the model."""
    optimizer: Optimizer
    patches: Patches
    precision: str
    loss_scale: float
    loss: float | None
    """To compare a replay with; None if a replay cannot give the same bits."""
    num_committed: int
    last_rollback: int | None
    """The step at which the run went back last."""
    is_late: bool
    run_dir: Path


def write_replay(directory: Path, step: RecordedStep, max_mb: float) -> list[str]:
    """Write what a replay needs, nothing larger than `max_mb`; returns what had to be left out.

    Instead of weights that are too large, the checkpoint that holds them is named.
    """
    left_out: list[str] = []
    room = max_mb * 2**20
    contents: dict[str, Any] = {
        "schema": REPLAY_SCHEMA,
        "random_state": step.random_state.to_plain(),
        "precision": step.precision,
        "loss_scale": step.loss_scale,
        "loss": step.loss,
        "num_committed": step.num_committed,
        "is_late": step.is_late,
        "eval_mode": [name for name, module in step.model.named_modules() if not module.training],
        "islands": islands_of(step.model),
        "patches": step.patches.state_dict()["patches"],
        "window": None,
        "model": None,
        "buffers": {},
        "beside": [],
        "checkpoint": None,
    }
    try:
        window = [encode(batch) for batch in step.window]
        room -= num_bytes(window)
        if room >= 0:
            contents["window"] = window
        else:
            left_out.append("the batch, which is larger than forensics.max_bundle_mb")
    except Exception as error:  # whatever the objects in the batch raise when they are taken apart
        left_out.append(f"the batch, which cannot be kept ({type(error).__name__}: {error})")
    weights = {} if (is_split := is_sharded(step.model)) else _weights(step)
    if not is_split and num_bytes(weights) <= room:
        contents |= weights
        room -= num_bytes(weights)
    else:
        contents["checkpoint"] = _checkpoint_of(step)
        why = "sharded over the ranks (FSDP2)" if is_split else "larger than forensics.max_bundle_mb"
        left_out.append(f"the weights, which are {why}")
    contents["optimizer"] = _optimizer(step, room, left_out)
    with replacing(directory / REPLAY) as path:
        torch.save(contents, path)
    return left_out


def _weights(step: RecordedStep) -> dict[str, Any]:
    """Of the model, of its buffers that are not in its state_dict, and of the auxiliary modules."""
    own = step.model.state_dict()
    transient = {name: buffer for name, buffer in step.model.named_buffers() if name not in own}
    auxiliary = [module.state_dict() for module in step.auxiliary_modules]
    kept = {"model": own, "buffers": transient, "beside": auxiliary}
    return {part: _on_host(values) for part, values in kept.items()}


def _on_host(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, Mapping):
        return {name: _on_host(value) for name, value in values.items()}
    return [_on_host(value) for value in values] if type(values) is list else to_loadable(values, "the model")


def _optimizer(step: RecordedStep, room: float, left_out: list[str]) -> dict[str, Any]:
    """Its settings; its moments too when the update is what went wrong."""
    state = step.optimizer.state_dict()
    is_update = step.incident.origin.phase == "optimizer" or step.incident.trigger.signal == "update"
    if is_update and not is_sharded(step.model):
        if num_bytes(state) <= room:
            return _on_host(to_loadable(state, "the optimizer"))  # type: ignore[no-any-return]
        left_out.append("the optimizer's moments, which are larger than forensics.max_bundle_mb")
    settings = (
        {**state, "state": {}} if "state" in state else state
    )  # a wrapper of another optimizer has names of its own
    return _on_host(to_loadable(settings, "the optimizer"))  # type: ignore[no-any-return]


def _checkpoint_of(step: RecordedStep) -> dict[str, Any] | None:
    """The newest checkpoint; `is_exact` when no step was committed since, so that it holds the very weights."""
    from ..checkpoint import CheckpointStore
    from ..checkpoint.manifest import Damaged, read_manifest

    for path in reversed(CheckpointStore(step.run_dir / CHECKPOINTS).paths()):
        with contextlib.suppress(Damaged):
            manifest = read_manifest(path)
            is_newer = step.last_rollback is None or manifest.step > step.last_rollback
            is_exact = is_newer and manifest.num_committed == step.num_committed
            return {"path": f"{CHECKPOINTS}/{path.name}", "num_committed": manifest.num_committed, "is_exact": is_exact}
    return None


# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bundle:
    directory: Path
    incident: Incident
    """As it was recorded."""
    contents: dict[str, Any]
    """Of `replay.pt`."""
    asked: Path | None = None
    """The directory as it was asked for, before links were followed."""

    @property
    def run_dir(self) -> Path:
        return self.directory.parent.parent


def read_bundle(path: str | Path) -> Bundle:
    """A bundle from its directory. Loading it can run nothing: neither pickled code nor the classes in its batch."""
    asked = Path(path)
    asked = Path(os.path.abspath(asked.parent if asked.is_file() else asked))
    directory = asked.resolve()
    incident = read_incident(directory)
    file = directory / REPLAY
    if not file.is_file():
        raise UsageError(
            f"{path} has no {REPLAY}, so its step cannot be replayed.\n"
            "To fix: choose another incident of the run; forensics.max_incidents says how many are kept whole."
        )
    try:
        contents = load_plain(file)
        is_known = isinstance(contents, dict) and contents.get("schema") == REPLAY_SCHEMA
    except Exception as error:  # a forged file can make its reader raise anything, but never run anything
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # what a pickle would call
        what = f"it names {named[1]}" if named else (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{file} is not as safetrain wrote it, and nothing of it was run: {what}\n"
            "To fix: get the bundle again from where the run was."
        ) from error
    if not is_known or not contents.keys() >= CONTENTS.keys():
        raise UsageError(
            f"{file} is of a format that this safetrain does not know.\nTo fix: use the version that wrote it."
        )
    if wrong := [name for name, kinds in CONTENTS.items() if not isinstance(contents[name], kinds)]:
        raise UsageError(f"{file} is not as safetrain wrote it: {', '.join(wrong)}.\nTo fix: get the bundle again.")
    return Bundle(directory, incident, contents, asked)


def read_incident(directory: Path) -> Incident:
    """The incident of a bundle, from its `incident.json`."""
    file = directory / INCIDENT
    try:
        fields = json.loads(read_text(file))
        incident = incident_from(fields)
    except OSError as error:
        raise UsageError(
            f"{directory} is not an incident's directory: {INCIDENT} cannot be read ({error.strerror}).\n"
            "To fix: give one like RUN/incidents/step-000042; safetrain diagnose RUN lists them."
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UsageError(f"{file} is not as safetrain wrote it ({error}).\nTo fix: get the bundle again.") from error
    incident.path = f"{INCIDENTS}/{directory.name}"
    return incident


def incident_from(fields: dict[str, Any]) -> Incident:
    """From what `Incident.to_dict` gave."""
    if fields.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {fields.get('schema')!r}, and this safetrain knows {SCHEMA}")
    fields = {name: value for name, value in fields.items() if name != "id"}
    if wrong := misfits(Incident, fields):
        raise ValueError(f"these are not what they should be: {', '.join(wrong[:5])}")
    incident = rebuild(Incident, fields)
    restore_numbers(incident)
    for operand in (*incident.origin.inputs, *incident.origin.outputs):
        describe_operand(operand)  # raises if it is not one
    return incident
