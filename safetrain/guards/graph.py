"""The graph of a loss and the parameters: which it depends on, and which of them an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..core.verdict import Finding
from ..core.view import FirstLoss


@dataclass
class Graph:
    leaves: dict[int, Tensor] = field(default_factory=dict)
    """Tensors that get a gradient, by their id."""
    is_complete: bool = True
    """False: a part of it cannot be seen before backward (checkpoints that use autograd once more)."""
    nodes: list[Any] = field(default_factory=list)


def graph_of(loss: Tensor) -> Graph:
    graph, seen, todo = Graph(), set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        graph.nodes.append(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            graph.leaves[id(leaf)] = leaf
        if node.name().startswith("CheckpointFunction"):
            graph.is_complete = False
        todo += [following for following, _ in node.next_functions]
    return graph


# ---- parameters ------------------------------------------------------------------------------------------------


@dataclass
class Coverage:
    """Which parameters the first loss, the model and the optimizer have in common."""

    findings: list[Finding]
    missing: dict[str, nn.Parameter]
    """Not reached."""
    waiting: dict[str, nn.Parameter]
    """Not reached either, and maybe they need not be in each step: experts, models that are trained in turn."""
    reached: dict[str, nn.Parameter]
    """Those of the optimizer that are; empty where that cannot be known, or models are trained in turn."""


def coverage(first: FirstLoss, graph: Graph) -> Coverage:
    named = dict(first.model.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in reversed(named.items())}
    held = {id(p): p for group in first.optimizer.param_groups for p in group["params"]}
    elsewhere = {id(p) for module in first.auxiliary_modules for p in module.parameters()}
    findings = [*_unregistered(first, graph, names, held, elsewhere), *_unoptimized(graph, names, held, elsewhere)]
    missing: dict[str, nn.Parameter] = {}
    waiting: dict[str, nn.Parameter] = {}
    always = chains(first.model)
    alone: dict[str, nn.Parameter] = {}
    if graph.is_complete:
        missing = {
            names.get(key, f"<parameter {index}>"): p
            for index, (key, p) in enumerate(held.items())
            if p.requires_grad and key not in graph.leaves and key not in elsewhere and key in names
        }
        reached = {pattern for key in graph.leaves if key in names for pattern in patterns(names[key], always)}
        takes_turns = hasattr(first.optimizer, "optimizers")
        waiting = {name: p for name, p in missing.items() if takes_turns or _has_sibling(name, reached, always)}
        if not takes_turns:
            alone = {names[key]: p for key, p in held.items() if key in names and key in graph.leaves}
        missing = {name: p for name, p in missing.items() if name not in waiting}
    return Coverage(findings, missing, waiting, alone)


def not_reached(names: Iterable[str]) -> Finding:
    names = tuple(names)
    return Finding("not_reached", f"the loss does not depend on {listed(names)}: the optimizer cannot train it", names)


def no_longer_reached(lost: Sequence[str], all_names: Iterable[str], since: int, always: Chains) -> Finding | None:
    """Without those of lists of modules whose other entries are reached: each step may choose between them."""
    reached = {pattern for name in all_names if name not in set(lost) for pattern in patterns(name, always)}
    if not (names := tuple(name for name in lost if not _has_sibling(name, reached, always))):
        return None
    text = (
        f"since step {since} no gradient arrives at {listed(names)}, which were trained before: frozen (requires_grad_(False)), or used "
        "under no_grad"
    )
    return Finding("not_reached", text, names)


def _unregistered(
    first: FirstLoss, graph: Graph, names: dict[int, str], held: dict[int, Any], elsewhere: set[int]
) -> Iterator[Finding]:
    known = names.keys() | held.keys() | elsewhere
    unknown = {key: leaf for key, leaf in graph.leaves.items() if key not in known}
    # A tensor that is no parameter may be an input; as an attribute of a module it is meant as a weight.
    places = {key: _name_in_attributes(first.model, leaf) for key, leaf in unknown.items()}
    strangers = [key for key, leaf in unknown.items() if isinstance(leaf, nn.Parameter) or places[key] is not None]
    if strangers:
        found = tuple(places[key] or f"a parameter of shape {list(unknown[key].shape)}" for key in strangers)
        text = (
            f"the loss depends on {listed(found)}, which no module of the model has registered and no optimizer moves"
        )
        yield Finding("not_registered", text, found)


def _unoptimized(graph: Graph, names: dict[int, str], held: dict[int, Any], elsewhere: set[int]) -> Iterator[Finding]:
    left_out = tuple(names[key] for key in graph.leaves if key in names and key not in held)
    stale = [key for key in held if key not in names and key not in elsewhere and key not in graph.leaves]
    if left_out:
        why = f"; it holds {len(stale)} tensors that are no part of the model instead" if stale else ""
        yield Finding("not_in_optimizer", f"the optimizer does not hold {listed(left_out)}{why}", left_out)
    elif stale:
        text = f"the optimizer holds {len(stale)} parameters that are no part of the model, and the loss does not depend on them"
        yield Finding("not_reached", text)


def without_siblings(waiting: dict[str, nn.Parameter], came: Iterable[str], always: Chains) -> dict[str, nn.Parameter]:
    """Without those that are of one list with a parameter that was reached later."""
    reached = {pattern for name in came for pattern in patterns(name, always)}
    return {name: p for name, p in waiting.items() if p.grad is None and not _has_sibling(name, reached, always)}


def _has_sibling(name: str, reached: set[str], always: Chains) -> bool:
    """The same parameter of another entry of the same list of modules was reached: each step may choose between them."""
    return not reached.isdisjoint(patterns(name, always))


Chains = frozenset[str]
"""Paths of modules that always run all of their entries (nn.Sequential)."""


def chains(model: nn.Module) -> Chains:
    return frozenset(name for name, module in model.named_modules() if isinstance(module, nn.Sequential))


def patterns(name: str, always: Chains = frozenset()) -> Iterator[str]:
    """`blocks.*.weight` for `blocks.3.weight`, where blocks is a list whose entries may take turns."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit() and ".".join(parts[:index]) not in always:
            yield ".".join([*parts[:index], "*", *parts[index + 1 :]])


def listed(names: Iterable[str], most: int = 4) -> str:
    """`a, b, c, d and 3 more`."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _name_in_attributes(model: nn.Module, leaf: Tensor) -> str | None:
    """Where a tensor is that a module holds as a plain attribute, or in a list, tuple or dict."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or isinstance(value, (str, bytes)):
                continue
            items: Iterable[tuple[str, Any]] = [("", value)]
            if isinstance(value, (list, tuple)):
                items = ((f"[{index}]", item) for index, item in enumerate(value))
            elif isinstance(value, dict):
                items = ((f"[{key!r}]", item) for key, item in value.items())
            for key, item in items:
                place = f"{path}.{attribute}{key}".lstrip(".")
                if item is leaf:
                    return place
                if isinstance(item, nn.Module):
                    for name, parameter in item.named_parameters():
                        if parameter is leaf:
                            return f"{place}.{name}"
    return None
