"""ST7xx: the order of calls in a training step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..events import Event, Routine
from ..rule import routine_rule
from ..value import Value

Problems = Iterator[tuple[Event, str]]


def regions(routine: Routine) -> Iterator[list[Event]]:
    """The events of each innermost loop that holds a backward; of the whole function if none is in a loop."""
    loops = {event.loops[-1:] for event in routine.of("backward", "clip", "step", "scaled_step")}
    for innermost in loops:
        events = [event for event in routine.events if not innermost or innermost[0] in event.loops]
        if any(event.kind == "backward" for event in events):
            yield events


def _first(events: list[Event], *kinds: str) -> int | None:
    return next((index for index, event in enumerate(events) if event.kind in kinds), None)


@routine_rule(
    "ST701",
    "gradient clipping before backward",
    why="Before backward() there are no gradients of this step yet: the optimizer steps with the unclipped gradient.",
    safe="loss.backward(); clip_grad_norm_(model.parameters(), 1.0); optimizer.step().",
    bad="""
        from torch.nn.utils import clip_grad_norm_

        def step(model, loss, optimizer):
            optimizer.zero_grad()
            clip_grad_norm_(model.parameters(), 1.0)
            loss.backward()
            optimizer.step()
        """,
    good="""
        from torch.nn.utils import clip_grad_norm_

        def step(model, loss, optimizer):
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
)
def clip_before_backward(routine: Routine) -> Problems:
    for events in regions(routine):
        clip, backward = _first(events, "clip"), _first(events, "backward")
        step = _first(events, "step", "scaled_step")
        if clip is not None and backward is not None and clip < backward and (step is None or clip < step):
            yield events[clip], "gradients are clipped before backward() has computed them"


@routine_rule(
    "ST702",
    "gradient clipping before scaler.unscale_",
    why="The gradients are still multiplied by the loss scale (65536 at the start): clipping reduces them to almost nothing.",
    safe="scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip_grad_norm_(…); scaler.step(optimizer); scaler.update().",
    bad="""
        from torch.nn.utils import clip_grad_norm_

        def step(model, loss, optimizer, scaler):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    good="""
        from torch.nn.utils import clip_grad_norm_

        def step(model, loss, optimizer, scaler):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
)
def clip_before_unscale(routine: Routine) -> Problems:
    for events in regions(routine):
        scaled = False
        for event in events:
            if event.kind == "backward":
                scaled = scaled or event.scaled
            elif event.kind in ("unscale", "scaled_step"):
                scaled = False
            elif event.kind == "clip" and scaled and not event.managed and not _other_branch(event, events):
                yield event, "gradients are clipped while they are still multiplied by the loss scale"


def _other_branch(clip: Event, events: list[Event]) -> bool:
    """Whether the clip is in the `else` of an `if` that handles the scaled case."""
    alternatives = {node for kind, node in clip.blocks if kind == "else"}
    return any(event.scaled and ("if", node) in event.blocks for event in events for node in alternatives)


@routine_rule(
    "ST703",
    "zero_grad missing",
    why="backward() adds to the existing gradients: without zero_grad they grow with every step until the weights diverge.",
    safe="optimizer.zero_grad() once per optimizer step, before backward() or after step().",
    bad="""
        def train(model, data, optimizer):
            for x, y in data:
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
        """,
    good="""
        def train(model, data, optimizer):
            for x, y in data:
                optimizer.zero_grad()
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
        """,
)
def zero_grad_missing(routine: Routine) -> Problems:
    backwards, steps = routine.of("backward"), routine.of("step", "scaled_step")
    if not backwards or not steps or routine.of("zero_grad") or _clears_elsewhere(routine):
        return
    looped = any(event.loops for event in backwards) and any(event.loops for event in steps)
    if any(build.loops == steps[0].loops for build in routine.of("build")):
        return  # a new optimizer each time: a single step
    if not looped and (routine.name == "<module>" or backwards[0].loss.op in ("name", "unknown")):
        return  # part of a step: the caller may clear the gradients
    yield backwards[0], "gradients are never set to zero between steps"


def _clears_elsewhere(routine: Routine) -> bool:
    def clears(name: str) -> bool:
        return "zero_grad" in routine.neighbours.get(name, ())

    name = routine.name.rpartition(".")[2]
    callers = [other for other, called in routine.neighbours.items() if name in called]
    return (
        any(map(clears, routine.called))
        or any(map(clears, callers))
        or any("zero_grad" in called or "clear_grad" in called for called in routine.called)
    )


