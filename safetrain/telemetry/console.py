"""Lines for a person watching: progress, incidents, and a summary."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape

from ..incident import Incident
from ..result import FitResult
from .sink import Sink, StepRecord


class _Output(RichConsole):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process


class Console(Sink):
    """Colours on a terminal, plain lines without control codes elsewhere."""

    def __init__(self, log_every: int, plain_text: bool = False) -> None:
        self._out = _Output(file=sys.stdout, highlight=False, soft_wrap=True, no_color=plain_text or None)
        self._log_every = log_every
        self._since = time.perf_counter()
        self._steps_since = 0
        self._run_dir: Any = None

    def _say(self, text: str, style: str | None = None) -> None:
        encoding = self._out.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)  # a terminal that only knows ASCII, say
        self._out.print(escape(text), style=style)

    def started(self, about: Mapping[str, object]) -> None:
        self._say(
            f"{about['name']}: {about['parameters']:,} parameters on {about['device']}, {about['precision']}; "
            f"guards: {', '.join(about['guards']) or 'none'}",  # type: ignore[arg-type]
            "bold",
        )
        if about.get("resumed") is not None:
            self._say(f"resumed: {about['resumed']}", "bold")
        self._run_dir = about["run_dir"]
        self._say(f"run directory: {self._run_dir}")
        self._since = time.perf_counter()

    def noted(self, text: str) -> None:
        self._say(f"note: {text}", "yellow")

    def stepped(self, record: StepRecord) -> None:
        self._steps_since += 1
        if record.view.step % self._log_every:
            return
        now = time.perf_counter()
        rate = self._steps_since / max(now - self._since, 1e-9)
        self._since, self._steps_since = now, 0
        view, scale = record.view, record.decision.lr_scale
        parts = [
            f"step {view.step:>6}",
            f"loss {view.loss:<9.5g}",
            f"grad {view.grad_norm:<8.3g}",
            f"lr {view.lr * scale:<8.2e}",
            f"{rate:>7.1f} steps/s",
        ]
        if scale != 1.0:
            parts.append(f"(backed off: lr x {scale:.3g})")
        if record.outcome != "commit":
            parts.append(f"[{record.outcome}]")
        self._say("  ".join(parts))

    def incident(self, incident: Incident) -> None:
        self._say(
            incident.render(self._run_dir), "yellow" if incident.decision.action in ("skip", "commit") else "bold red"
        )

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        self._say(f"rolled back to the state of step {to_step} ({source}); {num_committed} steps committed", "bold red")

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        shown = "  ".join(f"{name} {value:.5g}" for name, value in metrics.items() if name != "step")
        self._say(f"eval at step {int(metrics['step'])}:  {shown}{'  (best)' if is_best else ''}", "cyan")

    def finished(self, result: FitResult) -> None:
        style = {"done": "green", "paused": "yellow"}.get(result.status, "bold red")
        numbers = f"{result.steps} steps committed, {result.skipped} skipped"
        if result.overflows:
            numbers += f" ({result.overflows} of them fp16 scaler overflows)"
        self._say(f"{result.status}: {numbers}, final loss {result.final_loss:.5g}, {result.seconds:.1f} s", style)
        if kept := result.snapshots:
            self._say(
                f"snapshots for rollback: {kept['num_taken']} taken in {kept['seconds']:.2f} s, {kept['bytes'] / 2**20:.1f} MB of memory"
            )
        if result.incidents:
            steps = ", ".join(str(i.step) for i in result.incidents[:8]) + (", …" if len(result.incidents) > 8 else "")
            self._say(f"incidents: {len(result.incidents)} (at step {steps}), each kept in {result.run_dir}/incidents")
        if result.islands:
            self._say("kept in float32 by recovery; to make it permanent, add to the config:")
            self._say(textwrap.indent(result.islands["yaml"].rstrip(), "  "))
        for patch in result.patches:
            names = ", ".join(patch["operations"] or ["what is unsafe"])
            self._say(f"{names} at {patch['file']}:{patch['line']} ran as its safe variant, {patch['num_uses']} times")
            self._say(f"  {patch['code']}\n  to make it permanent: {patch['fix']}")
        if result.quarantined:
            self._say(f"quarantined samples: {len(result.quarantined)}, listed in {result.run_dir}/quarantine.jsonl")
        self._say("what to run next:")
        if result.incidents:
            self._say(f"  safetrain diagnose {result.run_dir}    the incidents at length, newest first")
        self._say(f"  tensorboard --logdir {result.run_dir}    loss, gradient norm and incidents as curves")
        self._say(f"  safetrain explain {result.run_dir}/config.yaml    the loop that ran, with its guards")
