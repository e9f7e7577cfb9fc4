"""Records every op of a step, forward and backward: whether its values are finite, and who wrote which memory.

The tracer judges nothing. `provenance.py` walks its record backwards from a bad loss or gradient to where it began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._private.autograd import (
    PLAIN,
    TorchDispatchMode,
    current_node,
    has_own_dispatch,
    is_op,
    modes_off,
    next_node_number,
    node_number,
)
from ..tensors.nest import tensors_in
from .api_names import ApiNames
from .facts import Facts, examine, zero_where_bad
from .frames import Frame, inside_engine, is_recomputation, is_user, stack
from .limit import spent
from .schemas import LITERALS, SELECTING, UNINITIALISED, Schema, base_name, literal_numbers, named_operands, schema_of
from .storages import EVERYTHING, Region, Storages
from .values import FINITE, INF, is_mask, kind_of, kind_of_number

MAX_FACTS = 400
"""Steps full of intended infinities have many candidates; operand statistics are taken of this many."""
SOFTMAX_BACKWARD = ("_log_softmax_backward_data", "_softmax_backward_data")
LARGEST_COPY = 50_000_000

Intervention = Callable[[Any], Any]


class Call(NamedTuple):
    """What an op was called with and gave, for an observer."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    operands: list[tuple[str, Tensor, Tensor]]
    """Name, the values that were read, and the tensor itself, which an in-place op has overwritten since."""
    outputs: list[Tensor]


Interventions: TypeAlias = "Mapping[int, Intervention] | Callable[[Event], Intervention | None]"
"""By the number of the event, or for each event that begins."""
Observer = Callable[["Tracer", "Event", Any, Call], None]


class Access(NamedTuple):
    name: str
    region: Region
    kind: int
    is_dense: bool = False
    """Every element of the region was written."""


