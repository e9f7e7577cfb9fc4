"""What the graph of a loss says: which parameters it depends on, and whether the loss is given what it expects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._private.graph import saved, shape_of
from ..core.verdict import Finding
from ..core.view import FirstLoss
from ..tensors.nest import tensors_in

SOFTMAX, SIGMOID = ("SoftmaxBackward0", "SafeSoftmaxBackward0"), ("SigmoidBackward0",)
SHAPES = (
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
    *("TransposeBackward0", "PermuteBackward0", "TBackward0", "ToCopyBackward0", "SliceBackward0", "AliasBackward0", "CloneBackward0"),
)  # fmt: skip
"""Operations that hand the same values on."""


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
    waiting: dict[str, nn.Parameter]
    """Not reached, and maybe they need not be in each step: experts, models that are trained in turn."""


def coverage(first: FirstLoss, graph: Graph) -> Coverage:
    named = dict(first.model.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in reversed(named.items())}
    held = {id(p): p for group in first.optimizer.param_groups for p in group["params"]}
    elsewhere = {id(p) for module in first.auxiliary_modules for p in module.parameters()}
    findings = [*_unregistered(first, graph, names, held, elsewhere), *_unoptimized(graph, names, held, elsewhere)]
    waiting: dict[str, nn.Parameter] = {}
    if graph.is_complete:
        missing = {
            names.get(key, f"<parameter {index}>"): p
            for index, (key, p) in enumerate(held.items())
            if p.requires_grad and key not in graph.leaves and key not in elsewhere and key in names
        }
        reached = {pattern for key in graph.leaves if key in names for pattern in _patterns(names[key])}
        takes_turns = hasattr(first.optimizer, "optimizers")
        waiting = {name: p for name, p in missing.items() if takes_turns or _has_sibling(name, reached)}
        if gone := [name for name in missing if name not in waiting]:
            findings.append(not_reached(gone))
    return Coverage(findings, waiting)


def not_reached(names: Iterable[str]) -> Finding:
    names = tuple(names)
    return Finding("not_reached", f"the loss does not depend on {listed(names)}: the optimizer cannot train it", names)


def _unregistered(
    first: FirstLoss, graph: Graph, names: dict[int, str], held: dict[int, Any], elsewhere: set[int]
) -> Iterator[Finding]:
    known = names.keys() | held.keys() | elsewhere
    strangers = [leaf for key, leaf in graph.leaves.items() if key not in known and isinstance(leaf, nn.Parameter)]
    if strangers:
        found = tuple(_name_in_containers(first.model, leaf) for leaf in strangers)
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


def _has_sibling(name: str, patterns: set[str]) -> bool:
    """The same parameter of another entry of the same list of modules was reached: each step may choose between them."""
    return not patterns.isdisjoint(_patterns(name))


def _patterns(name: str) -> Iterator[str]:
    """`blocks.*.weight` for `blocks.3.weight`."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            yield ".".join([*parts[:index], "*", *parts[index + 1 :]])


def listed(names: Iterable[str], most: int = 4) -> str:
    """`a, b, c, d and 3 more`."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _name_in_containers(model: nn.Module, leaf: Tensor) -> str:
    """Where a parameter is that is in a plain list, tuple or dict of a module."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            items: Iterable[tuple[Any, Any]] = ()
            if attribute.startswith("_") or isinstance(value, (str, bytes)):
                continue
            if isinstance(value, (list, tuple)):
                items = enumerate(value)
            elif isinstance(value, dict):
                items = value.items()
            for key, item in items:
                place = f"{path}.{attribute}[{key!r}]".lstrip(".")
                if item is leaf:
                    return place
                if isinstance(item, nn.Module):
                    for name, parameter in item.named_parameters():
                        if parameter is leaf:
                            return f"{place}.{name}"
    return f"a parameter of shape {list(leaf.shape)}"


# ---- the loss --------------------------------------------------------------------------------------------------


def mismatches(graph: Graph) -> Iterator[Finding]:
    """Probabilities where raw outputs are expected, and the other way round."""
    for node in graph.nodes:
        kind = node.name()
        if kind == "LogSoftmaxBackward0" and (source := _source(node)) in SOFTMAX:
            yield Finding(
                "loss_mismatch", "cross-entropy is given the output of softmax, and takes the softmax of it again"
            )
        elif kind == "LogSoftmaxBackward0" and source in SIGMOID:
            yield Finding(
                "loss_mismatch", "cross-entropy is given the output of sigmoid: it can never be sure of a class"
            )
        elif kind == "LogSoftmaxBackward0" and source == "ReluBackward0" and _is_loss_of_classes(graph):
            yield Finding(
                "loss_mismatch", "cross-entropy is given the output of ReLU: where it is 0, no gradient flows"
            )
        elif kind == "BinaryCrossEntropyWithLogitsBackward0" and (source := _source(node)) in (*SIGMOID, *SOFTMAX):
            what = "sigmoid" if source in SIGMOID else "softmax"
            yield Finding(
                "loss_mismatch", f"binary cross-entropy with logits is given the output of {what}, not raw outputs"
            )
        elif kind in ("NllLossBackward0", "NllLoss2DBackward0") and (source := _source(node)) not in LOG_PROBABILITIES:
            if source in _RAW:
                yield Finding("loss_mismatch", "nll_loss is given values that are not log-probabilities")
        elif kind in SOFTMAX and _is_over_the_batch(node):
            yield Finding("loss_mismatch", "softmax is taken over the batch (dim=0), not over the classes")


