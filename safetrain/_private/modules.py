"""torch's own base classes of modules, and which buffers a module saves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .feature import Feature

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _probe() -> bool:
    conv, norm = nn.modules.conv, nn.modules.batchnorm
    return (
        issubclass(nn.Conv2d, conv._ConvNd)
        and issubclass(nn.ConvTranspose2d, conv._ConvTransposeNd)
        and issubclass(nn.SyncBatchNorm, norm._BatchNorm)
        and issubclass(nn.InstanceNorm2d, norm._NormBase)
    )


BASE_CLASSES = Feature(
    "module_base_classes",
    relies_on="torch.nn.modules.conv._ConvNd, _ConvTransposeNd, torch.nn.modules.batchnorm._BatchNorm, _NormBase",
    lost="convolutions and norms of yours that derive from torch's private base classes are treated as such",
    instead="only what derives from torch's public classes is; a batch norm of yours is then sharded like other modules",
    probe=_probe,
)


def batch_norms() -> tuple[type[nn.Module], ...]:
    return _kinds(nn.modules.batchnorm, "_BatchNorm", _BATCH_NORMS)


def norms_over_channels() -> tuple[type[nn.Module], ...]:
    return _kinds(nn.modules.batchnorm, "_NormBase", (*_BATCH_NORMS, *_INSTANCE_NORMS))


def convolutions() -> tuple[type[nn.Module], ...]:
    return _kinds(nn.modules.conv, "_ConvNd", (*_CONVOLUTIONS, *_TRANSPOSED))


def transposed_convolutions() -> tuple[type[nn.Module], ...]:
    return _kinds(nn.modules.conv, "_ConvTransposeNd", _TRANSPOSED)


def _kinds(module: Any, name: str, public: tuple[type[nn.Module], ...]) -> tuple[type[nn.Module], ...]:
    """The private base class, of which users derive too; without it the public classes derived from it."""
    return (getattr(module, name),) if BASE_CLASSES.works else public


def _probe_buffers() -> bool:
    module = nn.Module()
    module.register_buffer("saved", None)
    module.register_buffer("not_saved", None, persistent=False)
    return module._non_persistent_buffers_set == {"not_saved"}


SAVED_BUFFERS = Feature(
    "saved_buffers",
    relies_on="torch.nn.Module._non_persistent_buffers_set",
    lost="a quick look at which buffers are not in a state_dict",
    instead="the module is asked for its state_dict; the answer is the same",
    probe=_probe_buffers,
)


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer of the module, by its own name there, is part of its state_dict."""
    if SAVED_BUFFERS.works:
        return buffer not in module._non_persistent_buffers_set
    return buffer in module.state_dict(keep_vars=True)


def children_of(modules: Iterable[nn.Module]) -> list[dict[str, nn.Module | None]]:
    """The modules that each holds, as the very dictionaries that will show a change; without scripted ones, which cannot change."""
    return [module._modules for module in modules if type(module._modules) is dict]
