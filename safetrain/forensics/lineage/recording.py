"""One more replay, in which the operations behind the bad one keep what they read and wrote."""

from __future__ import annotations

import heapq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..finding import Finding
from ..library_call import LibraryCall, library_call
from ..replay import Leaf, Replayer, Trace
from ..storages import EVERYTHING, Region
from ..tracer import Call, Event, Tracer
from .spots import Kept

MAX_KEPT = 64_000_000
"""Values that are kept at once, 256 MB in single precision; of a larger model, what lies nearest to the bad operation."""
MAX_EVENTS = 5000


@dataclass
class Record:
    """An operation with the values it read and wrote."""

    event: Event
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Arguments, with each tensor as it was."""
    operands: dict[str, Kept]
    outputs: list[Kept]


@dataclass
class Recording:
    trace: Trace
    records: dict[int, Record] = field(default_factory=dict)
    """By the index of the event."""
    leaves: dict[int, tuple[Leaf, Kept]] = field(default_factory=dict)
    """By storage: what was there before the step."""
    parameters: set[int] = field(default_factory=set)
    """Storages of leaves that are parameters, of the model or of the loss."""
    call: LibraryCall | None = None
    """From the user's own line, if the operation is a library's."""

    def record_of(self, number: int) -> Record | None:
        return next((record for record in self.records.values() if record.event.number == number), None)

    def is_made_of_data(self, storage: int) -> bool:
        """Does the batch take part in what this memory holds?"""
        makers: dict[int, list[Record]] = {}
        for made in self.records.values():
            for output in made.outputs:
                makers.setdefault(output.storage, []).append(made)
        seen, todo = {storage}, [storage]
        while todo:
            at = todo.pop()
            if at in self.leaves and self.leaves[at][0].kind == "batch":
                return True
            behind = {kept.storage for made in makers.get(at, ()) for kept in made.operands.values()} - seen
            seen |= behind
            todo += behind
        return False

    def writer(self, kept: Kept, addresses: Tensor, before: int) -> tuple[Event | None, Record | None]:
        """The latest operation that wrote one of these elements; without a record if its values were not kept."""
        empty = len(addresses) == 0
        low, high = (0, EVERYTHING) if empty else (int(addresses.min()), int(addresses.max()) + 1)
        for event in self.trace.tracer.writers(Region(kept.storage, low, high), before, empty):
            record = self.records.get(event.index)
            if record is None:
                if event.uninitialised:
                    continue
                return event, None
            if empty or any(
                output.storage == kept.storage and len(output.positions_at(addresses)) for output in record.outputs
            ):
                return event, record
        return None, None


def record(replayer: Replayer, finding: Finding, last: Event) -> Recording | None:
    """Replay the step and keep the values of the operations that `last` depends on, and its own."""
    wanted = _behind(finding.trace.tracer, last)
    if finding.event is not None:
        wanted.add(finding.event.number)
    recording = Recording(finding.trace)
    made: list[tuple[Event, Record]] = []

    memo: dict[Any, Kept] = {}

    def observe(tracer: Tracer, event: Event, function: Any, call: Call) -> None:
        if event.number not in wanted:
            return
        operands = {name: _kept(tracer, value, where, memo) for name, value, where in call.operands}
        by_id = {id(where): operands[name].value for name, _, where in call.operands}
        args = tuple(_with(item, by_id) for item in call.args)
        named = {key: _with(item, by_id) for key, item in call.kwargs.items()}
        outputs = [_kept(tracer, tensor, tensor, None) for tensor in call.outputs]
        if event.number == last.number and finding.call_place is not None:
            with suppress(Exception):  # arguments of an odd kind: the operation can still be explained
                recording.call = library_call(tracer.storages)
        made.append((event, Record(event, function, args, named, operands, outputs)))

    trace = replayer.traced(micro_batch=finding.trace.micro_batch, observer=observe)
    if trace.micro_batch != finding.trace.micro_batch:
        return None
    recording.trace = trace
    recording.records = {event.index: found for event, found in made}
    for kind, name, tensor in replayer.named_leaves(trace.batch):
        kept = _kept(trace.tracer, tensor, tensor, None)
        leaf = trace.leaves.get(kept.storage)
        if isinstance(tensor, torch.nn.Parameter):
            recording.parameters.add(kept.storage)
        if leaf is not None and (leaf.kind, leaf.name) == (kind, name):
            recording.leaves.setdefault(kept.storage, (leaf, kept))
    return recording


def _behind(tracer: Tracer, last: Event) -> set[int]:
    """Numbers of the operations that `last` depends on, nearest first, as many as there is room for."""
    found: set[int] = set()
    seen = {last.index}
    counted: set[Region] = set()
    todo = [(-last.index, last)]
    room = MAX_KEPT
    while todo and len(found) < MAX_EVENTS:
        _, event = heapq.heappop(todo)
        regions = {access.region for access in (*event.reads, *event.writes)} - counted
        counted |= regions
        room -= sum(min(region.stop - region.start, EVERYTHING) for region in regions)
        if room < 0:
            break
        found.add(event.number)
        for access in event.reads:
            is_empty = access.region.start >= access.region.stop
            for writer in tracer.writers(access.region, event.index, is_empty):
                if writer.index not in seen:
                    seen.add(writer.index)
                    heapq.heappush(todo, (-writer.index, writer))
    return found


def _kept(tracer: Tracer, value: Tensor, where: Tensor, memo: dict[Any, Kept] | None) -> Kept:
    """`where` is the tensor that lies in the memory, `value` what was in it. With a memo, the same values are kept once."""
    region = tracer.storages.region(where)
    if where.layout is not torch.strided:
        return Kept(value.detach().to_dense(), region.storage, 0, ())
    offset, strides = int(where.storage_offset()), tuple(where.stride())
    key = (region, strides, where.shape, tracer.num_writes(region.storage), value is where)
    if memo is not None and key in memo:
        return memo[key]
    # On the host: a device that training has filled has no room for what it computed and let go.
    values = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    kept = Kept(values, region.storage, offset, strides)
    if memo is not None:
        memo[key] = kept
    return kept


def _with(item: Any, by_id: dict[int, Tensor]) -> Any:
    if isinstance(item, Tensor):
        return by_id.get(id(item), item)
    if isinstance(item, (list, tuple)):
        return type(item)(_with(each, by_id) for each in item)
    return item
