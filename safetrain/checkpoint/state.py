"""The whole training state in one place: gathered from the parts of a run and restored to them.

Snapshots in memory, checkpoints on disk, rollback and resume all use this and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .._private.modules import is_saved
from ..errors import CheckpointError
from ..guards import REGISTRY
from ..tensors.nest import copied
from ..tensors.rng import RandomState, seed_everything
from ..tensors.saved import overlaps_itself
from ..tensors.sharded import empty_like, is_dtensor, local, put, shard_like
from . import hidden_state
from .buffers import buffers_of, put_buffers, values_of
from .plain import from_loadable, to_loadable

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..guards.guard_set import GuardSet
    from ..optim.ema import Ema
    from ..optim.schedule import Schedule
    from ..precision.mixed import Precision


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Rooted(Protocol):
    roots: dict[str, nn.Module]
    """The model, with the name "", and the modules that take part in a step without being part of it."""


class TrainingParts(Protocol):
    """What moves when a step is committed. A `Step` is one."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    guards: GuardSet
    ema: Ema | None
    stateful: dict[str, Stateful]
    """Further parts by their name in `TrainState.rest`."""

    @property
    def written_in_forward(self) -> set[str]:
        """Names of the parameters that a forward pass writes to."""

    @property
    def transaction(self) -> Rooted: ...

    @property
    def nonfinite_by_design(self) -> set[str]:
        """Names of buffers and parameters that hold NaN or Inf on purpose."""

    def bad_state(self) -> dict[str, str]:
        """Names of the non-finite tensors with what is wrong."""

    def clear_gradients(self) -> None: ...


