"""Which operand of an operation explains its value: the zero behind a zero, the largest one behind a huge value, the
compared value behind a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from .dependence import MOVING, REDUCTIONS, dependencies
from .recording import Record, Recording
from .spots import Spot, everything, values_text

TINY = 1e-30
"""Below this a number is a zero by underflow."""
LARGE = 1e4
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "bitwise_not"}
DENSE = {
    "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "convolution", "_convolution", "linear", "mkldnn_convolution",
    "convolution_backward",
}  # fmt: skip
"""Every element of the result is a sum over a row: what makes one of them large is spread over all of it."""
WEIGHTS = ("parameter", "buffer", "attribute", "outside")
CUTS = {"relu", "threshold", "clamp", "clamp_min", "clamp_max", "hardtanh", "hardshrink", "softshrink", "leaky_relu"}
COPIES = {"clone", "_to_copy", "copy_", "contiguous", "detach"}


@dataclass(frozen=True)
class End:
    """The walk stops here."""

    kind: str
    what: str
    spot: Spot | None = None


class Chooser:
    """`prefers_data`: samples are to blame, or the shape of the data is; then a product is followed to its computed factor."""

    def __init__(self, recording: Recording, prefers_data: bool, cause: str) -> None:
        self._recording = recording
        self._prefers_data = prefers_data
        self._cause = cause
        self._keeps_all = False
        self.gains: dict[str, tuple[float, int]] = {}
        """Parameters that huge values were multiplied by: the decimal logarithm of the amplification in all, and how often."""

    def choose(self, found: Record, depends: list[Spot], made: Spot) -> Spot | End:
        event = found.event
        op = event.op if event.op in COPIES else event.op.rstrip("_")
        if not depends:
            steering = [(name, kept) for name, kept in found.operands.items() if kept.value.dtype == torch.bool]
            if not steering:
                return End("unknown", f"{event.api or event.op} does not say what it depends on")
            return Spot(steering[0][0], steering[0][1], everything(steering[0][1]))
        if op in MOVING:
            return self._moved(found, depends)
        if any(spot.values.is_floating_point() for spot in depends):  # an index or a length has no part in the value
            depends = [spot for spot in depends if not _is_integer(spot)]
        tensors = [spot for spot in depends if spot.kept.shape] or depends
        is_zero = all_zero(made)
        if op in COMPARISONS or made.values.dtype == torch.bool:
            return max(tensors, key=self.from_data)
        if op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") and is_zero and len(tensors) > 1:
            return replace(max(tensors, key=self.from_data), note=", which the other operand equals")
        if op in ("maximum", "minimum", "where", "fmax", "fmin") and is_zero:
            return max([spot for spot in tensors if all_zero(spot)] or tensors, key=self.from_data)
        if op in ("add", "sub", "rsub", "addcmul", "lerp") and len(tensors) > 1:
            return self._of_sum(found, tensors, is_zero)
        if op in ("mul", "div") or op in DENSE:
            return self._of_product(found, tensors, made, is_zero, op)
        if is_zero and op in CUTS and not all_zero(tensors[0]):
            self._prefers_data = self._keeps_all = (
                True  # ordinary values on the wrong side: there is no parameter that is to blame
            )
        if is_zero and op in REDUCTIONS and op not in ("amax", "amin", "max", "min"):
            return _reduced_to_zero(tensors[0], op)
        is_count = tensors[0].values.dtype == torch.bool
        if op in REDUCTIONS and len(tensors[0].positions) > 1 and not (is_zero or self._keeps_all or is_count):
            return extreme(tensors[0])
        return tensors[0] if len(tensors) == 1 else max(tensors, key=magnitude)

    def _of_sum(self, found: Record, tensors: list[Spot], is_zero: bool) -> Spot | End:
        if not is_zero:
            return max(tensors, key=magnitude)
        zeros = [spot for spot in tensors if all_zero(spot)]
        if len(zeros) == len(tensors):
            return max(zeros, key=self.from_data)
        both = [values_text(spot.values).lstrip("=: ") for spot in tensors[:2]]
        what = f"{both[0]} and {both[1]} cancel" if both[0] != both[1] else f"both operands are {both[0]}"
        sources = [self._source(spot, found.event.index) for spot in tensors[:2]]
        if sources[0] is not None and sources[0] == sources[1]:
            return End("cancellation", f"{what}, the same value twice: always 0 whatever the input", tensors[0])
        reduced = [
            spot for spot, source in zip(tensors[:2], sources, strict=True) if self._is_mean_of_other(spot, tensors)
        ]
        if reduced or (self._prefers_data and both[0] == both[1]):
            chosen = next((spot for spot in tensors if spot not in reduced), tensors[0])
            return replace(chosen, note=", which the other operand equals")
        return End("cancellation", what, tensors[0])

    def _is_mean_of_other(self, spot: Spot, tensors: list[Spot]) -> bool:
        """x - x.mean() is 0 where all of x is the same: the value of x explains it, not the subtraction."""
        _, found = self._recording.writer(spot.kept, spot.kept.addresses(spot.positions), 1 << 60)
        if found is None or found.event.op not in ("mean", "amax", "amin", "max", "min", "median"):
            return False
        storages = {other.kept.storage for other in tensors if other is not spot}
        return any(kept.storage in storages for kept in found.operands.values())

    def _of_product(self, found: Record, tensors: list[Spot], made: Spot, is_zero: bool, op: str) -> Spot | End:
        zeros = [spot for spot in tensors if all_zero(spot)]
        if op == "div":
            numerator, divisor = tensors[0], tensors[-1]
            if is_zero or len(tensors) == 1:
                return numerator
            return divisor if bool((divisor.values.abs() < 1e-6).any()) else numerator
        if is_zero and zeros:
            return max(zeros, key=self.from_data)
        if op == "mul":
            if is_zero:
                return min(tensors, key=magnitude)
            return max(tensors, key=lambda spot: (magnitude(spot) > 1, magnitude(spot), self.from_data(spot)))
        weights = [spot for spot in tensors if self.leaf_kind(spot, found.event.index) in WEIGHTS]
        computed = [spot for spot in tensors if spot not in weights]
        if is_zero and not any(is_constant_in_itself(spot) for spot in computed):
            return End("cancellation", f"{len(tensors[0].positions)} products of both signs add up to 0")
        if self._cause == "degenerate_decomposition" and len(computed) > 1:
            return min(computed, key=_rank)
        size = max((magnitude(spot) for spot in computed), default=0.0)
        if computed and size and magnitude(made) > LARGE:
            self._note_gain(found, weights, magnitude(made) / size)
        if computed and (self._prefers_data or is_zero or size > LARGE or not weights):
            if self._prefers_data:
                computed = [s for s in computed if self._recording.is_made_of_data(s.kept.storage)] or computed
            return max(computed, key=magnitude)
        return max(weights, key=magnitude) if weights else tensors[0]

    def _note_gain(self, found: Record, weights: list[Spot], gain: float) -> None:
        if not weights or not math.isfinite(gain) or gain <= 1:
            return
        leaf = self.leaf_of(max(weights, key=magnitude), found.event.index)
        if leaf is not None:
            before, count = self.gains.get(leaf, (0.0, 0))
            self.gains[leaf] = before + math.log10(gain), count + 1

    def _moved(self, found: Record, depends: list[Spot]) -> Spot:
        steering = [spot for spot in depends if spot.name.startswith(("ind", "mask", "condition"))]
        sources = [spot for spot in depends if spot not in steering]
        if not sources:  # a number that was filled in where a mask is True
            return steering[0] if steering else depends[0]
        source = max(sources, key=lambda spot: len(spot.positions))
        is_table = found.event.op == "embedding" and self.leaf_kind(source, found.event.index) == "parameter"
        if steering and is_table and (self._prefers_data or all_zero(source)):
            return steering[0]
        if steering and self._prefers_data and self._is_lookup(steering[0], source):
            return steering[0]
        if steering and found.event.op == "where" and self._is_typed(source):
            return steering[0]
        return source

    def _is_lookup(self, index: Spot, source: Spot) -> bool:
        """The index is data and the table is not: it is the index that is to blame."""
        if not _is_integer(index) or self.leaf_kind(index) != "batch":
            return False
        return not self._recording.is_made_of_data(source.kept.storage)

    # ---- what a value is made of -----------------------------------------------------------------------------------

    def leaf_kind(self, spot: Spot, before: int = 1 << 60) -> str | None:
        """Of a tensor that was there before the step, also behind casts."""
        storage = spot.kept.storage
        if storage not in self._recording.leaves:
            source = self._source(Spot(spot.name, spot.kept, spot.positions[:1]), before)
            storage = storage if source is None else source[0]
        return self._recording.leaves[storage][0].kind if storage in self._recording.leaves else None

    def leaf_of(self, spot: Spot, before: int) -> str | None:
        source = self._source(Spot(spot.name, spot.kept, spot.positions[:1]), before)
        known = None if source is None else self._recording.leaves.get(source[0])
        return None if known is None else known[0].name

    def from_data(self, spot: Spot) -> tuple[int, int]:
        rank = -1 if self._is_typed(spot) else {"batch": 3, None: 2, "parameter": 0}.get(self.leaf_kind(spot), 1)
        return rank, len(spot.positions)

    def _is_typed(self, spot: Spot) -> bool:
        _, found = self._recording.writer(spot.kept, spot.kept.addresses(spot.positions), 1 << 60)
        return found is not None and (
            not found.operands or found.event.op.startswith(("lift", "scalar", "zeros", "ones", "full"))
        )

    def _source(self, spot: Spot, before: int) -> tuple[int, int] | None:
        """The memory where a value was first written, behind copies."""
        for _ in range(20):
            addresses = spot.kept.addresses(spot.positions)
            if not len(addresses):
                return None
            event, found = self._recording.writer(spot.kept, addresses, before)
            if event is None or found is None or event.op not in COPIES:
                return spot.kept.storage, int(addresses[0])
            output = next((o for o in found.outputs if o.storage == spot.kept.storage), None)
            depends = [] if output is None else dependencies(found, output, output.positions_at(addresses))
            if len(depends) != 1:
                return None
            spot, before = depends[0], event.index
        return None


def _reduced_to_zero(spot: Spot, op: str) -> Spot | End:
    if all_zero(spot) or op.startswith(("var", "std")):
        return spot
    if op in ("any", "all", "count_nonzero", "prod"):
        return extreme(spot)
    return End("cancellation", f"{len(spot.positions)} values of both signs add up to 0", spot)


def _is_integer(spot: Spot) -> bool:
    return not spot.values.is_floating_point() and not spot.values.is_complex() and spot.values.dtype != torch.bool


def all_zero(spot: Spot) -> bool:
    values = spot.values
    if not values.numel():
        return False
    if values.dtype == torch.bool or not (values.is_floating_point() or values.is_complex()):
        return not bool(values.any())
    return bool((values.abs() < TINY).all())


def is_constant_in_itself(spot: Spot) -> bool:
    """All values the same: a flat image, a padded row."""
    values = spot.values
    return bool((values == values[0]).all())


def magnitude(spot: Spot) -> float:
    values = spot.values
    if not values.numel():
        return 0.0
    largest = float(values.abs().max()) if values.is_complex() else float(values.double().abs().max())
    return math.inf if largest != largest else largest


def extreme(spot: Spot) -> Spot:
    """The element of largest magnitude."""
    values = spot.values
    sizes = values.abs() if values.is_complex() else values.double().abs()
    return Spot(spot.name, spot.kept, spot.positions[int(sizes.argmax()) :][:1])


def _rank(spot: Spot) -> int:
    matrix = spot.kept.value
    if matrix.dim() < 2 or max(matrix.shape[-2:]) > 512:
        return 1 << 20
    return int(torch.linalg.matrix_rank(matrix.double()).min())
