"""Walks back through the operations: which operand to follow, and where to stop.

A value is followed for what is wrong with it: a zero to the zero that made it, a huge value to the largest of what it was
made of, a boolean to what was compared. The walk ends at the batch, a parameter, a constant, random numbers, or where values
cancel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.incident import Link, describe_operand
from ..finding import Finding
from ..frames import user_place
from ..library_call import Carried
from ..replay import Replayer
from ..tracer import Event
from ..values import bad_positions, kind_of
from .choosing import COPIES, LARGE, TINY, Chooser, End, all_zero, magnitude
from .dependence import dependencies
from .recording import Record, Recording, record
from .spots import Kept, Spot, everything, index_text, rows_of, unravelled, values_text

MAX_LINKS = 400
SHOWN_LINKS = 8
SILENT = COPIES | {
    "lift_fresh", "cat", "stack", "expand_copy", "repeat", "slice_scatter", "select_scatter", "alias", "_unsafe_index",
    "constant_pad_nd", "flip", "roll",
}  # fmt: skip
"""They pass values on and are not shown."""
RANDOM = {
    "bernoulli", "normal", "uniform", "exponential", "rand", "randn", "randint", "rand_like", "randn_like", "native_dropout",
    "multinomial", "randperm", "geometric", "poisson", "_standard_gamma", "log_normal", "cauchy", "random",
}  # fmt: skip
STEERING = ("index", "indices", "target", "input_lengths", "target_lengths")


def lineage_of(replayer: Replayer, finding: Finding, samples: list[int]) -> list[Link]:
    """From the bad operand back to where its value came from; empty when that cannot be said. Costs one replay."""
    if finding.phase in ("data", "params"):
        return _of_leaf(replayer, finding)
    if finding.phase == "optimizer":
        return _of_update(replayer, finding)
    start = _start_event(finding)
    if start is None:
        return []
    recording = record(replayer, finding, start)
    if recording is None:
        return []
    walk = _Walk(recording, finding, samples)
    links = walk.run(start)
    finding.carried = walk.carried
    if links and links[-1].kind in ("parameter", "buffer", "constant"):
        finding.source, finding.source_tensor = links[-1].text, links[-1].name
    finding.options = [] if recording.call is None else recording.call.options
    return links


def _start_event(finding: Finding) -> Event | None:
    """The forward op whose derivative went bad, or the bad op itself: in backward, for gradients that grew too large."""
    event, forward = finding.event, finding.forward
    if event is None or finding.error is not None or finding.phase == "optimizer":
        return None
    is_growth = finding.cause_label in ("divergence", "fp16_overflow") and event.phase == "backward"
    of_forward = finding.phase == "backward" and forward is not None and not is_growth and not event.is_custom_backward
    return forward if of_forward else event


def _of_leaf(replayer: Replayer, finding: Finding) -> list[Link]:
    """The bad values were there before the step: which of them are bad."""
    leaf = finding.blame.leaf
    if leaf is None:
        return []
    kind = {"batch": "data", "attribute": "buffer"}.get(leaf.kind, leaf.kind)
    link = Link(kind, leaf.name)
    for own_kind, name, tensor in replayer.named_leaves(replayer.step.window[finding.trace.micro_batch]):
        bad = bad_positions(tensor) if (own_kind, name) == (leaf.kind, leaf.name) else None
        if bad is not None and bool(bad.any()):
            positions = bad.reshape(-1).nonzero().flatten()
            values = tensor.detach().reshape(-1)[positions]
            link.index, link.value = index_text(tensor.shape, positions), values_text(values)
            link.rows = rows_of(positions, tensor.shape) if kind == "data" else []
            break
    link.text = f"{leaf.name}{link.index}{link.value}" + (
        "" if link.value else " was already non-finite before the step"
    )
    return [link]


def _of_update(replayer: Replayer, finding: Finding) -> list[Link]:
    """The optimizer's arithmetic is its own; what it is given is the parameter and its gradient, of the last replay."""
    name = finding.owner or ""
    parameter = replayer.parameters.get(name)
    if parameter is None:
        return []
    links = [
        Link(
            "operation", f"{operand['name']} of {finding.name}", text=f"{finding.name} got {describe_operand(operand)}"
        )
        for operand in (finding.facts.inputs[:2] if finding.facts is not None else [])
        if operand.get("zeros") or abs(operand.get("max", 0.0)) > LARGE
    ]
    if parameter.grad is not None:
        values = values_text(parameter.grad.detach().reshape(-1))
        links.append(Link("operation", f"the gradient of {name}", "[:]", values, f"the gradient of {name}{values}"))
    values = values_text(parameter.detach().reshape(-1))
    return [*links, Link("parameter", name, "[:]", values, f"parameter {name}{values}")]


