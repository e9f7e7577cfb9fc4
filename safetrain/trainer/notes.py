"""Notes at the start about what looks odd but may be intended, with names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .._private.modules import batch_norms
from ..config.schema import DataConfig
from ..core.numbers import listed
from ..core.protocols import PARTS
from ..data.sources import LoaderSource, MapSource, Source
from ..tensors.nest import leaves


def notes_about(
    model: nn.Module,
    optimizer: Optimizer,
    source: Source,
    evaluated: Iterable[Source],
    auxiliary: Iterable[nn.Module],
    config: DataConfig,
    is_scheduled: bool,
) -> list[str]:
    return [
        *_untrained(model, optimizer, auxiliary),
        *_unregistered(model, optimizer),
        *_rate_of_zero(optimizer, is_scheduled),
        *_batch_of_one(model, source),
        *_samples_for_batches(source),
        *_without_effect(source, evaluated, config),
    ]


def untrained(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the parameters that want a gradient and are not in the optimizer."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in moved]


def said_of_untrained(names: list[str]) -> str:
    return (
        f"{listed(names)} of the model {'wants' if len(names) == 1 else 'want'} a gradient but {'is' if len(names) == 1 else 'are'} not in the "
        "optimizer, so training leaves them as they are; give them to the optimizer (optimizer.add_param_group), or set requires_grad=False"
    )


def _untrained(model: nn.Module, optimizer: Optimizer, auxiliary: Iterable[nn.Module]) -> Iterator[str]:
    if names := untrained(model, optimizer):
        yield said_of_untrained(names)
    for module in auxiliary:
        if names := untrained(module, optimizer):
            yield f"of {type(module).__name__}, next to the model: {said_of_untrained(names)}"


def _unregistered(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Modules in plain lists and dicts: PyTorch does not see their parameters."""
    known = set(model.modules())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            items: Iterable[Any] = value.values() if isinstance(value, dict) else value
            lost = [item for item in items if isinstance(item, nn.Module) and item not in known]
            if lost and any(True for item in lost for _ in item.parameters()):
                kind, holder = type(value).__name__, "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
                where = f"{path}.{name}" if path else name
                yield (
                    f"{where} is a plain {kind} of {len(lost)} modules ({type(lost[0]).__name__}), whose parameters are neither trained, moved to the "
                    f"device nor saved; make it an {holder}"
                )


def _rate_of_zero(optimizer: Optimizer, is_scheduled: bool) -> Iterator[str]:
    groups = optimizer.param_groups
    if not is_scheduled and all(isinstance(group.get("lr"), (int, float)) and group["lr"] == 0 for group in groups):
        yield "the learning rate is 0 and there is no schedule, so no step changes anything; give the optimizer an lr"


def _batch_of_one(model: nn.Module, source: Source) -> Iterator[str]:
    if isinstance(source, MapSource):
        sampler = source.sampler
        length, size = sampler.length, sampler.batch_size
        is_kept, fix = sampler.world_size == 1 and not sampler.drop_last, "set data.drop_last=true"
    elif isinstance(source, LoaderSource) and source.data.batch_size and hasattr(source.data.sampler, "__len__"):
        length, size = len(source.data.sampler), source.data.batch_size  # type: ignore[arg-type]
        is_kept, fix = not source.drop_last, "pass drop_last=True to the DataLoader"
    else:
        return
    is_normed = any(isinstance(m, batch_norms()) and m.training for m in model.modules())
    if is_kept and size > 1 and length % size == 1 and is_normed:
        yield (
            f"the last batch of an epoch has a single sample ({length} samples in batches of {size}), for which BatchNorm "
            f"has no variance and raises; {fix}"
        )


def _without_effect(source: Source, evaluated: Iterable[Source], config: DataConfig) -> Iterator[str]:
    """Options of `data` that are for a Dataset."""
    usual, followed = DataConfig(), {name for each in (source, *evaluated) for name in each.follows}
    given = [name for name in MapSource.follows if getattr(config, name) != getattr(usual, name)]
    if ignored := [f"data.{name}" for name in given if name not in followed]:
        kind = type(getattr(source, "data", source)).__name__
        yield (
            f"{listed(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect on training data of type {kind}; pass the Dataset itself, "
            "or set this where the batches are made"
        )


def _samples_for_batches(source: Source) -> Iterator[str]:
    data = getattr(source, "data", None)
    if type(data) is not list or not data or not isinstance(data[0], (tuple, list)) or len(data[0]) != 2:
        return
    last = data[0][1]
    if isinstance(last, (int, float)) or getattr(last, "ndim", None) == 0:
        yield (
            f"the data is a list of {len(data)} pairs whose second part is a single number: they are taken as batches, as they are; if they are "
            "samples, pass torch.utils.data.DataLoader(data, batch_size=…, shuffle=True)"
        )


def carried(trainer: object) -> dict[str, tuple[int, ...]]:
    """The attributes of a trainer, but for its parts, that hold tensors of more than one value: the ids of these."""
    own = {name: value for name, value in vars(trainer).items() if name[0] != "_" and name not in PARTS}
    held = {name: value for name, value in own.items() if isinstance(value, (Tensor, tuple, list, dict))}
    found = {
        name: tuple(id(t) for t in leaves(value) if isinstance(t, Tensor) and t.numel() > 1)
        for name, value in held.items()
    }
    return {name: ids for name, ids in found.items() if ids}


def said_of_carried(names: list[str]) -> str:
    return (
        f"{listed(names)} of the trainer {'holds' if len(names) == 1 else 'hold'} tensors that changed while it trained: they are neither undone with a "
        "refused step nor saved for a resume; if training goes on from them, keep them in a buffer of the model"
    )
