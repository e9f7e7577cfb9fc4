"""Builds the parts of a run from its config."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import DistNetworkError
from torch.optim import Optimizer

from .._private.compiler import BACKWARD
from ..config import load_config
from ..config.schema import Config, LoopConfig
from ..config.targets import import_target, instantiate_loss
from ..core.loss import LossFn, adapt_loss
from ..data.stream import BatchStream, open_stream
from ..distributed.machine import Machine
from ..errors import ConfigError, UsageError
from ..guards import REGISTRY, Guard
from ..guards.islands import LOSS, Islands
from ..optim.schedule import Schedule
from ..precision.autocast import AUTOCAST_DTYPES
from ..precision.compiled import lowers_islands, note_compiled
from ..step.exchange import Exchange
from ..step.joint import JointExchange
from ..tensors.devices import is_host, note_in_use
from ..tensors.module_globs import matching
from ..tensors.rng import seed_everything
from ..tensors.sharded import is_sharded
from .checks import check_config_of_ranks
from .fsdp import keep_sharded, shard_model


def load_for(config: Any, run_dir: Any) -> Config:
    """The config of a run; with `run_dir=False`, one that writes nothing."""
    loaded = load_config(config)
    if run_dir is True:
        raise UsageError(
            "run_dir=True is no directory.\nTo fix: give a path, None for a new one below runs/, or False for none."
        )
    if run_dir is False:
        loaded.checkpoint.enabled = loaded.checkpoint.save_final = loaded.logging.tensorboard = False
        loaded.forensics.max_incidents = 0
    return loaded


def open_machine(config: Config) -> Machine:
    """Seed the random generators, and set up the machine to train on. That the processes cannot reach each other is a launch error."""
    if config.seed is not None:
        seed_everything(config.seed)
    loop = config.loop
    try:
        machine = Machine(loop.device, num_processes=loop.num_processes, rank_timeout_seconds=loop.rank_timeout_seconds)
    except RuntimeError as error:
        in_use = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
        if not (in_use or isinstance(error, DistNetworkError)):  # older versions of torch raise a plain RuntimeError
            raise
        address, port = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
        if in_use:
            problem = f"port {port}, at which the processes of this run are to meet, is in use by another program"
            fix = "start it with another port (torchrun --master-port N, or MASTER_PORT=N), or with torchrun --standalone, which finds a free one"
        else:
            problem = f"the processes of this run could not meet at {address}:{port}: {str(error).splitlines()[0]}"
            fix = "check MASTER_ADDR and MASTER_PORT, and that every process was started"
        raise UsageError(f"{problem}.\nTo fix: {fix}.") from error
    machine.check_launch(loop.precision, shards_model=loop.strategy == "fsdp")
    check_config_of_ranks(config)
    note_in_use([machine.device])
    return machine


def open_exchange(machine: Machine) -> Exchange:
    return Exchange() if machine.link is None else JointExchange(machine)


def prepare_model(
    model: nn.Module, machine: Machine, loop: LoopConfig, optimizer: Optimizer | None, guards: Iterable[Guard]
) -> nn.Module:
    """What to call instead of the model: compiled and distributed as asked. The model itself is moved, not copied.

    With `loop.strategy=fsdp` its parameters become other objects; an optimizer that has the old ones gets the new ones.
    """
    if not model.training:
        model.train()
    is_to_shard = machine.world_size > 1 and loop.strategy == "fsdp" and not is_sharded(model)
    if not is_placed(model) and not is_to_shard:  # what is sharded may be larger than the device
        model.to(machine.device)
    if is_sharded(model):
        keep_sharded(model, machine.device)
    elif is_to_shard:
        dtype = AUTOCAST_DTYPES[loop.shard_dtype]
        shard_model(model, machine.device, loop.shard_blocks, _island_names(model, guards), dtype, optimizer)
    called = model
    if loop.compile:
        backend = "inductor" if loop.compile is True else loop.compile
        called = torch.compile(model, backend=backend, mode=loop.compile_mode)  # type: ignore[assignment]
        note_compiled(model, called, loop.compile_mode in ("reduce-overhead", "max-autotune"))
    has_islands = any(isinstance(g, Islands) and (g.config.modules or g.config.loss) for g in guards)
    if loop.precision != "fp32" and has_islands and lowers_islands(model):
        BACKWARD.require("leave out torch.compile or guards.islands, or use a torch that has it (2.9 or newer).")
    if machine.world_size > 1 and not is_sharded(model):
        called = machine.replicate(called)
    _separate_random_streams(machine.rank)
    return called


def is_placed(model: nn.Module) -> bool:
    """Its parts are on several devices already (a `device_map`, a pipeline by hand), and stay there."""
    return (
        bool(getattr(model, "hf_device_map", None))
        or len({p.device for p in model.parameters() if not is_host(p.device)}) > 1
    )


def _island_names(model: nn.Module, guards: Iterable[Guard]) -> list[str]:
    """Modules to keep in float32 from the start."""
    globs = [glob for guard in guards if isinstance(guard, Islands) for glob in guard.config.modules if glob != LOSS]
    return list(matching(model, globs, "guards.islands.modules"))


def _separate_random_streams(rank: int) -> None:
    """From here on each rank draws its own random numbers; those of rank 0 are the ones of a single process."""
    if rank > 0:
        seed_everything((torch.initial_seed() + rank * 1_000_003) % 2**63)


def open_data(
    train: Any, evaluation: Any, config: Config, machine: Machine, are_built: bool
) -> tuple[BatchStream, dict[str, BatchStream]]:
    """Streams over the training and the evaluation data by name (one without a name is ""), which is read whole, in its order, on every rank. `are_built`: by
    `build_data`, which may return both."""
    if are_built and isinstance(train, tuple) and len(train) == 2:
        train, built = train
        evaluation = built if evaluation is None else evaluation
    data, seed = config.data, config.seed or 0
    rank, world_size, device = machine.rank, machine.world_size, machine.device
    stream = open_stream(train, data, shuffle=data.shuffle, seed=seed, device=device, rank=rank, world_size=world_size)
    whole = dataclasses.replace(data, drop_last=False)
    streams = {}
    for name, each in (evaluation if type(evaluation) is dict else {"": evaluation}).items():
        if each is not None:
            what = f"evaluation data {name!r}" if name else "evaluation data"
            streams[str(name)] = open_stream(each, whole, shuffle=False, seed=seed, device=device, what=what)
    return stream, streams


def build_guards(options: Mapping[str, Any], extra: Iterable[Guard] = ()) -> list[Guard]:
    """The guards of a config, plus extra ones; one of the same name takes the place of the configured one."""
    guards: dict[str, Guard] = {}
    for name, given in options.items():
        if given is None:
            continue
        if isinstance(given, Mapping):
            arguments = {key: value for key, value in given.items() if key != "_target_"}
            cls = import_target(given["_target_"])
            if not (inspect.isclass(cls) and issubclass(cls, Guard)):
                raise ConfigError(
                    f"guards.{name}: {given['_target_']} is not a Guard. To fix: derive it from safetrain.Guard."
                )
            guard = cls(**arguments)
        else:
            guard = REGISTRY[name](given)
        guard.name = name  # type: ignore[misc]  # its key: two of one class may be told apart
        guards[name] = guard
    added: set[str] = set()
    for guard in extra:
        if not isinstance(guard, Guard):
            raise UsageError(f"guards must be Guard instances, got {guard!r}.\nTo fix: derive it from safetrain.Guard.")
        if guard.name in added:
            raise UsageError(
                f"two guards of the name {guard.name!r} were passed.\n"
                "To fix: give one of them another name (guard.name = 'other'), or leave it out."
            )
        added.add(guard.name)
        guards[guard.name] = guard
    return list(guards.values())


def open_schedule(optimizer: Optimizer, scheduler: Any, every: str | None, config: Config) -> Schedule:
    """`every`: "step" or "epoch"; None: as the config says."""
    return Schedule(optimizer, scheduler, every or (config.scheduler or {}).get("every", "step"))


def choose_loss(given: LossFn | None, config: Config) -> LossFn | None:
    """The loss that was handed over, or else that of the config."""
    if given is not None:
        return adapt_loss(given)
    return None if config.loss is None else adapt_loss(instantiate_loss(config.loss))
