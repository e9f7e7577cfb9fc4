"""Finds the first bad operation in a trace: which op, in which phase, module and line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.incident import CalledFrom, Origin
from ..precision.autocast import LOW_PRECISION
from .facts import Facts
from .frames import (
    Frame,
    Place,
    call_chain,
    innermost_module,
    inside_engine,
    is_user,
    outside_function,
    own_place,
    user_place,
)
from .library_call import Carried, Option
from .ownership import is_own, library_of
from .provenance import Blame, Provenance, primary
from .replay import Leaf, Replayer, Trace
from .samples_of import has_arrays
from .schemas import LITERALS
from .storages import Region
from .tracer import Event
from .values import FINITE

LOSS = "<loss>"
DATA = "<data>"


@dataclass
class Finding:
    """What is known about the first bad operation; the cause rules judge this."""

    trace: Trace
    provenance: Provenance
    blame: Blame
    phase: str
    sink: str
    """What the bad value reached: the loss, a parameter's gradient, a buffer, or a parameter after the update."""
    event: Event | None = None
    """The op where the value went bad."""
    forward: Event | None = None
    """For a backward op: the forward op whose derivative it is; for a forward op: itself."""
    hidden: bool = False
    """The bad value is masked out of the loss and leaks through backward."""
    reached_by_intent: bool = False
    """An intended -inf got to the loss: `event` is the op that took it out of its mask."""
    module: str | None = None
    module_type: str | None = None
    place: Place | None = None
    frames: Sequence[Frame] = ()
    """Of the operation, innermost first."""
    op: str | None = None
    name: str | None = None
    optimizer: str | None = None
    """Class name, for phase `optimizer`."""
    owner: str | None = None
    """The tensor that was bad before or turned bad: a parameter, buffer or batch field."""
    held: list[dict[str, Any]] = field(default_factory=list)
    """Statistics of a tensor that was bad before the step: no operation made it bad, so it is shown as the input."""
    finite_in_fp32: bool | None = None
    """For low precision: does the same step stay finite in single precision? None when it was not tried."""
    error: Exception | None = None
    """What the step raised."""
    raised_by_samples: bool = False
    """It raises with some samples only."""
    notes: list[str] = field(default_factory=list)
    fused_form: str | None = None
    """Names of functions that compute this and what follows in one piece, seen to keep the step finite."""
    carried: Carried | None = None
    """The argument that takes the fatal value into the library, where the operation is a library's."""
    options: list[Option] = field(default_factory=list)
    """Of that library: constants that should keep its arithmetic finite, and are 0."""
    source: str = ""
    """Where the lineage ends, if it is a parameter, a buffer or a constant: `parameter logit_scale = 100`."""
    source_tensor: str = ""
    """The name of that parameter or buffer."""
    changed_line: str = ""
    """The user's own line, changed so that the step was seen to stay finite."""
    cause_label: str = "unknown"
    """Once it was judged."""

    @property
    def facts(self) -> Facts | None:
        return None if self.event is None else self.event.facts

    @property
    def zero_parameters(self) -> list[str]:
        """Parameters that the op reads and that are 0 throughout: how they were initialised is what may have to change."""
        if self.event is None or self.event.facts is None:
            return []
        zero = {t["name"] for t in self.event.facts.inputs if t.get("count") and t.get("zeros") == t["count"]}
        leaves = [self.trace.leaves.get(access.region.storage) for access in self.event.reads if access.name in zero]
        return list(dict.fromkeys(leaf.name for leaf in leaves if leaf is not None and leaf.kind == "parameter"))

    @property
    def is_low_precision(self) -> bool:
        if self.facts is None:
            return False
        dtypes = [self.facts.dtype, *(t.get("dtype") for t in self.facts.inputs)]
        return any(d in LOW_PRECISION or d in ("float16", "bfloat16") for d in dtypes)

    def origin(self) -> Origin:
        facts = self.facts
        return Origin(
            phase=self.phase,
            op=self.op,
            name=self.name,
            module=self.module,
            module_type=self.module_type,
            file=self.place.file if self.place else None,
            line=self.place.line if self.place else None,
            code=self.place.text if self.place else None,
            inputs=facts.inputs if facts else self.held,
            outputs=facts.outputs if facts else [],
            library=library_of(self.place.file) if self.place else None,
            called_from=CalledFrom(*self.caller) if self.caller else None,
            frames=call_chain(self.frames),
        )

    @property
    def caller(self) -> Place | None:
        """The user's own line, when the operation is in a library."""
        return None if self.place is not None and is_own(self.place.file) else own_place(self.frames)

    @property
    def is_typed(self) -> bool:
        """Is the operation written on the line that is shown, and not inside of something that it calls in torch?"""
        if self.place is None or not self.name:
            return False
        symbols = {"div": "/", "pow": "**", "matmul": "@", "add": "+", "sub": "-", "mul": "*"}
        symbol = symbols.get(self.name)
        is_symbol = symbol is not None and symbol in self.place.text
        return is_symbol or re.search(rf"\b{re.escape(self.name)}_?\b", self.place.text) is not None

    @property
    def call_place(self) -> Place | None:
        """The user's own line, when what it calls runs the operation: an installed library, or Python code of torch (a distribution)."""
        if self.caller is not None:
            return self.caller
        is_inside = self.phase in ("forward", "backward") and bool(call_chain(self.frames)) and not self.is_typed
        return self.place if is_inside else None

    @property
    def own_place(self) -> Place | None:
        """The innermost line that the user can edit."""
        return self.place if self.place is not None and is_own(self.place.file) else self.caller