@dataclass
class TrainState:
    tensors: dict[str, Tensor]
    """By `part/name`: `model/` (as in the model's state_dict), `transient/` (its other buffers), `extra/` (parameters that only
    the optimizer has), `optimizer/`, `ema/`. Just gathered, they are the trainer's own and not copies."""
    rest: dict[str, Any]
    """Everything else, out of types that are safe to load."""
    shards: Path | None = None
    """A directory with the tensors, which are not read yet: how they are sharded over the processes depends on who reads them."""

    @classmethod
    def gather(cls, parts: TrainingParts, num_committed: int = 0, progress: Stateful | None = None) -> TrainState:
        """Call it between steps, with nothing deferred. Copies no tensor; waits for the device (fp16: for its scale).

        Without `progress` (the data cursor and the record of the run) the state is good for a rollback only.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in parts.model.named_parameters():
            tensors[f"model/{name}"] = parameter.detach()
        for name, module, key in buffers_of(parts.model):
            kind = "model" if is_saved(module, key) else "transient"
            tensors[f"{kind}/{name}"] = values_of(module._buffers[key])
        for root, auxiliary in _auxiliary(parts).items():
            for name, module, key in buffers_of(auxiliary):
                tensors[f"auxiliary/{root}.{name}"] = values_of(module._buffers[key])
        for index, extra in enumerate(_extra_parameters(parts.model, parts.optimizer)):
            tensors[f"extra/{index}"] = extra.detach()
        optimizer = _split_optimizer(parts.optimizer, tensors)
        if parts.ema is not None:
            averaged = {name: t for name, t in parts.ema.state_dict().items() if isinstance(t, Tensor)}
            for name in _tied_names(parts.model):
                averaged.pop(name)
            tensors |= {f"ema/{name}": tensor for name, tensor in averaged.items()}
        rest: dict[str, Any] = {
            "optimizer_attributes": hidden_state.attributes(parts.optimizer),
            "generators": hidden_state.generators_of({"": parts.model, **_auxiliary(parts)}),
            "num_committed": num_committed,
            "optimizer": optimizer,
            "scheduler": parts.schedule.state_dict(),
            "scaler": parts.precision.state_dict(),
            "guards": parts.guards.state_dict(),
            **{name: part.state_dict() for name, part in parts.stateful.items()},
            "extra_state": _extra_state(parts.model),
            "frozen": _frozen(parts),
            "born_bad": _marked(parts.nonfinite_by_design, tensors),
            "buffers": _marked({name for name, _, _ in buffers_of(parts.model)}, tensors)
            + [name for name in tensors if name.startswith("auxiliary/")],
            "eval_mode": [name for name, module in parts.model.named_modules() if not module.training],
            "tied": _tied_names(parts.model),
        }
        if progress is not None:
            rest["progress"] = progress.state_dict()
        # Copies of what schedulers and guards go on changing; a few numbers each.
        rest = {part: to_loadable(value, part) for part, value in rest.items()}
        return cls(tensors, {**rest, "random": RandomState.capture().to_plain()})

    @torch.no_grad()
    def restore_training(self, parts: TrainingParts) -> None:
        """Weights, buffers, moments, schedule, scaler, EMA, random state and guards' baselines as they were gathered."""
        if self.shards is not None:
            self._read_shards(parts, self.shards)
        rest = from_loadable(self.rest)
        self._restore_model(parts.model, rest)
        self._restore_auxiliary(_auxiliary(parts))
        for index, parameter in enumerate(_extra_parameters(parts.model, parts.optimizer)):
            put(parameter, self._tensor(f"extra/{index}", parameter))
        parts.schedule.load_state_dict(rest["scheduler"])
        self._restore_optimizer(parts.optimizer, rest["optimizer"])  # last: the learning rates are in its groups
        hidden_state.restore(parts.optimizer, rest.get("optimizer_attributes", {}))
        hidden_state.restore_generators({"": parts.model, **_auxiliary(parts)}, rest.get("generators", {}))
        parts.precision.load_state_dict(rest["scaler"])
        if parts.ema is not None:
            self._restore_ema(parts.ema)
        for name, learned in rest["guards"].items():
            if name in REGISTRY or any(guard.name == name for guard in parts.guards):
                parts.guards.named(name).load_state_dict(learned)
        for name, part in parts.stateful.items():
            if rest.get(name) is not None:
                part.load_state_dict(rest[name])
        RandomState.from_plain(rest["random"]).restore()
        if (index := rest.get("new_process")) is not None:
            seed_everything(torch.randint(2**62, ()).item() + index)

    def restore_progress(self, progress: Stateful) -> None:
        """The data cursor and the record of the run. A rollback leaves these where they are."""
        # Checkpoints of version 0.1.0 have it one level higher.
        order = {"ddp_has_order": self.rest.get("ddp_has_order", False)}
        progress.load_state_dict(order | from_loadable(self.rest["progress"]))

    def own_part(self) -> dict[str, Any]:
        """What is different in each process of a run: small, and the buffers of a model that is sharded over them."""
        part = {"random": self.rest["random"]}
        if "progress" in self.rest:
            part["data"] = self.rest["progress"]["data"]
        if any(is_dtensor(tensor) for tensor in self.tensors.values()):
            part["buffers"] = {name: self.tensors[name].cpu() for name in self.rest["buffers"]}
        return part

    def become_that_of(self, rank: int, world_size: int) -> None:
        """What was saved of one process. Another number of them goes on with the data of all, and new ones draw their own
        random numbers."""
        parts = self.rest.pop("processes", None) or [{"random": self.rest["random"]}]
        own = parts[rank % len(parts)]
        self.rest["random"] = own["random"]
        if rank >= len(parts):
            self.rest["new_process"] = rank
        if len(parts) == world_size:
            if "data" in own:
                self.rest["progress"]["data"] = own["data"]
            self.rest["own_buffers"] = own.get("buffers", {})

    def _read_shards(self, parts: TrainingParts, directory: Path) -> None:
        """Each process reads the part that it is to have. Every process must get here."""
        from .manifest import Damaged
        from .shards import read_shards

        targets = TrainState.gather(parts).tensors
        parameters = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]

        def memory_for(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            like = targets.get(name)
            index = name.split("/")[1]
            if like is None and name.startswith("optimizer/") and index.isdigit() and int(index) < len(parameters):
                like = parameters[int(index)]
            if like is not None and like.shape == shape:
                return empty_like(like, dtype, device="cpu")
            return torch.empty(shape, dtype=dtype)

        try:
            self.tensors |= read_shards(directory, memory_for)
        except Damaged as problem:
            raise CheckpointError(
                f"{directory} was whole when it was verified, but cannot be read: {problem}.\nTo fix: resume again."
            ) from problem
        self.tensors |= self.rest.get("own_buffers", {})
        self.shards = None

    @property
    def num_bytes(self) -> int:
        """In this process."""
        return sum(local(tensor).nbytes for tensor in self.tensors.values())

    @property
    def num_frozen_bytes(self) -> int:
        """Of the weights that are not trained, in this process: of these one copy is enough."""
        return sum(local(self.tensors[name]).nbytes for name in self.rest.get("frozen", ()) if name in self.tensors)

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, by their own names."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        saved = self.tensors.get(name)
        if saved is None or saved.shape != like.shape:
            what = "is not in it" if saved is None else f"has the shape {tuple(saved.shape)} there"
            raise CheckpointError(
                f"the saved state does not fit this model: {name} (shape {tuple(like.shape)}) {what}.\n"
                "To fix: build the same model and optimizer as the run that saved it."
            )
        return saved

    def _restore_model(self, model: nn.Module, rest: dict[str, Any]) -> None:
        own = dict(model.named_parameters())
        saved_buffers = self.part("model") | self.part("transient")
        for name in own:
            saved_buffers.pop(name, None)
        pairs = [(parameter, self._tensor(f"model/{name}", parameter)) for name, parameter in own.items()]
        known = {name.rpartition(".")[0] for name in saved_buffers}
        modules = dict(model.named_modules())
        if unknown := sorted(known - modules.keys()):
            raise CheckpointError(
                f"the saved state does not fit this model, which has no {', '.join(unknown[:5])}.\n"
                "To fix: build the same model as the run that saved it."
            )
        for parameter, saved in pairs:
            put(parameter, saved)
        for name, module, key in buffers_of(model):
            if name not in saved_buffers:
                module._buffers[key] = None  # it was created after the state was saved
        put_buffers(modules, saved_buffers, next((p.device for p in own.values()), None))
        if rest["extra_state"]:
            model.load_state_dict(rest["extra_state"], strict=False)
        for name, module in modules.items():
            module.training = name not in set(rest["eval_mode"])

    def _restore_auxiliary(self, roots: Mapping[str, nn.Module]) -> None:
        """Buffers of modules that take part in a step without being part of the model. Earlier versions did not save them."""
        modules = {path: m for root, top in roots.items() for path, m in top.named_modules(prefix=root)}
        saved = {n: t for n, t in self.part("auxiliary").items() if n.rpartition(".")[0] in modules}
        put_buffers(modules, saved, None)

    def _restore_optimizer(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        packed = saved["packed"]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        in_place: set[str] = set()
        for name, (index, key) in saved["tensors"].items():
            value = self.tensors[name]
            own = None
            if isinstance(index, int) and index < len(parameters):
                own = optimizer.state.get(parameters[index], {}).get(key)
                value = shard_like(value, parameters[index])
            if own is not None and _fits(
                own, value
            ):  # there is no room for a second copy on a device that training has filled
                put(own, value)
                in_place.add(name)
            packed["state"].setdefault(index, {})[key] = own if name in in_place else value.clone()
        try:
            optimizer.load_state_dict(packed)
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the saved state does not fit this optimizer: {error}.\nTo fix: build the same optimizer as the run that saved it."
            ) from error
        # Loading casts moments to their parameter's type; the exact bits are put back.
        for name, (index, key) in saved["tensors"].items():
            if name in in_place:
                optimizer.state[parameters[index]][key] = packed["state"][index][key]
                continue
            loaded = optimizer.state[parameters[index]].get(key) if isinstance(index, int) else None
            if isinstance(loaded, Tensor) and loaded.dtype != self.tensors[name].dtype:
                value = shard_like(self.tensors[name], parameters[index])
                optimizer.state[parameters[index]][key] = value.to(loaded.device, copy=True)

    def _restore_ema(self, ema: Ema) -> None:
        for name, average in ema.weights.items():
            put(average, self._tensor(f"ema/{name}", average))


def _fits(own: Any, value: Tensor) -> bool:
    """The tensor that the optimizer has now can take the saved values."""
    if not isinstance(own, Tensor) or is_dtensor(own) != is_dtensor(value):
        return False
    return (
        own.shape == value.shape
        and own.dtype == value.dtype
        and own.layout is torch.strided
        and not overlaps_itself(own)
    )


def _auxiliary(parts: TrainingParts) -> dict[str, nn.Module]:
    return {name: module for name, module in parts.transaction.roots.items() if name}


def _extra_parameters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    own = {id(p) for p in model.parameters()}
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]


