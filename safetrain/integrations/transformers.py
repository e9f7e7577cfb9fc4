"""The Hugging Face Trainer, and what is built on it (TRL's trainers, PEFT models):

    from safetrain.integrations.transformers import SafetrainCallback

    Trainer(model, args, train_dataset=data, callbacks=[SafetrainCallback()]).train()

A callback of transformers can watch a step, and stop training, but not refuse an update. So `training_step` of the trainer and
`step` of its optimizer are wrapped while it trains; both are put back at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..guards import Guard
from ..hosts.guard import LoopGuard, watch
from .required import require

OLDEST = "4.46"
require("transformers", OLDEST, "hf")

from transformers import Trainer, TrainerCallback  # noqa: E402  only after the check of its version

PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
STATE = "safetrain.pt"
"""In each checkpoint of the trainer: what the guards have learned."""
NUM_ITEMS = "num_items_in_batch"


class SafetrainCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Judges every update of a Trainer before it is applied. Arguments as for `safetrain.watch`.

    The loss of a replay is the trainer's own `compute_loss`. Incidents are in `run_dir` (by default below `runs/`), and counted
    in the trainer's logs. TrainingStopped, raised from `train()`, carries the incident.
    """

    def __init__(
        self, config: Any = None, *, run_dir: str | Path | None = None, guards: Iterable[Guard] | None = None
    ) -> None:
        self._config, self._run_dir, self._guards = config, run_dir, guards
        self.guard: LoopGuard | None = None
        """Of the last call of `train()`."""
        self._trainer: Any = None
        self._num_items: Any = None

    # ---- what transformers calls -------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer = _calling_trainer()
        accelerator = trainer.accelerator
        if str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise UsageError(
                f"{accelerator.distributed_type} steps its optimizer out of reach, so updates cannot be refused.\n"
                "To fix: train with DDP or on one device, or leave the SafetrainCallback out."
            )
        self.guard = watch(
            trainer.model_wrapped,
            trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            loss_fn=self._loss,
            precision=PRECISION[accelerator.mixed_precision],
            config=self._config,
            run_dir=self._run_dir,
            guards=self._guards,
        )
        self.guard.checks_loss = False  # it is the host's own
        self.guard.on_end_do.append(self._let_go)
        self._resume(args, state)
        self._wrap("training_step", self._training_step)
        self._wrap("log", self._log)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.guard is not None and state.is_world_process_zero and directory.is_dir():
            torch.save(self.guard.state_dict(), directory / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.guard is not None:
            self.guard.close()

    # ---- in the trainer ----------------------------------------------------------------------------------------

    def _training_step(self, original: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.guard is not None
        num_items = args[0] if args else kwargs.get(NUM_ITEMS)
        batch = self._trainer._prepare_inputs(inputs)  # noqa: SLF001  as the trainer itself does first
        self.guard.begin({**batch, NUM_ITEMS: num_items} if num_items is not None else dict(batch))
        try:
            return original(model, inputs, *args, **kwargs)
        except BaseException as error:
            if self.guard.is_refused(error):
                return torch.zeros((), device=self._trainer.args.device)
            self.guard.ended(error)
            raise

    def _loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        inputs = dict(batch)  # compute_loss may take the labels out
        num_items = inputs.pop(NUM_ITEMS, None)
        with self._trainer.compute_loss_context_manager():
            return self._trainer.compute_loss(model, inputs, num_items_in_batch=num_items)

    def _log(self, original: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if self.guard is not None and "loss" in logs:
            result = self.guard.result
            logs = {**logs, "safetrain_incidents": len(result.incidents), "safetrain_skipped": result.skipped}
            logs["safetrain_rollbacks"] = result.rollbacks
        return original(logs, *args, **kwargs)

    def _leave(self) -> None:
        if self.guard is not None:
            self.guard.end()

    def _resume(self, args: Any, state: Any) -> None:
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
        if state.global_step > 0 and saved.is_file() and self.guard is not None:
            self.guard.load_state_dict(torch.load(saved, weights_only=True))

    def _wrap(self, name: str, ours: Any) -> None:
        original = getattr(self._trainer, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        setattr(self._trainer, name, wrapped)

    def _let_go(self) -> None:
        for name in ("training_step", "log"):
            vars(self._trainer).pop(name, None)


def _calling_trainer() -> Any:
    """Callbacks are not given the trainer that calls them."""
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise UsageError(
        "SafetrainCallback was called by something else than a transformers Trainer.\n"
        "To fix: Trainer(…, callbacks=[SafetrainCallback()]); in a loop of your own use safetrain.watch."
    )
