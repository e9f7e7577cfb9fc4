"""Walks the tracer's record backwards from a bad value to where it began.

    NaN wanted   follow NaN inputs; else Inf inputs: the op converted them (inf - inf, 0 * inf), so blame where the Inf was
                 computed, or the conversion itself if every Inf was intended; else this op is the origin
    Inf wanted   follow Inf inputs; else this op is the origin, intended if the Inf was typed (masked_fill(mask, -inf))
    no writer    a tensor that was there before the step

A mask of -inf drops out by itself: softmax turns it into zeros, so the walk never enters it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .frames import inside_engine
from .replay import Leaf
from .storages import EVERYTHING, Region
from .tracer import Event, Tracer
from .values import FINITE, INF, NAN


@dataclass
class Blame:
    """Where a bad value began."""

    event: Event | None
    """The op that made it; None when it was there before the step."""
    leaf: Leaf | None = None
    conversion: Event | None = None
    """The op that made NaN out of the Inf."""
    intended: bool = False
    path: list[Event] = field(default_factory=list)
    """From the op that wrote the sink to the op that read or made the first bad value."""

    @property
    def order(self) -> int:
        return -1 if self.event is None else self.event.index


class _Link(NamedTuple):
    event: Event
    after: _Link | None


class _Wanted(NamedTuple):
    region: Region
    before: int
    kind: int
    link: _Link | None


class Provenance:
    def __init__(self, tracer: Tracer, leaves: dict[int, Leaf]) -> None:
        self._tracer = tracer
        self._leaves = leaves

    def origins(self, region: Region, kind: int) -> list[Blame]:
        """Everything that a bad value in this region comes from, earliest first."""
        return sorted(self._walk([_Wanted(region, EVERYTHING, kind, None)], set()), key=lambda blame: blame.order)

    def _walk(self, todo: list[_Wanted], seen: set[tuple[int, int]]) -> list[Blame]:
        found: list[Blame] = []
        while todo:
            wanted = todo.pop()
            event = self._tracer.writer(wanted.region, wanted.before, wanted.kind)
            event = event or self._tracer.writer(wanted.region, wanted.before, INF)
            if event is None:
                if (-wanted.region.storage, 0) not in seen:
                    seen.add((-wanted.region.storage, 0))
                    found.append(self._leaf(wanted))
                continue
            if (event.index, wanted.kind) in seen:
                continue
            seen.add((event.index, wanted.kind))
            link = _Link(event, wanted.link)
            if event.uninitialised:
                found.append(Blame(event, path=_path(link)))
            elif wanted.kind == NAN and event.kind_out == NAN:
                self._explain_nan(event, link, todo, found)
            else:
                self._explain_inf(event, link, todo, found, seen)
        return found

    def _explain_nan(self, event: Event, link: _Link, todo: list[_Wanted], found: list[Blame]) -> None:
        if event.kind_in == NAN:
            todo += _inputs(event, NAN, link)
        elif event.kind_in == INF:
            sources = self._walk(_inputs(event, INF, link), set())
            for source in sources:
                source.conversion = source.conversion or event
            computed = [source for source in sources if not source.intended]
            found += computed or [Blame(event, conversion=event, path=_path(link))]
        else:
            found.append(Blame(event, path=_path(link)))

    def _explain_inf(
        self, event: Event, link: _Link, todo: list[_Wanted], found: list[Blame], seen: set[tuple[int, int]]
    ) -> None:
        typed = event.literal == INF and event.kind_out == INF and (event.op in _FILLING or not event.reads)
        sources = _inputs(event, INF, link) or _inputs(event, NAN, link)
        if not sources:
            found.append(Blame(event, intended=typed, path=_path(link)))
        elif typed:
            inner = self._walk(sources, seen)
            if all(blame.intended for blame in inner):
                found.append(Blame(event, intended=True, path=_path(link)))
            else:
                found += [blame for blame in inner if not blame.intended]
        else:
            todo += sources

    def _leaf(self, wanted: _Wanted) -> Blame:
        leaf = self._leaves.get(wanted.region.storage)
        if leaf is None:
            is_mask = self._tracer.unwritten.get(wanted.region.storage, False)
            leaf = Leaf("outside", "a tensor made outside of the step", is_mask)
        reader = wanted.link.event.op if wanted.link is not None else ""
        is_meant = leaf.is_mask or (leaf.may_forbid and reader in _PICKING)
        return Blame(None, leaf, intended=is_meant and wanted.kind == INF, path=_path(wanted.link))

    # ---- questions about finite values -----------------------------------------------------------------------------

    def is_masked_upstream(self, event: Event, argument: str) -> bool:
        """Is this operand of a backward op a gradient that a masking op (where, indexing, clamp) has zeroed?"""
        regions = [(access.region, event.index) for access in event.reads if access.name == argument]
        begin = self._begin_of_backward(event)
        seen = set()
        for _ in range(8):
            following = []
            for region, before in regions:
                writer = self._tracer.writer(region, before, FINITE)
                if writer is None or writer.phase != "backward" or writer.index < begin or writer.index in seen:
                    continue
                seen.add(writer.index)
                if writer.node_number != event.node_number:
                    if self._introduces_zeros(writer):
                        return True
                    if self._has_zero_derivative(writer) or not writer.has_zero_rows:
                        continue  # a zero that this op has made
                following += [(access.region, writer.index) for access in writer.reads]
            regions = following
        return False

    def _begin_of_backward(self, event: Event) -> int:
        """Index of the first op of the backward pass that it belongs to. What a pass before has made, for a gradient penalty
        say, are ordinary values in this one."""
        for earlier in reversed(self._tracer.events):
            if earlier.index < event.index and earlier.phase == "forward" and not inside_engine(earlier.frames):
                return earlier.index + 1
        return 0

    def _introduces_zeros(self, event: Event) -> bool:
        node = (event.node or "").removeprefix("torch::autograd::")
        if node.startswith(_MASKING_NODES):
            return True
        if not node.startswith("MulBackward"):
            return False
        # A product with a mask: the operand that is no gradient holds zeros.
        for access in event.reads:
            writer = self._tracer.writer(access.region, event.index, FINITE)
            if access.name in event.masks and (writer is None or writer.phase == "forward"):
                return True
        return False

    def _has_zero_derivative(self, event: Event) -> bool:
        """A smooth function at a point where its own derivative is 0 (a cosine at 0): what comes out is 0, and nothing is masked."""
        if event.op != "mul" or event.node is None or event.node.startswith("Mul"):
            return False
        factors = [access for access in event.reads if access.name in event.masks]
        writers = [self._tracer.writer(access.region, event.index, FINITE) for access in factors]
        return any(made is not None and made.node_number == event.node_number for made in writers)

    def behind(self, sink: Region) -> tuple[set[int], set[int]]:
        """What the sink depends on, finite or not: the storages that were written before the step, and the indices of the ops."""
        storages: set[int] = set()
        seen: set[int] = set()
        todo = [(sink, EVERYTHING)]
        while todo:
            region, before = todo.pop()
            writer = self._tracer.writer(region, before, FINITE)
            if writer is None:
                storages.add(region.storage)
            elif writer.index not in seen:
                seen.add(writer.index)
                todo += [(access.region, writer.index) for access in writer.reads]
        return storages, seen


# Prefixes of autograd nodes whose backward sets parts of a gradient to zero.
_MASKING_NODES = (
    "Where", "MaskedFill", "MaskedScatter", "MaskedSelect", "Index", "Gather", "Select", "Slice", "CopySlices",
    "Clamp", "Threshold", "Relu", "Maximum", "Minimum", "MaxBackward", "MinBackward", "Amax", "Amin", "Topk",
    "Sort", "NllLoss", "Triu", "Tril", "NanToNum", "Nansum",
)  # fmt: skip
# Ops that use -inf in a parameter as "forbidden"; a product makes NaN of it.
_PICKING = {
    "add", "add_", "sub", "gather", "index", "index_select", "select", "copy_", "clone", "_to_copy", "maximum", "logsumexp",
    "logaddexp", "max", "amax", "_softmax", "_log_softmax", "where", "masked_fill", "cat", "stack", "embedding",
}  # fmt: skip
# Ops that put a typed Inf somewhere.
_FILLING = {
    "masked_fill", "masked_fill_", "full", "full_like", "new_full", "fill", "fill_", "scalar_tensor", "where",
    "constant_pad_nd", "lift_fresh", "lift_fresh_copy", "index_fill", "index_fill_", "index_put", "index_put_",
    "masked_scatter", "clamp", "clamp_min", "clamp_max", "nan_to_num",
}  # fmt: skip


def _inputs(event: Event, kind: int, link: _Link) -> list[_Wanted]:
    return [_Wanted(access.region, event.index, kind, link) for access in event.reads if access.kind == kind]


def _path(link: _Link | None) -> list[Event]:
    events = []
    while link is not None:
        events.append(link.event)
        link = link.after
    return events[::-1]


def primary(blames: Iterable[Blame]) -> Blame | None:
    """The earliest that was not intended; else the earliest."""
    ordered = sorted(blames, key=lambda blame: (blame.intended, blame.order))
    return ordered[0] if ordered else None