def _split_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The optimizer's state without its tensors, which are added to `tensors`, and where they belong."""
    packed = optimizer.state_dict()
    places: dict[str, tuple[Any, Any]] = {}
    state: dict[Any, Any] = {}
    for index, values in packed.get("state", {}).items():
        if not isinstance(values, dict):
            state[index] = values
            continue
        state[index] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for key, value in values.items():
            if isinstance(value, Tensor):
                name = f"optimizer/{index}/{key}"
                tensors[name] = value.detach()
                places[name] = (index, key)
    # A wrapper of another optimizer may keep both states under names of its own, and no "state".
    others = {key: copied(value) for key, value in packed.items() if key not in ("state", "param_groups")}
    kept = {**packed, **others}
    return {"packed": {**kept, "state": state} if "state" in packed else kept, "tensors": places}


def _frozen(parts: TrainingParts) -> list[str]:
    """Weights that nothing is known to change."""
    moved = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    named = parts.model.named_parameters()
    fixed = {name for name, p in named if not p.requires_grad and id(p) not in moved}
    return [f"model/{name}" for name in sorted(fixed - parts.written_in_forward)]


def _marked(names: set[str], tensors: dict[str, Tensor]) -> list[str]:
    """The tensors of these parameters and buffers."""
    if not names:
        return []
    return [name for name in tensors if name.partition("/")[2] in names and not name.startswith("optimizer/")]


def _extra_state(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}._extra_state" if path else "_extra_state": module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of tensors that the model's state_dict shows more than once, with the first name of each."""
    first: dict[int, str] = {}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, _ in model.named_parameters():
        if name in state:
            first[id(state[name])] = name
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and first.setdefault(id(tensor), name) != name
    }