class _Walk:
    def __init__(self, recording: Recording, finding: Finding, samples: list[int]) -> None:
        self._recording = recording
        self._finding = finding
        self._samples = samples
        self._links: list[Link] = []
        self.carried: Carried | None = None
        """The argument of the call into a library that the walk came through."""
        self._seen: set[tuple[int, str]] = set()
        prefers_data = bool(samples) or finding.cause_label in (
            "empty_reduction",
            "bad_input_data",
            "infeasible_target",
        )
        self._chooser = Chooser(recording, prefers_data, finding.cause_label)

    def run(self, start: Event) -> list[Link]:
        found = self._recording.record_of(start.number)
        if found is None:
            return []
        if start.uninitialised or not found.operands:
            what = "memory that was never written" if start.uninitialised else "a constant of the code"
            self._end("constant", f"{what}, {start.api or start.op}", start, _whole_output(found))
            return self._links
        number = None if self._finding.facts is None else self._finding.facts.scalars.get("other")
        if start.op.startswith("div") and number is not None and abs(number) < TINY and len(found.operands) == 1:
            self._end("constant", "the divisor is the number 0 (of Python, not a tensor)", start)
            return self._links
        spot = self._fatal(found)
        if spot is None:
            return []
        self._add("operation", _argument_name(found, spot), spot, found)
        self._note_argument(spot)
        if (excess := _excess(spot, self._finding)) and spot.kept.storage not in self._recording.leaves:
            self._links.append(
                Link(
                    "rounding",
                    "rounding",
                    value=spot.index,
                    text=f"rounding: {excess} beyond 1, where {self._finding.name} ends",
                )
            )
            return self._links
        following: tuple[Spot, int] | None = (spot, found.event.index)
        for _ in range(MAX_LINKS):
            if following is None:
                break
            self._note_argument(following[0])
            following = self._step(*following)
        self._blame_growth()
        return _shortened(self._links)

    def _note_argument(self, spot: Spot) -> None:
        call = self._recording.call
        if call is None or self.carried is not None or spot.kept.storage not in call.arguments:
            return
        number, name = call.arguments[spot.kept.storage]
        self.carried = Carried(call.function, number, name, f"{spot.index}{values_text(spot.values)}")

    def _blame_growth(self) -> None:
        """Where weights have amplified ordinary values step by step until they overflow, the weights are where it came from."""
        gains = self._chooser.gains
        if not gains or self._samples:
            return
        name, (decades, count) = max(gains.items(), key=lambda item: item[1][0])
        if decades < 2:
            return
        parameter = next(kept for leaf, kept in self._recording.leaves.values() if leaf.name == name)
        times = f" in {count} multiplications" if count > 1 else ""
        values = values_text(parameter.value.reshape(-1))
        text = f"parameter {name}{values}, which amplified it 1e{decades:.0f}-fold{times}"
        self._links[-1:] = [Link("parameter", name, "[:]", values, text)]

    # ---- where it begins -------------------------------------------------------------------------------------------

    def _fatal(self, found: Record) -> Spot | None:
        """The operand that makes the result bad, and which of its elements."""
        if not found.operands:
            return None
        facts = self._finding.facts
        if facts is not None and facts.targets and "target" in found.operands:
            return Spot("target", found.operands["target"], everything(found.operands["target"]))
        if (longer := self._too_long(found)) is not None:
            return longer
        if self._finding.cause_label == "infeasible_target":
            output, positions = self._bad_output(found)
            depends = [] if output is None else dependencies(found, output, positions)
            for spot in depends:
                if spot.name in STEERING and len(spot.positions):
                    return spot
        for name, kept in found.operands.items():
            if kept.value.numel() == 0:
                return Spot(name, kept, torch.zeros(0, dtype=torch.long))
        output, positions = self._bad_output(found)
        if output is None or not len(positions):
            return None
        chosen = [spot for spot in dependencies(found, output, positions) if len(spot.positions)]
        if not chosen:
            return None
        if (found.event.op.startswith(("div", "fmod", "remainder")) or found.event.op == "addcdiv") and len(chosen) > 1:
            divisor = next((s for s in chosen if s.name in ("other", "tensor2")), chosen[-1])
            if bool((divisor.values.abs() < TINY).any()):
                return divisor
        infinite = [spot for spot in chosen if kind_of(spot.values)]
        return max(infinite or chosen, key=self._suspicion)

    def _too_long(self, found: Record) -> Spot | None:
        """Of CTC: the length of the first target that is longer than its input."""
        lengths, targets = found.operands.get("input_lengths"), found.operands.get("target_lengths")
        if lengths is None or targets is None or "ctc" not in found.event.op:
            return None
        allowed, wanted = lengths.value.reshape(-1).long(), targets.value.reshape(-1).long()
        longer = (wanted > allowed).nonzero().flatten() if allowed.shape == wanted.shape else allowed[:0]
        if not len(longer):
            return None
        note = f", longer than its input of {int(allowed[longer[0]])}"
        return Spot("target_lengths", targets, longer[:1], note)

    def _suspicion(self, spot: Spot) -> tuple[bool, bool, float]:
        """A zero more than a large value, and what was computed more than a weight."""
        if not spot.values.is_floating_point():
            return False, False, 0.0
        is_zero = all_zero(spot)
        is_weight = self._chooser.leaf_kind(spot) in ("parameter", "outside", "buffer")
        return True, is_zero or not is_weight, math.inf if is_zero else magnitude(spot)

    def _bad_output(self, found: Record) -> tuple[Kept | None, Tensor]:
        """The first bad element, in one of the samples that are to blame if any are."""
        none = torch.zeros(0, dtype=torch.long)
        event = self._finding.event
        for output in found.outputs:
            if kind_of(output.value):
                return output, self._first(bad_positions(output.value), output)
        # The forward op is finite and its derivative is not: bad gradients lie where the op's operand or result does.
        bad = None if event is None else self._recording.record_of(event.number)
        for gradient in [] if bad is None else bad.outputs:
            if not kind_of(gradient.value):
                continue
            for output in found.outputs:
                if output.shape == gradient.shape:
                    return output, self._first(bad_positions(gradient.value), output)
            for kept in found.operands.values():
                if kept.shape == gradient.shape and found.outputs:
                    return self._output_of(found, kept, self._first(bad_positions(gradient.value), kept))
        if found.outputs:
            output = found.outputs[0]
            return output, torch.arange(min(1, output.value.numel()))
        return None, none

    def _output_of(self, found: Record, operand: Kept, position: Tensor) -> tuple[Kept, Tensor]:
        """The element of the result that depends on this element of the operand."""
        output = found.outputs[0]
        for index in range(min(output.value.numel(), 512)):
            for spot in dependencies(found, output, torch.tensor([index])):
                if spot.kept is operand and bool((spot.positions == position).any()):
                    return output, torch.tensor([index])
        return output, torch.zeros(1, dtype=torch.long)

    def _first(self, bad: Tensor | None, kept: Kept) -> Tensor:
        if bad is None:
            return torch.zeros(min(1, kept.value.numel()), dtype=torch.long)
        positions = bad.reshape(-1).nonzero().flatten()
        if self._samples and kept.shape and kept.shape[0] > max(self._samples):
            rows = unravelled(positions, kept.shape)[0]
            guilty = positions[torch.isin(rows, torch.tensor(self._samples))]
            positions = guilty if len(guilty) else positions
        return positions[:1]

    # ---- one step back ---------------------------------------------------------------------------------------------

    def _step(self, spot: Spot, before: int) -> tuple[Spot, int] | None:
        addresses = spot.kept.addresses(spot.positions)
        event, found = self._recording.writer(spot.kept, addresses, before)
        if event is None:
            self._end_at_leaf(spot, addresses)
            return None
        if found is None:
            self._end("unknown", f"made by {event.api or event.op}, whose values were not kept", event)
            return None
        output, positions = self._written(found, spot, addresses)
        if (event.index, str(positions[:8].tolist())) in self._seen:
            return None
        self._seen.add((event.index, str(positions[:8].tolist())))
        if event.op.rstrip("_") in RANDOM:
            self._end("random", f"random numbers of {event.api or event.op}", event, spot)
            return None
        if not found.operands or event.op in ("fill_", "zero_", "lift_fresh", "scalar_tensor"):
            self._end("constant", f"a constant of the code, {event.api or event.op}", event, spot)
            return None
        if spot.is_empty or not len(positions):
            chosen: Spot | End = self._emptying(found)
        else:
            depends = [s for s in dependencies(found, output, positions) if len(s.positions)]
            chosen = self._chooser.choose(found, depends, spot)
        if isinstance(chosen, End):
            self._end(chosen.kind, chosen.what, event, chosen.spot)
            return None
        if event.op not in SILENT:
            self._add("operation", event.api or event.op, chosen, found, made=spot)
        return chosen, event.index

    def _written(self, found: Record, spot: Spot, addresses: Tensor) -> tuple[Kept, Tensor]:
        for output in found.outputs:
            if output.storage == spot.kept.storage:
                return output, output.positions_at(addresses)
        return found.outputs[0], torch.zeros(0, dtype=torch.long)

    def _emptying(self, found: Record) -> Spot:
        """What an empty result was selected by: a mask or an index; else the first operand."""
        for name, kept in found.operands.items():
            if kept.value.dtype in (torch.bool, torch.uint8) or name.startswith(("indices", "mask")):
                return Spot(name, kept, everything(kept))
        name, kept = next(iter(found.operands.items()))
        return Spot(name, kept, everything(kept))

    # ---- the record ------------------------------------------------------------------------------------------------

    def _end_at_leaf(self, spot: Spot, addresses: Tensor) -> None:
        known = self._recording.leaves.get(spot.kept.storage)
        values = values_text(spot.values)
        if known is None:
            what = "a tensor made outside of the step"
            self._links.append(Link("constant", what, value=values, text=f"{what}{values}"))
            return
        leaf, kept = known
        positions = kept.positions_at(addresses) if not spot.is_empty else torch.zeros(0, dtype=torch.long)
        kind = {"batch": "data", "attribute": "buffer"}.get(leaf.kind, leaf.kind)
        if kind == "outside":
            kind = "parameter" if kept.storage in self._recording.parameters else "buffer"
        rows = rows_of(positions, kept.shape) if kind == "data" else []
        if self._samples and len(rows) > len(self._samples) and set(self._samples) < set(rows):
            rows = list(self._samples)  # of an operation that mixes samples, those that are to blame
            positions = positions[torch.isin(unravelled(positions, kept.shape)[0], torch.tensor(rows))]
            values = values_text(kept.value.reshape(-1)[positions])
        index = index_text(kept.shape, positions)
        name = leaf.name if kind == "data" else f"{kind} {leaf.name}"
        self._links.append(Link(kind, leaf.name, index, values, rows=rows, text=f"{name}{index}{values}"))

    def _end(self, kind: str, what: str, event: Event, spot: Spot | None = None) -> None:
        place = user_place(event.frames)
        link = Link(kind, event.api or event.op, text=what)
        if spot is not None and kind != "cancellation":
            link.value = values_text(spot.values)
            link.text += link.value
        if place is not None:
            link.file, link.line, link.code = place.file, place.line, place.text
            link.text += f" at {place.file.replace(chr(92), '/').rpartition('/')[2]}:{place.line}"
        self._links.append(link)

    def _add(self, kind: str, name: str, spot: Spot, found: Record, made: Spot | None = None) -> None:
        place = user_place(found.event.frames)
        link = Link(kind, name, spot.index, values_text(spot.values))
        if made is None:
            link.text = f"{name}{spot.index}{link.value}{spot.note}"
        else:
            link.text = f"{name} of {spot.index or 'a number'}{link.value}{spot.note}"
        if place is not None:
            link.file, link.line, link.code = place.file, place.line, place.text
        self._links.append(link)


def _whole_output(found: Record) -> Spot | None:
    return Spot("output", found.outputs[0], everything(found.outputs[0])) if found.outputs else None


def _excess(spot: Spot, finding: Finding) -> str:
    """By how much a value lies outside of [-1, 1], if that is what rounding does."""
    values = spot.values
    if finding.cause_label != "invalid_domain" or len(values) != 1 or not values.is_floating_point():
        return ""
    excess = abs(float(values[0])) - 1
    return f"{excess:.2g}" if 0 < excess < 16 * torch.finfo(values.dtype).eps else ""


def _argument_name(found: Record, spot: Spot) -> str:
    name = found.event.api or found.event.op
    readable = {"self": "operand", "other": "divisor" if name == "div" else "other operand"}
    return f"{readable.get(spot.name, spot.name)} of {name}"


def _shortened(links: list[Link]) -> list[Link]:
    if len(links) <= SHOWN_LINKS:
        return links
    left_out = len(links) - SHOWN_LINKS + 1
    omitted = Link("omitted", f"{left_out} operations", text=f"… {left_out} operations …")
    return [*links[: SHOWN_LINKS // 2], omitted, *links[-(SHOWN_LINKS // 2 - 1) :]]
