"""What sinks receive about a run, and the base class of a sink."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..core.containment import is_contained
from ..core.incident import Incident
from ..core.protocols import check_protocol, methods_of
from ..core.result import FitResult
from ..core.verdict import Decision
from ..core.view import StepView
from ..distributed.activity import Activity
from ..errors import SafetrainError
from .vitals import Vitals

if TYPE_CHECKING:
    from torch import Tensor

FLUSH_SECONDS = 0.25
"""Steps are handed to the sinks in batches: at the latest after this long, and always before anything else is."""
LOCK_SECONDS = 2.0
"""What is reported from another thread waits this long for a sink that hangs."""
MAX_PENDING = 50
"""Or when there are this many: more would be enough objects for Python's garbage collector to visit them again and again."""


class StepRecord(NamedTuple):
    """One decided step, as sinks receive it."""

    view: StepView
    decision: Decision
    outcome: str
    """`commit`, `skip`, `rollback`, `stop`, or `overflow` (the fp16 scaler skipped it)."""
    num_committed: int
    """Steps committed so far, this one included."""

    @property
    def loss(self) -> float:
        """The loss of the first attempt: for a repaired step that is the bad one."""
        return self.view.loss if self.view.refused_loss is None else self.view.refused_loss

    @property
    def is_ordinary(self) -> bool:
        return self.outcome == "commit" and self.view.refused_loss is None


@dataclass(frozen=True)
class ResumePoint:
    """Where the records of a resumed run continue; what they hold beyond this point is of steps that will be run again."""

    step: int = 0
    journal_position: int = 0
    num_skipped: int = 0
    num_rollbacks: int = 0


