"""How the bad value travelled from its origin to the loss or the gradients, by module."""

from __future__ import annotations

from .finding import LOSS, Finding, frames_to_show
from .frames import innermost_module
from .replay import Replayer
from .tracer import Event

MAX_STOPS = 12


def propagation(finding: Finding, replayer: Replayer) -> list[str]:
    """Stops on the way, origin first; neighbouring ops of one module are one stop."""
    stops: list[str] = []
    for event in reversed(finding.blame.path):
        stop = f"{_module(event, finding, replayer)} ({event.phase})"
        if not stops or stops[-1] != stop:
            stops.append(stop)
    if len(stops) > MAX_STOPS:
        left_out = len(stops) - MAX_STOPS + 1
        stops = [*stops[: MAX_STOPS // 2], f"… {left_out} more …", *stops[-(MAX_STOPS // 2 - 1) :]]
    return [*stops, finding.sink]


def _module(event: Event, finding: Finding, replayer: Replayer) -> str:
    forward = event if event.phase == "forward" else finding.trace.tracer.forward_of(event)
    if forward is None:
        return "autograd"
    inner = innermost_module(frames_to_show(forward), replayer.module_names)
    return (inner[0] or "the root module") if inner else LOSS