def broadcast(loss: Tensor) -> Finding | None:
    """Every output was compared with every target: outputs of shape [N, 1] against targets of shape [N]."""
    node: Any = loss.grad_fn
    while node is not None and node.name() in AVERAGING:
        node = node.next_functions[0][0]
    if node is None or len(node.next_functions) < 2 or node.next_functions[1][0] is not None:
        return None  # differences between outputs are of every one with every other on purpose
    source = node.next_functions[0][0]
    if node.name() != "SubBackward0" and (source is None or source.name() != "ExpandBackward0"):
        return None
    if node.name() != "SubBackward0":
        node, source = source, source.next_functions[0][0]
    compared, outputs = shape_of(node), None if source is None else shape_of(source)
    if compared is None or outputs is None or len(compared) != 2 or outputs != (compared[0], 1) or compared[1] <= 1:
        return None
    text = f"outputs of shape {list(outputs)} were broadcast against targets of shape [{compared[1]}]: each is compared with all targets (write targets.unsqueeze(1), or outputs.squeeze(1))"
    return Finding("loss_mismatch", text)


AVERAGING = (
    "MeanBackward0",
    "MeanBackward1",
    "SumBackward0",
    "SumBackward1",
    "PowBackward0",
    "AbsBackward0",
    "DivBackward0",
    "MulBackward0",
)
LOG_PROBABILITIES = ("LogSoftmaxBackward0", "LogBackward0", "LogsumexpBackward0", "SubBackward0")
_RAW = (*SOFTMAX, *SIGMOID, "AddmmBackward0", "MmBackward0", "ReluBackward0", "ConvolutionBackward0", "TanhBackward0")


def _source(node: Any) -> str:
    """What computed the first operand of a node, without operations that only change its shape."""
    following = node.next_functions[0][0] if node.next_functions else None
    while following is not None and following.name() in SHAPES and following.next_functions:
        following = following.next_functions[0][0]
    return "" if following is None else following.name()


def _is_loss_of_classes(graph: Graph) -> bool:
    return any(node.name().startswith("NllLoss") for node in graph.nodes)


def _is_over_the_batch(node: Any) -> bool:
    result = saved(node, "result", None)
    return isinstance(result, Tensor) and result.dim() == 2 and saved(node, "dim", 1) in (0, 2**64 - 2)


class ConstantAnswer:
    """The loss of the best answer that is the same for every sample, judged by the targets of a batch.

    Only where the whole loss is a plain cross-entropy or squared error.
    """

    FEWEST = 16
    """Targets below which a batch says too little."""

    def __init__(self, loss: Tensor, window: Sequence[Any]) -> None:
        node: Any = loss.grad_fn
        self._kind = "" if node is None else node.name()
        self._first: Tensor | None = None
        self._index: int | None = None
        is_plain = self._kind in ("NllLossBackward0", "NllLoss2DBackward0", "MseLossBackward0")
        if not is_plain or saved(node, "reduction", 1) != 1 or saved(node, "weight", None) is not None:
            return
        self._first = saved(node, "target", None)
        if self._first is not None:
            places = [t.data_ptr() for t in tensors_in(window[0])]
            self._index = next((i for i, place in enumerate(places) if place == self._first.data_ptr()), None)

    @torch.no_grad()
    def loss(self, window: Sequence[Any]) -> Tensor | None:
        """0-d, on the device; None where the targets cannot be told from the rest of the batch."""
        first, self._first = self._first, None
        if self._index is not None:
            tensors = list(tensors_in(window[0]))
            if self._index >= len(
                tensors
            ):  # a batch as a replay without a loss function has it: what the model was called with
                return None
            target = tensors[self._index]
        elif first is not None and first.numel() >= 512:
            target = first
        else:
            return None
        if target.dim() == 0 or target.numel() < ConstantAnswer.FEWEST or len(target) < 2:
            return None
        if self._kind == "MseLossBackward0":
            return target.float().var(0, correction=1).mean()
        labels = target.flatten()
        counts = torch.bincount(labels[labels >= 0]).float()
        shares = counts / counts.sum()
        # A small sample looks more orderly than what it is drawn from (Miller and Madow).
        correction = ((counts > 0).sum() - 1) / (2 * counts.sum())
        entropy: Tensor = torch.special.entr(shares).sum()
        return entropy + correction
