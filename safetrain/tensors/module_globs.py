"""Which modules of a model a glob matches."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from ..core.spelling import suggest
from ..errors import UsageError


def matching(model: nn.Module, patterns: Iterable[str], option: str) -> dict[str, nn.Module]:
    """The modules whose name or type name one of the globs matches, by name.

    `*.norm` means every module called `norm`, at the top level too. A glob that matches nothing is an error that names
    `option`: a misspelt one would silently protect nothing.
    """
    named = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = {name: module for name, module in named.items() if _matches(pattern, name, module)}
        if not matched:
            raise UsageError(
                f"{option}: {pattern!r} matches no module of {type(model).__name__}{suggest(pattern, _spellings(named))}\n"
                "To fix: give a glob over module names or type names; print([n for n, _ in model.named_modules()]) lists them."
            )
        found.update(matched)
    return {name: module for name, module in named.items() if name in found}


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    names = (name, f".{name}" if name else "", type_name(module))
    return any(fnmatchcase(text, pattern) for text in names)


def type_name(module: nn.Module) -> str:
    """Of the user's class: FSDP2 puts one of its own, `FSDPBlock`, in the place of `Block`."""
    kinds = type(module).__mro__
    is_wrapped = len(kinds) > 2 and kinds[1].__name__ == "FSDPModule"
    return kinds[2].__name__ if is_wrapped else kinds[0].__name__


def _spellings(named: dict[str, nn.Module]) -> list[str]:
    """What could have been meant: names, type names, and `*.last_part`."""
    names = [name for name in named if name]
    anywhere = [f"*.{name.rpartition('.')[2]}" for name in names]
    return list(dict.fromkeys([*names, *anywhere, *(type_name(module) for module in named.values())]))


def named(model: nn.Module, name: str) -> nn.Module:
    """The module of exactly that name; an error that names the closest one if there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [known for known, _ in model.named_modules() if known]
        raise UsageError(
            f"{type(model).__name__} has no module {name!r}{suggest(name, known)}\n"
            "To fix: use a name out of model.named_modules()."
        ) from None