def locate(trace: Trace, replayer: Replayer) -> Finding | None:
    """The first bad op of a traced step; None when the step is finite."""
    provenance = Provenance(trace.tracer, trace.leaves)
    if trace.loss_kind and trace.loss_region is not None:
        blames, sink = provenance.origins(trace.loss_region, trace.loss_kind), "the loss"
    elif trace.bad_gradients:
        blames = [blame for region, kind in trace.bad_gradients.values() for blame in provenance.origins(region, kind)]
        sink = f"the gradient of {_listed(trace.bad_gradients)}"
    else:
        return None
    return finding_of(trace, provenance, primary(blames), sink, replayer)


def locate_buffer(trace: Trace, replayer: Replayer) -> Finding | None:
    """The first bad op behind a buffer that turned bad and matters; None when there is none.

    It matters when its value is used for the loss, or when its module takes part in the loss and updates it from its
    old value (running statistics). A buffer that is only written is a metric.
    """
    if trace.loss_region is None:
        return None
    provenance = Provenance(trace.tracer, trace.leaves)
    storages, behind_loss = provenance.behind(trace.loss_region)
    for name, (region, kind) in trace.bad_buffers.items():
        is_running = region.storage in provenance.behind(region)[0]
        if region.storage not in storages and not (is_running and _is_used(name, trace, behind_loss, replayer)):
            continue
        finding = finding_of(trace, provenance, primary(provenance.origins(region, kind)), f"buffer {name}", replayer)
        if finding is not None:
            finding.owner = finding.owner or name
            replayer.watched_buffers = {name}
        return finding
    return None


def _is_used(buffer: str, trace: Trace, behind_loss: set[int], replayer: Replayer) -> bool:
    path = buffer.rpartition(".")[0]
    if not path:
        return False  # everything runs inside the root module; there, running values are metrics
    owner = replayer.model.get_submodule(path)
    return any(
        event.index in behind_loss and any(frame.module is owner for frame in event.frames)
        for event in trace.tracer.events
    )


def finding_of(
    trace: Trace, provenance: Provenance, blame: Blame | None, sink: str, replayer: Replayer
) -> Finding | None:
    if blame is None:
        return None
    finding = Finding(trace, provenance, blame, "forward", sink)
    crossing = _crossing(blame)
    if blame.intended:
        _blame_use_of_intended(finding)
    elif blame.leaf is not None and not _is_leak(blame, crossing):
        return _describe_leaf(finding, replayer)
    elif blame.event is not None and blame.event.op in LITERALS and blame.event.literal and has_arrays(trace.batch):
        blame.leaf = Leaf("batch", "a tensor made from the batch's arrays", is_mask=False)
        return _describe_leaf(finding, replayer)
    elif blame.leaf is not None:
        finding.event, finding.phase, finding.hidden = crossing, "backward", True
    else:
        finding.event = blame.event
        assert blame.event is not None
        if blame.event.phase == "backward" and not inside_recomputation(blame.event):
            finding.phase = "backward"
        elif crossing is not None and blame.conversion is not blame.event:
            _judge_hidden(finding, crossing)
    describe(finding, replayer)
    return finding


def _crossing(blame: Blame) -> Event | None:
    """The backward op that read the bad value out of the forward pass."""
    crossing = None
    for event, before in zip(blame.path, [*blame.path[1:], None], strict=True):
        if event.phase == "backward" and (before is None or before.phase == "forward"):
            crossing = event
    return crossing


def _judge_hidden(finding: Finding, crossing: Event) -> None:
    """A bad value of the forward pass that the loss does not show. Masked out, or absorbed as in 1 / (1 + inf)?"""
    origin = finding.blame.event
    assert origin is not None
    same_op = finding.trace.tracer.forward_of(crossing) is origin
    finding.hidden = has_masked_zeros(finding, crossing)
    # Statistics that a norm only saves for its backward are not visible in the forward pass.
    only_saved = bool(origin.writes) and origin.writes[0].kind == FINITE
    if same_op and (finding.hidden or only_saved):
        finding.phase = "backward"


def has_masked_zeros(finding: Finding, event: Event | None) -> bool:
    """Is the incoming gradient zero wherever this op's result is bad, because a mask upstream made it so?"""
    if event is None or event.phase != "backward" or event.node_number is None:
        return False
    # A derivative is several ops, and the first of them that goes bad need not be the one that reads the gradient.
    siblings = [other for other in finding.trace.tracer.events if other.node_number == event.node_number]
    return any(
        finding.provenance.is_masked_upstream(sibling, argument)
        for sibling in (event, *siblings)
        if sibling.phase == "backward"
        for argument in _zero_arguments(sibling)
    )