@dataclass(eq=False)
class Event:
    """One op that ran."""

    index: int
    number: int
    """Stable over replays: ops that only accumulate gradients are not counted, they depend on reference counts."""
    op: str
    full_name: str
    phase: str
    api: str | None = None
    """The torch function that was called from Python."""
    node: str | None = None
    node_number: int | None = None
    frames: list[Frame] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    literal: int = FINITE
    """Kind of the numbers typed as arguments: `masked_fill(mask, -inf)`, `x * nan`."""
    uninitialised: bool = False
    masks: frozenset[str] = frozenset()
    """For products in backward: the operands that hold zeros."""
    zero_where_bad: frozenset[str] = frozenset()
    """For products and quotients in backward: the operands that are 0 wherever the result is bad."""
    has_zero_rows: bool = True
    """For the derivative of a softmax: some rows of it are 0 throughout, as those of masked samples are."""
    facts: Facts | None = None

    @property
    def kind_in(self) -> int:
        return max((access.kind for access in self.reads), default=FINITE)

    @property
    def kind_out(self) -> int:
        return max((access.kind for access in self.writes), default=FINITE)

    @property
    def is_custom_backward(self) -> bool:
        """Did user code inside the autograd engine call this op: a custom backward or a gradient hook?"""
        inner = inside_engine(self.frames)
        return any(is_user(frame.code) for frame in inner) and not is_recomputation(inner)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use it with `with tracer.recording():`. `until` is the function whose frames and outer ones are left out of stacks."""

    supports_higher_order_operators = True

    def __init__(
        self,
        until: CodeType | None = None,
        interventions: Interventions | None = None,
        before_write: Callable[[Tensor], None] | None = None,
        observer: Observer | None = None,
        max_events: int | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.storages = Storages()
        self.api = ApiNames()
        self._writers: dict[int, list[tuple[Event, Access]]] = {}
        self._known_kinds: dict[tuple[Any, ...], int] = {}
        self._generation: dict[int, int] = {}
        self._event_of_node: dict[int, Event] = {}
        self._last_node = next_node_number()
        self._until = until
        self._interventions = interventions or {}
        self._before_write = before_write
        self._observer = observer
        self._max_events = max_events
        self._num_events = self._num_stable = self._num_facts = 0
        self.unwritten: dict[int, bool] = {}
        """Storages with bad values that no traced op wrote, and whether they look like a mask."""

    @contextlib.contextmanager
    def recording(self) -> Any:
        with torch.autograd.set_multithreading_enabled(False), self.api, self:
            yield self

    # ---- the record ------------------------------------------------------------------------------------------------

    def writer(self, region: Region, before: int, kind: int = INF) -> Event | None:
        """The latest op before the event `before` that wrote a value at least this bad into the region."""
        latest = None
        for event, access in self._writers.get(region.storage, ()):
            if event.index >= before:
                break
            if (access.kind >= kind or event.uninitialised) and access.region.overlaps(region):
                latest = event
        return latest

    def writers(self, region: Region, before: int, is_empty: bool = False) -> Iterator[Event]:
        """Every op before the event `before` that wrote into the region, latest first, down to one that wrote all of it.

        An empty region overlaps nothing: of it, whatever wrote its storage.
        """
        for event, access in reversed(self._writers.get(region.storage, ())):
            if event.index < before and (is_empty or access.region.overlaps(region)):
                yield event
                covers = access.region.start <= region.start and access.region.stop >= region.stop
                if covers and access.is_dense and not event.uninitialised:
                    return

    def num_writes(self, storage: int) -> int:
        """So far."""
        return self._generation.get(storage, 0)

    def forward_of(self, event: Event) -> Event | None:
        """The forward op whose derivative was running; through double backward down to the op that was typed."""
        found = self._forward_of(event)
        for _ in range(10):
            if found is None or found.phase == "forward":
                break
            if any(is_user(frame.code) for frame in inside_engine(found.frames)):
                break  # recomputation or custom backward: has a line of its own
            further = self._forward_of(found)
            if further is None:
                break
            found = further
        return found

    def _forward_of(self, event: Event) -> Event | None:
        if event.node_number is None:
            return None
        # The node of an in-place op on a view is made after the op was dispatched.
        late = event.node is not None and event.node.endswith("CopySlices")
        return self._event_of_node.get(event.node_number - late)

    # ---- recording -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_op(func):
            return self._opaque(func, args, kwargs)
        if any(t not in PLAIN and has_own_dispatch(t) for t in types):
            return NotImplemented  # a wrapper subclass unwraps first; then its inner ops come here
        schema = schema_of(func)
        node = current_node()
        if schema.is_view and next_node_number() == self._last_node:
            return func(*args, **kwargs)
        event = self._begin(schema.name, str(func), node, always_frames=node is None)
        if schema.is_view:
            self.events.append(event)
            return func(*args, **kwargs)
        operands = named_operands(schema.arguments, args, kwargs)
        written = self._read(event, schema, operands, args, kwargs)
        if node is not None and schema.name == "mul":
            event.masks = frozenset(name for name, t in operands if t.layout is torch.strided and bool((t == 0).any()))
        before = self._copies(schema, operands)
        result = func(*args, **kwargs)
        if self._interventions and (intervention := self._intervention(event)) is not None:
            result = intervention(result)
        outputs = self._outputs(schema, result, operands, args)
        for tensor in outputs:
            self._wrote(event, tensor, written)
        if schema.name in SOFTMAX_BACKWARD and outputs:
            event.has_zero_rows = bool((outputs[0] == 0).all(-1).any())
        if event.kind_out > FINITE and node is not None:
            event.frames = stack(self._until)
            if schema.name in ("mul", "div"):
                event.zero_where_bad = zero_where_bad(operands, outputs[0])
        typed = event.literal == INF and event.kind_in == FINITE
        if event.kind_out > event.kind_in and not event.uninitialised and not typed and self._num_facts < MAX_FACTS:
            self._num_facts += 1
            values = {name: before.get(id(tensor), tensor) for name, tensor in operands}
            with contextlib.suppress(Exception):  # statistics are a help, never a reason to fail
                event.facts = examine(func, args, kwargs, values, outputs)
        if self._observer is not None:
            read = [(name, before.get(id(tensor), tensor), tensor) for name, tensor in operands]
            with contextlib.suppress(
                Exception
            ):  # an odd tensor that cannot be kept is only missing from the explanation
                self._observer(self, event, func, Call(args, kwargs, read, outputs))
        self.events.append(event)
        return result

    def _intervention(self, event: Event) -> Intervention | None:
        if callable(self._interventions):
            return self._interventions(event)
        return self._interventions.get(event.number)

    def _begin(self, op: str, full_name: str, node: Any, always_frames: bool) -> Event:
        if self._max_events is not None:
            spent(self._max_events - self._num_events)
        event = Event(self._num_events, -1, op, full_name, "forward" if node is None else "backward")
        self._num_events += 1
        event.api = self.api.current
        if node is not None:
            event.node, event.node_number = node.name(), node_number(node)
        if node is None or event.node_number is not None:
            event.number = self._num_stable
            self._num_stable += 1
        newest = next_node_number()
        # Autograd makes the node before it dispatches: these numbers belong to this op.
        for number in range(self._last_node, newest):
            self._event_of_node[number] = event
        if always_frames or newest > self._last_node:
            event.frames = stack(self._until, skip=2)
        self._last_node = newest
        return event

    def _read(
        self, event: Event, schema: Schema, operands: list[tuple[str, Tensor]], args: Any, kwargs: dict[str, Any]
    ) -> set[int]:
        """Record what the op reads; returns the storages that its schema says it writes."""
        written = set()
        for name, tensor in operands:
            region = self.storages.region(tensor)
            writes = base_name(name) in schema.written
            if writes:
                written.add(region.storage)
                if self._before_write is not None:
                    self._before_write(tensor)
                if schema.overwrites or name == "out":
                    continue
            kind = self._kind(tensor, region)
            if kind and region.storage not in self._writers and region.storage not in self.unwritten:
                self.unwritten[region.storage] = is_mask(tensor)
            if kind and schema.name in SELECTING:
                kind = _kind_selected(schema.name, args, tensor, kind)
            event.reads.append(Access(name, region, kind))
        event.literal = max((kind_of_number(value) for value in literal_numbers(args, kwargs)), default=FINITE)
        event.uninitialised = schema.name in UNINITIALISED
        if schema.name in LITERALS:
            event.literal, event.reads = event.kind_in, []
            written.update(self.storages.region(tensor).storage for _, tensor in operands)
        return written

    def _copies(self, schema: Schema, operands: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """What an in-place op is about to overwrite, for the statistics."""
        if not schema.written or schema.overwrites:
            return {}
        targets = [t for name, t in operands if base_name(name) in schema.written and t.layout is torch.strided]
        if sum(t.numel() for t in targets) > LARGEST_COPY:
            return {}
        return {id(t): t.clone() for t in targets}

    def _outputs(
        self, schema: Schema, result: Any, operands: list[tuple[str, Tensor]], args: tuple[Any, ...]
    ) -> list[Tensor]:
        outputs = list(tensors_in(result))
        for name, tensor in operands:
            if base_name(name) in schema.written and not any(tensor is output for output in outputs):
                outputs.append(tensor)
        outputs += [args[i] for i in schema.hidden_writes if i < len(args) and isinstance(args[i], Tensor)]
        return outputs

    def _wrote(self, event: Event, tensor: Tensor, declared: set[int]) -> None:
        region = self.storages.region(tensor)
        read = any(access.region.storage == region.storage for access in event.reads)
        if read and region.storage not in declared and not event.op.endswith("batch_norm"):
            return  # an alias that the schema does not declare
        self._generation[region.storage] = self._generation.get(region.storage, 0) + 1
        kind = self._kind(tensor, region)
        if event.op == "nan_to_num" and event.kind_in == INF and kind == FINITE:
            # Inf replaced by the largest float is as good as Inf: the next sum overflows.
            kind = self._known_kinds[self._key(tensor, region)] = INF
        access = Access("output", region, kind, tensor.layout is torch.strided and tensor.is_contiguous())
        event.writes.append(access)
        self._writers.setdefault(region.storage, []).append((event, access))

    def _kind(self, tensor: Tensor, region: Region) -> int:
        """Scans a tensor once per write to its storage."""
        if tensor.layout is not torch.strided or type(tensor) not in PLAIN:
            return kind_of(tensor)
        key = self._key(tensor, region)
        kind = self._known_kinds.get(key)
        if kind is None:
            kind = self._known_kinds[key] = kind_of(tensor)
        return kind

    def _key(self, tensor: Tensor, region: Region) -> tuple[Any, ...]:
        return region, self._generation.get(region.storage, 0), tensor.shape, tensor.stride()

    def _opaque(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Higher-order ops (flex attention, cond): one event, whatever happens inside."""
        event = self._begin(str(func), str(func), current_node(), always_frames=True)
        for tensor in tensors_in((args, kwargs)):
            region = self.storages.region(tensor)
            event.reads.append(Access("input", region, self._kind(tensor, region)))
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._wrote(event, tensor, set())
        self.events.append(event)
        return result

    def gradient_of_python_node(self, node: Any, inputs: Iterable[Any], outputs: Iterable[Any]) -> None:
        """A custom backward may compute outside of torch (NumPy): then its result has no writer, and this makes one."""
        with modes_off():
            event = Event(self._num_events, -1, node.name(), node.name(), "backward", node=node.name())
            event.node_number = node_number(node)
            for tensor in outputs:
                if isinstance(tensor, Tensor) and (kind := kind_of(tensor)):
                    region = self.storages.region(tensor)
                    if self.writer(region, EVERYTHING) is None:
                        access = Access("gradient", region, kind)
                        event.writes.append(access)
                        self._writers.setdefault(region.storage, []).append((event, access))
            if event.writes:
                self._num_events += 1
                event.reads = [
                    Access("grad_output", self.storages.region(t), kind_of(t)) for t in inputs if isinstance(t, Tensor)
                ]
                self.events.append(event)


def _kind_selected(op: str, args: tuple[Any, ...], tensor: Tensor, kind: int) -> int:
    """`where` and `masked_fill` let only a part of an operand through: the kind of that part."""
    if len(args) < 2:
        return kind
    if op == "where" and len(args) == 3:
        chosen = args[0] if tensor is args[1] else ~args[0] if tensor is args[2] else None
    else:
        chosen = ~args[1] if tensor is args[0] else None
    if chosen is None:
        return kind
    values, chosen = torch.broadcast_tensors(tensor, chosen)  # type: ignore[no-untyped-call]
    return kind_of(values[chosen])
