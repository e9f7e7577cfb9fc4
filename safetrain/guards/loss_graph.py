"""The graph of a loss and the loss function: whether it gets the inputs that it expects, and the loss of a constant
prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._private.graph import saved, shape_of
from ..core.verdict import Finding
from ..tensors.nest import tensors_in
from .graph import Graph

SOFTMAX, SIGMOID = ("SoftmaxBackward0", "SafeSoftmaxBackward0"), ("SigmoidBackward0",)
SHAPES = (
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
    *("TransposeBackward0", "PermuteBackward0", "TBackward0", "ToCopyBackward0", "SliceBackward0", "AliasBackward0", "CloneBackward0"),
)  # fmt: skip
"""Operations that hand the same values on."""


def mismatches(graph: Graph) -> Iterator[Finding]:
    """Probabilities where raw outputs are expected, and the other way round."""
    for node in graph.nodes:
        if (text := _mismatch(node, graph)) is not None:
            yield Finding("loss_mismatch", text)
    if _is_negated(graph):
        yield Finding(
            "loss_mismatch", "the loss is the negative of cross-entropy or of a squared error: training makes it worse"
        )


def _mismatch(node: Any, graph: Graph) -> str | None:
    kind, source = node.name(), _source(node)
    if kind in ("LogSoftmaxBackward0", *SOFTMAX) and _is_over_one(node):
        return "softmax is taken over a single output, so it is always 1; for two classes give the model two outputs, or use a sigmoid"
    if kind in SOFTMAX and _is_over_the_batch(node):
        return "softmax is taken over the batch (dim=0), not over the classes"
    if kind == "LogSoftmaxBackward0":
        if source in SOFTMAX:
            return "cross-entropy is given the output of softmax, and takes the softmax of it again"
        if source in SIGMOID:
            return "cross-entropy is given the output of sigmoid: it can never be sure of a class"
        if source == "ReluBackward0" and _is_loss_of_classes(graph):
            return "cross-entropy is given the output of ReLU: where it is 0, no gradient flows"
    probability = "sigmoid" if source in SIGMOID else "softmax"
    if kind == "BinaryCrossEntropyWithLogitsBackward0" and source in (*SIGMOID, *SOFTMAX):
        return f"binary cross-entropy with logits is given the output of {probability}, not raw outputs"
    if kind == "BinaryCrossEntropyBackward0" and source in SIGMOID:
        before = _source(_source_node(node))
        if before in (*SIGMOID, *SOFTMAX):
            again = "sigmoid" if before in SIGMOID else "softmax"
            return f"binary cross-entropy is given the sigmoid of the output of {again}, which is never below 0.5"
    if kind in ("NllLossBackward0", "NllLoss2DBackward0") and source not in LOG_PROBABILITIES and source in _RAW:
        return "nll_loss is given values that are not log-probabilities"
    return None


def broadcast(loss: Tensor) -> Finding | None:
    """Every output was compared with every target: outputs of shape [N, 1] against targets of shape [N], or the other way round."""
    node: Any = loss.grad_fn
    while node is not None and node.name() in AVERAGING:
        node = node.next_functions[0][0]
    if node is None or len(node.next_functions) < 2:
        return None
    operands = [following for following, _ in node.next_functions[:2]]
    if all(operand is not None for operand in operands):
        return None  # differences between outputs are of every one with every other on purpose
    source = operands[0] if operands[1] is None else operands[1]
    if node.name() != "SubBackward0" and (source is None or source.name() != "ExpandBackward0"):
        return None
    if source is not None and source.name() == "ExpandBackward0":
        node, source = source, source.next_functions[0][0]
    compared, outputs = shape_of(node), None if source is None else shape_of(source)
    if compared is None or outputs is None or len(compared) != 2 or min(compared) <= 1:
        return None
    if outputs == (compared[0], 1):
        targets: tuple[int, ...] = (compared[1],)
        fix = "targets.unsqueeze(1), or outputs.squeeze(1)"
    elif outputs == (compared[1],) and compared[0] == compared[1]:
        targets, fix = (compared[0], 1), "targets.squeeze(1), or outputs.unsqueeze(1)"
    else:
        return None
    text = f"outputs of shape {list(outputs)} were broadcast against targets of shape {list(targets)}: each is compared with all targets (write {fix})"
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


LOSSES = (
    *("NllLossBackward0", "NllLoss2DBackward0", "MseLossBackward0"),
    *("BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"),
)


def _source(node: Any) -> str:
    """What computed the first operand of a node, without operations that only change its shape."""
    following = _source_node(node)
    return "" if following is None else str(following.name())


def _source_node(node: Any) -> Any:
    following = node.next_functions[0][0] if node is not None and node.next_functions else None
    while following is not None and following.name() in SHAPES and following.next_functions:
        following = following.next_functions[0][0]
    return following


def _is_negated(graph: Graph) -> bool:
    """The whole loss is minus a loss that has a lower bound."""
    node = graph.nodes[0] if graph.nodes else None
    return node is not None and node.name() == "NegBackward0" and _source(node) in LOSSES


def _is_over_one(node: Any) -> bool:
    result = saved(node, "result", None)
    if not isinstance(result, Tensor) or result.dim() != 2 or len(result) < 2:
        return False
    return result.shape[1] == 1 and saved(node, "dim", 0) in (1, 2**64 - 1)


def _is_loss_of_classes(graph: Graph) -> bool:
    return any(node.name().startswith("NllLoss") for node in graph.nodes)


def _is_over_the_batch(node: Any) -> bool:
    result = saved(node, "result", None)
    return isinstance(result, Tensor) and result.dim() == 2 and saved(node, "dim", 1) in (0, 2**64 - 2)


UNBALANCED = 0.2
"""Nats: one sample in twenty is of another class."""


class ConstantAnswer:
    """The loss of the best answer that is the same for every sample, judged by the targets of a batch.

    Only where the loss is one cross-entropy or squared error, alone or plus other terms.
    """

    FEWEST = 16
    """Targets below which a batch says too little."""

    def __init__(self, loss: Tensor, window: Sequence[Any]) -> None:
        terms = list(_terms(loss.grad_fn))
        node = terms[0] if len(terms) == 1 else None
        self.is_whole = node is not None and node is loss.grad_fn
        """False: there are other terms, whose size is not known."""
        self._kind, self._first, self._index = "", None, None
        target = None if node is None else _plain_target(node)
        if node is None or target is None:
            return
        self._kind, self._first = node.name(), target
        self._index = next((i for i, t in enumerate(tensors_in(window[0])) if _holds(t, target)), None)

    @torch.no_grad()
    def loss(self, window: Sequence[Any]) -> Tensor | None:
        """0-d, on the device; None where the targets cannot be told from the rest of the batch."""
        first, self._first = self._first, None
        if self._index is not None:
            tensors = list(tensors_in(window[0]))
            target = tensors[self._index] if self._index < len(tensors) else None
        else:
            target = first if first is not None and first.numel() >= 512 else None
        if target is None or target.dim() == 0 or target.numel() < ConstantAnswer.FEWEST or len(target) < 2:
            return None
        if self._kind == "MseLossBackward0":
            return target.float().var(0, correction=1).mean()
        if self._kind.startswith("Binary"):
            share = target.float().mean(0)
            return _worth((torch.special.entr(share) + torch.special.entr(1 - share)).mean())
        if target.is_floating_point():
            return None
        labels = target.flatten()
        counts = torch.bincount(labels[labels >= 0]).float()
        shares = counts / counts.sum()
        # A small sample looks more orderly than what it is drawn from (Miller and Madow).
        correction = ((counts > 0).sum() - 1) / (2 * counts.sum())
        entropy: Tensor = torch.special.entr(shares).sum()
        return _worth(entropy + correction)


def _worth(entropy: Tensor) -> Tensor:
    """NaN where nearly all samples are of one class: early in training, nothing is better than that class."""
    return torch.where(entropy < UNBALANCED, torch.nan, entropy)


def _terms(node: Any, depth: int = 6) -> Iterator[Any]:
    """The losses with a known constant answer that are added up."""
    if node is None or depth == 0:
        return
    if node.name() in LOSSES or _is_written_out(node):
        yield node
    elif node.name() == "AddBackward0" and saved(node, "alpha", 1) == 1:
        for following, _ in node.next_functions:
            yield from _terms(following, depth - 1)


def _is_written_out(node: Any) -> bool:
    """`-(log_softmax(x) * one_hot(y)).sum(1).mean()`"""
    return _written_out(node) is not None


def _written_out(node: Any) -> Tensor | None:
    """The weights of the log-probabilities, one row for each sample, of a cross-entropy averaged over the samples."""
    names: list[str] = []
    while node is not None and node.name() in ("NegBackward0", "MeanBackward0", "SumBackward1") and len(names) < 4:
        names.append(node.name())
        node = node.next_functions[0][0]
    if sorted(names) != ["MeanBackward0", "NegBackward0", "SumBackward1"] or node.name() != "MulBackward0":
        return None
    sources = [following for following, _ in node.next_functions]
    if (
        len(sources) != 2
        or sum(source is not None and source.name() == "LogSoftmaxBackward0" for source in sources) != 1
    ):
        return None
    target = saved(node, "other" if sources[1] is None else "self", None)
    return target if isinstance(target, Tensor) and target.dim() == 2 else None


def _plain_target(node: Any) -> Tensor | None:
    """What a loss compares with, if every target counts the same."""
    if node.name() in LOSSES:
        if saved(node, "reduction", 1) != 1 or saved(node, "weight", None) is not None:
            return None
        found = None if saved(node, "pos_weight", None) is not None else saved(node, "target", None)
        return found if isinstance(found, Tensor) else None
    target = _written_out(node)
    if target is None or not bool(((target == 0) | (target == 1)).all() & (target.sum(1) == 1).all()):
        return None
    return target.argmax(1)


def _holds(field: Tensor, target: Tensor) -> bool:
    """Whether the field of the batch is the target, maybe in another shape or type."""
    if field.data_ptr() == target.data_ptr():
        return True
    if field.numel() != target.numel() or field.dim() == 0 or target.dim() == 0:
        return False
    if target.is_floating_point() and len(field) != len(target):
        return False
    return bool((field.detach().reshape(-1).to(target.dtype) == target.reshape(-1)).all())