@routine_rule(
    "ST704",
    "gradient accumulation without dividing the loss",
    why="The accumulated gradient is the sum over the micro-batches, n times as large as intended; so is the step, and training diverges.",
    safe="(loss / accumulation_steps).backward().",
    bad="""
        def train(model, data, optimizer, accumulation_steps):
            for i, (x, y) in enumerate(data):
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                if (i + 1) % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
    good="""
        def train(model, data, optimizer, accumulation_steps):
            for i, (x, y) in enumerate(data):
                loss = ((model(x) - y) ** 2).mean()
                (loss / accumulation_steps).backward()
                if (i + 1) % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
)
def accumulation_without_division(routine: Routine) -> Problems:
    for step in routine.of("step", "scaled_step"):
        periodic = [
            node for kind, node in step.blocks if kind == "if" and isinstance(node, ast.If) and _is_periodic(node.test)
        ]
        for backward in routine.of("backward"):
            inside = any(node is block for _, block in backward.blocks for node in periodic)
            if (
                not periodic
                or inside
                or backward.managed
                or backward.loops != step.loops[: len(backward.loops)]
                or not backward.loops
            ):
                continue
            if not _is_scaled_down(backward.loss) and not _divides_gradients(routine):
                yield (
                    backward,
                    "gradients are accumulated over several batches, and the loss is not divided by their number",
                )
                return


def _is_periodic(test: ast.expr) -> bool:
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test))


def _is_scaled_down(loss: Value, depth: int = 6) -> bool:
    if loss.op in ("div", "mul"):
        return True
    if loss.op in ("add", "sub", "join", "neg") and depth:
        return any(_is_scaled_down(arg, depth - 1) for arg in loss.args)
    return False


def _divides_gradients(routine: Routine) -> bool:
    return bool(routine.called & {"div_", "mul_", "_foreach_div_", "_foreach_mul_", "scale_grads", "accumulate"})


@routine_rule(
    "ST705",
    "optimizer.step before backward",
    why="The step uses the gradients of the previous batch (or none), not those of this loss.",
    safe="zero_grad(), forward, backward(), clip, step(), in this order.",
    bad="""
        def step(model, loss, optimizer):
            optimizer.zero_grad()
            optimizer.step()
            loss.backward()
        """,
    good="""
        def step(model, loss, optimizer):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
)
def step_before_backward(routine: Routine) -> Problems:
    for events in regions(routine):
        step, backward = _first(events, "step", "scaled_step"), _first(events, "backward")
        if step is not None and backward is not None and step < backward:
            first = routine.events.index(events[0])
            if not any(event.kind == "backward" for event in routine.events[:first]):
                yield events[step], "the optimizer steps before backward() has computed the gradients"


@routine_rule(
    "ST706",
    "zero_grad between backward and step",
    why="The gradients are cleared before they are used: the weights change by momentum and weight decay only.",
    safe="zero_grad() before backward() or after step().",
    bad="""
        def step(model, loss, optimizer):
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()
        """,
    good="""
        def step(model, loss, optimizer):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
)
def zero_grad_before_step(routine: Routine) -> Problems:
    for events in regions(routine):
        order = [event for event in events if event.kind in ("backward", "step", "scaled_step", "zero_grad")]
        if [event.kind for event in order[:2]] == ["backward", "zero_grad"] and len(order) == 3:
            _, clear, step = order
            if (
                step.kind != "backward"
                and clear.blocks == step.blocks == events[0].blocks
                and clear.owner == step.owner
            ):
                yield clear, "the gradients are set to zero before the optimizer has used them"


@routine_rule(
    "ST707",
    "optimizer.step with scaled gradients",
    why="The gradients are multiplied by the loss scale (65536 at the start); so is the step, and the weights explode.",
    safe="scaler.step(optimizer); scaler.update(), which unscale and skip a step that overflowed.",
    bad="""
        def step(model, loss, optimizer, scaler):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            optimizer.step()
        """,
    good="""
        def step(model, loss, optimizer, scaler):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
)
def step_with_scaled_gradients(routine: Routine) -> Problems:
    if any(event.scaled for event in routine.of("backward")) and not routine.of("scaled_step", "unscale"):
        for event in routine.of("step")[:1]:
            yield event, "the optimizer steps with gradients that are multiplied by the loss scale"
