"""Lightning, with automatic optimization:

    from safetrain.integrations.lightning import SafetrainCallback

    Trainer(callbacks=[SafetrainCallback()]).fit(model, loader)

With manual optimization, use `safetrain.watch` inside `training_step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..guards import Guard
from ..hosts.guard import LoopGuard, watch
from .required import require

OLDEST = "2.2"
require("lightning", OLDEST, "lightning")

from lightning.pytorch import Callback  # noqa: E402  only after the check of its version

PRECISION = {"32-true": "fp32", "64-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16"}
SILENCED = ("log", "log_dict", "print")


class SafetrainCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Judges every update of a Lightning Trainer before it is applied. Arguments as for `safetrain.watch`.

    The loss of a replay is `training_step` of the LightningModule, without its logging. Incidents are in `run_dir` (by default
    below `runs/`), and counted in the metrics. TrainingStopped, raised from `fit()`, carries the incident.
    """

    def __init__(
        self, config: Any = None, *, run_dir: str | Path | None = None, guards: Iterable[Guard] | None = None
    ) -> None:
        self._config, self._run_dir, self._guards = config, run_dir, guards
        self.guard: LoopGuard | None = None
        """Of the last call of `fit()`."""
        self._loaded: dict[str, Any] | None = None
        self._module: Any = None
        self._trainer: Any = None
        self._batch_index = 0

    # ---- what Lightning calls ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise UsageError(
                "SafetrainCallback works with automatic optimization, and this module optimizes manually.\n"
                "To fix: guard = safetrain.watch(self, optimizer) in on_train_start, and with guard.step(batch): in training_step."
            )
        precision = str(trainer.precision)
        if precision not in PRECISION:
            raise UsageError(
                f"SafetrainCallback does not know precision={precision!r} of Lightning.\nTo fix: use one of {', '.join(PRECISION)}."
            )
        self._module, self._trainer = pl_module, trainer
        self.guard = watch(
            trainer.strategy.model,
            list(trainer.optimizers),
            scheduler=[each.scheduler for each in trainer.lr_scheduler_configs] or None,
            loss_fn=self._loss,
            precision=PRECISION[precision],
            config=self._config,
            run_dir=self._run_dir,
            guards=self._guards,
        )
        self.guard.checks_loss = False  # it is the host's own
        if self._loaded is not None:
            self.guard.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.guard is not None:
            self._batch_index = batch_idx
            self.guard.begin(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.guard is None:
            return
        self.guard.end()
        result = self.guard.result
        if result.incidents:
            counts = {"incidents": len(result.incidents), "skipped": result.skipped, "rollbacks": result.rollbacks}
            pl_module.log_dict({f"safetrain/{name}": float(count) for name, count in counts.items()}, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.guard is not None:
            self.guard.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.guard is not None:
            self.guard.ended(exception)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.guard is None else self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None

    # ---- replays -----------------------------------------------------------------------------------------------

    def _loss(self, model: Any, batch: Any) -> Any:
        module, step = self._module, self._module.training_step
        names = list(inspect.signature(step).parameters)
        arguments = {"batch_idx": self._batch_index} if "batch_idx" in names else {}
        with _silent(module), self._trainer.precision_plugin.train_step_context():
            output = step(batch, **arguments)
        if isinstance(output, Mapping):
            return {"loss": output["loss"]}
        return output


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """Nothing that `training_step` logs inside is logged: the step was logged when it was made."""
    for name in SILENCED:
        vars(module)[name] = _nothing
    try:
        yield
    finally:
        for name in SILENCED:
            vars(module).pop(name, None)


def _nothing(*args: Any, **kwargs: Any) -> None: ...