def _zero_arguments(event: Event) -> set[str]:
    """The operands that are 0 wherever the result is bad."""
    measured = event.facts.at_bad.items() if event.facts else ()
    return {name for name, at in measured if at.zeros == at.count} | event.zero_where_bad


def _is_leak(blame: Blame, crossing: Event | None) -> bool:
    """Marked as missing in the batch and masked out of the loss, but read by a derivative outside of every module."""
    if crossing is None or blame.leaf is None or blame.leaf.kind != "batch":
        return False
    after = blame.path[blame.path.index(crossing) + 1 :]
    return not any(frame.module is not None for event in after for frame in event.frames)


# Ops that carry an intended -inf along, or keep it among others where it means "impossible".
_NEUTRAL = {
    "_log_softmax", "_softmax", "logsumexp", "logaddexp", "maximum", "minimum", "add", "add_", "sub", "mul",
    "masked_fill", "masked_fill_", "where", "copy_", "fill", "fill_", "_to_copy", "clone", "cat", "stack",
    "index_put", "index_put_", "slice_scatter", "select_scatter", "constant_pad_nd",
}  # fmt: skip


def _blame_use_of_intended(finding: Finding) -> None:
    """The last typed Inf of the path is intended; to blame is the op after it that lets it escape."""
    path = finding.blame.path[::-1]
    last = max((i for i, event in enumerate(path) if event.literal), default=-1)
    after = path[last + 1 :] or path[-1:]
    chosen = next((event for event in after if event.op not in _NEUTRAL), after[-1] if after else None)
    finding.event, finding.reached_by_intent = chosen, True
    if chosen is not None and chosen.phase == "backward":
        finding.phase = "backward"


def inside_recomputation(event: Event) -> bool:
    """A forward op repeated by gradient checkpointing while backward runs."""
    return any(is_user(f.code) for f in inside_engine(event.frames)) and not event.is_custom_backward


def frames_to_show(event: Event) -> Sequence[Frame]:
    inner = inside_engine(event.frames)
    return inner if any(is_user(frame.code) for frame in inner) else event.frames


def describe(finding: Finding, replayer: Replayer) -> None:
    """Op, name, module and line for the finding's event."""
    event = finding.event
    if event is None:
        return
    tracer = finding.trace.tracer
    finding.forward = event if event.phase == "forward" or inside_recomputation(event) else tracer.forward_of(event)
    shown = finding.forward
    finding.op = event.full_name
    if event.is_custom_backward and event.reads:
        frames = frames_to_show(event)
        finding.name = event.api or event.op.strip("_")
    elif shown is not None:
        frames = frames_to_show(shown)
        finding.name = shown.api or shown.op.strip("_")
    else:
        frames = frames_to_show(event)
        finding.name = event.op.strip("_")
    if event.is_custom_backward and not event.reads and event.node:
        # A value made from nothing (uninitialised memory, a constant): the function is wrong, not a line of arithmetic.
        finding.name = event.node.removesuffix("Backward")
        frames = outside_function(frames)
    if user_place(frames) is None and shown is not None:
        frames = shown.frames
    finding.place, finding.frames = user_place(frames), frames
    inner = innermost_module(frames, replayer.module_names)
    if inner is None and shown is not None:
        inner = innermost_module(shown.frames, replayer.module_names)
    finding.module, finding.module_type = (inner[0], type(inner[1]).__name__) if inner else (LOSS, None)


def _describe_leaf(finding: Finding, replayer: Replayer) -> Finding:
    leaf = finding.blame.leaf
    assert leaf is not None
    user = finding.blame.path[-1] if finding.blame.path else None
    finding.event = None
    finding.owner = leaf.name
    finding.held = replayer.examine_leaf(leaf, finding.trace.batch)
    if user is not None:
        shown = user if user.phase == "forward" else finding.trace.tracer.forward_of(user)
        if shown is not None:
            finding.frames = frames_to_show(shown)
            finding.place = user_place(finding.frames)
    if leaf.kind == "batch" or (leaf.kind == "outside" and has_arrays(finding.trace.batch)):
        finding.phase, finding.module, finding.op = "data", DATA, "data"
        enters_model = any(frame.module is not None for event in finding.blame.path for frame in event.frames)
        finding.name = "input" if enters_model else "target"
        return finding
    finding.phase = "params"
    finding.op = leaf.kind if leaf.kind != "outside" else "tensor"
    owner, _, finding.name = leaf.name.rpartition(".")
    finding.module = LOSS if leaf.kind == "outside" else owner
    finding.module_type = replayer.module_type(finding.module)
    return finding


def _listed(names: dict[str, tuple[Region, int]]) -> str:
    first = next(iter(names))
    return first if len(names) == 1 else f"{len(names)} parameters, {first} first"