class Sink:
    """Receives everything that happens in a run; a subclass defines the methods that it needs.

    Called in the first process only, one method at a time, from the thread that trains. `close` is called last, however the
    run ends.
    """

    writes_to_output: ClassVar[bool] = False
    """To standard output: if that fails, nothing else is written there either."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_protocol(cls, Sink, methods_of(Sink))

    def started(self, about: Mapping[str, Any]) -> None:
        """`name`, `run_dir`, `parameters`, `device`, `precision`, `world_size`, `guards`, `total_steps`, and `resumed` of a resumed run."""

    def noted(self, text: str) -> None:
        """A sentence for the person who watches the run."""

    def stepped(self, records: Sequence[StepRecord]) -> None:
        """Every step, in batches."""

    def logged(self, record: StepRecord, vitals: Vitals) -> None:
        """Every `loop.log_every`-th step, and each one that did not go as usual; with the state of the run at that step."""

    def refreshed(self, vitals: Vitals) -> None:
        """The state of the run now, a few times a second."""

    def incident(self, incident: Incident) -> None:
        """A step was refused: what was found out, and what was done about it."""

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        """The run went back to an earlier state. `source` is where it was kept."""

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        """The metrics of an evaluation, and `step`."""

    def tensors(self, values: Mapping[str, Tensor], step: int) -> None:
        """Weights and gradients by name, before the update of this step; every `logging.histograms_every` steps."""

    def image(self, tag: str, pixels: Tensor, step: int) -> None:
        """Of `trainer.log_image`: bytes `[channels, height, width]`, on the host."""

    def doing(self, what: str | None) -> None:
        """Something other than steps takes a while; None: it is over."""

    def hangs(self, about: Mapping[str, Any]) -> None:
        """Something takes many times as long as usual: `text` for people, `step`, `unit`, `seconds`, `usual`, the `ranks` that the others
        wait for and their `places`; or, with `over`, it went on. From another thread than the rest, as the one that trains does
        not come to it."""

    def saving(self, step: int, num_committed: int) -> None:
        """A checkpoint of this moment is about to be written. If that fails, a note says so."""

    def sync(self) -> None:
        """Write everything received so far to disk: a checkpoint of this moment is being written."""

    def finished(self, result: FitResult) -> None:
        """The run is over: `result.status` is done, paused, stopped, interrupted or error."""

    def close(self) -> None:
        """Release files and connections."""


class Telemetry:
    """Passes everything to every sink. A step only appends to a list here; sinks receive steps in batches.

    `outside` are sinks of the user's: an error in one is logged once, and training goes on.
    """

    def __init__(
        self, sinks: Iterable[Sink] = (), log_every: int = 1, vitals: Vitals | None = None, outside: Iterable[Sink] = ()
    ) -> None:
        self._outside = list(outside)
        self.sinks = [*sinks, *self._outside]
        self._failed: list[Sink] = []
        """Those of the user's whose error was reported."""
        self.vitals = Vitals() if vitals is None else vitals
        self._counts = True
        """False once the statistics of the run have failed: they stay as they were."""
        self.is_busy = False
        """Something other than steps is being done."""
        self.activity: Activity | None = None
        """What the watchdog knows of this process."""
        self._log_every = log_every
        self._pending: list[StepRecord] = []
        self._has_news = False
        """Steps were sent since the last `refreshed`."""
        self._flushed_at = perf_counter()
        self._lock = threading.RLock()
        """Sinks get one call at a time, also when the watchdog reports a hang."""

    def stepped(self, record: StepRecord) -> None:
        self._pending.append(record)
        if perf_counter() - self._flushed_at > FLUSH_SECONDS:
            self._flush()
        elif len(self._pending) >= MAX_PENDING:
            self._send_steps()

    def _flush(self) -> None:
        self._flushed_at = perf_counter()
        self._send_steps()
        if self._has_news:
            self._has_news = False
            self._count("mark_time")
            self._send("refreshed", self.vitals)

    def _send_steps(self) -> None:
        records, self._pending = self._pending, []
        if not records:
            return
        self._has_news = True
        self._send("stepped", records)
        for record in records:
            self._count("add", record)
            if record.view.step % self._log_every == 0 or not record.is_ordinary:
                self._send("logged", record, self.vitals)

    def _count(self, what: str, *about: Any) -> None:
        if not self._counts:
            return
        try:
            getattr(self.vitals, what)(*about)
        except Exception as error:
            self._counts = False
            if not is_contained(error, self.vitals, f"the statistics of the run, in {what}", "they stay as they were"):
                raise

    def started(self, about: Mapping[str, Any]) -> None:
        self._count("begin", about.get("total_steps"))
        self._send("started", about)

    def noted(self, text: str) -> None:
        self._flush()
        self._send("noted", text)

    def incident(self, incident: Incident) -> None:
        self._flush()
        self._send("incident", incident)

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        self._flush()
        self.vitals.num_rollbacks += 1
        self._send("rolled_back", to_step, num_committed, source)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._flush()
        self._send("evaluated", metrics, is_best)

    def tensors(self, values: Mapping[str, Tensor], step: int) -> None:
        self._send("tensors", values, step)

    def takes(self, what: str) -> bool:
        """Whether a sink defines this method."""
        return any(getattr(type(sink), what) is not getattr(Sink, what) for sink in self.sinks)

    def image(self, tag: str, pixels: Tensor, step: int) -> None:
        self._send("image", tag, pixels, step)

    def doing(self, what: str | None) -> None:
        self._flush()
        self.is_busy = what is not None
        if self.activity is not None:
            self.activity.doing(what)
        self._send("doing", what)

    def hangs(self, about: Mapping[str, Any]) -> None:
        self._send("hangs", about)

    def saving(self, step: int, num_committed: int) -> None:
        self._flush()
        self._send("saving", step, num_committed)

    def sync(self) -> None:
        self._flush()
        self._send("sync")

    def finished(self, result: FitResult) -> None:
        try:
            self._flush()
            self._send("finished", result)
        finally:
            self.close()

    def close(self) -> None:
        """Every sink, once. Nothing may be sent afterwards."""
        sinks, self.sinks = self.sinks, []
        with ExitStack() as stack:  # an error in one leaves none open
            for sink in reversed(sinks):
                stack.callback(self._send_to, sink, "close")

    def _send(self, what: str, *about: Any) -> None:
        has_lock = self._lock.acquire(timeout=LOCK_SECONDS)
        try:
            for sink in list(self.sinks):
                self._send_to(sink, what, *about)
        finally:
            if has_lock:
                self._lock.release()

    def _send_to(self, sink: Sink, what: str, *about: Any) -> None:
        try:
            getattr(sink, what)(*about)
        except Exception as error:
            if sink in self._outside:
                self._report(sink, what, error)
            elif isinstance(error, (OSError, UnicodeError)) and not isinstance(error, SafetrainError):
                self._drop(sink, what, error)
            elif is_contained(error, sink, f"the sink {type(sink).__name__}, in {what}", "the run goes on without it"):
                self._drop(sink, what, None)
            else:
                raise

    def _drop(self, sink: Sink, what: str, error: Exception | None) -> None:
        """Nothing that is only told about the run may end it: a closed or full output, a path that is not UTF-8."""
        if sink in self.sinks:
            self.sinks.remove(sink)
        if sink.writes_to_output:
            _silence_output()
        if error is None or isinstance(
            error, BrokenPipeError
        ):  # whoever read the output has closed it: no reason to say more
            return
        text = f"{type(sink).__name__} is given up, in {what}: {type(error).__name__}: {error}"
        logging.getLogger("safetrain").warning("%s", text)
        if what not in ("finished", "close"):
            for other in [each for each in self.sinks if each is not sink]:
                self._send_to(other, "noted", text)

    def _report(self, sink: Sink, what: str, error: Exception) -> None:
        """Its first error only: a server that cannot be reached would fill the log, and may be there again later."""
        if sink in self._failed:
            return
        self._failed.append(sink)
        text = f"the sink {type(sink).__name__} raised in {what}: {type(error).__name__}: {error} (later errors of it are not reported)"
        logging.getLogger("safetrain").warning("%s", text, exc_info=error)
        if what not in ("finished", "close"):  # by then the journal has had its last line
            for other in [each for each in self.sinks if each is not sink]:
                self._send_to(other, "noted", text)


def _silence_output() -> None:
    """What is still written to standard output goes nowhere, instead of failing when the process ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
