"""What a trainer is made of: the parts handed over, built by hooks, or built from the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..config import load_config
from ..config.targets import instantiate
from ..core.incident import Incident
from ..core.loss import LossFn, adapt_loss
from ..core.view import StepView
from ..data.stream import BatchStream, open_stream
from ..errors import UsageError
from ..forensics.patches import Patches
from ..guards import Guard
from ..guards.guard_set import Panel
from ..optim.ema import Ema
from ..recovery import Ladder, LastGood
from ..step.audit import Audit
from ..step.deferred import DeferredCommits
from ..step.transaction import Transaction
from ..tensors import gradients
from ..tensors.rng import seed_everything
from . import build as assembly


class TrainerParts:
    """The constructor and the hooks of `SafeTrainer`. A method that looks like a misspelt hook is an error in a subclass."""

    _deferred: DeferredCommits | None = None
    _evaluated_at = 0
    careful_steps = 0
    """Committed steps whose update is still to be checked before it counts, because one has ruined the state before."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        loss_fn: LossFn | None = None,
        optimizer: Optimizer | None = None,
        train_data: Any = None,
        eval_data: Any = None,
        scheduler: Any = None,
        config: Any = None,
        guards: Iterable[Guard] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        """Parts that are not given come from the `build_*` hooks, which by default follow the config.

        `guards` are added to those of the config; one with the same name takes its place. The run directory is made by
        `fit`, below `runs/` unless `run_dir` says where.
        """
        self.config = load_config(config)
        self._run_dir = run_dir
        if self.config.seed is not None:
            seed_everything(self.config.seed)
        loop = self.config.loop
        self.engine = assembly.open_engine(loop)
        self.model = self.build_model() if model is None else model
        assembly.check_trainable(self.model)
        if not self.model.training:
            self.model.train()
        self.guards = assembly.build_guards(self.config.guards, guards or ())
        self._called_model = self.engine.prepare(self.model, loop.compile, optimizer, self.guards)
        self.engine.separate_random_streams()
        if loss_fn is not None:
            self._loss_fn: LossFn | None = adapt_loss(loss_fn)
        else:
            self._loss_fn = None if self.config.loss is None else assembly.build_loss(self.config.loss)
        self.optimizer = self.build_optimizer(self.model) if optimizer is None else optimizer
        assembly.check_optimizer(self.model, self.optimizer)
        self.scheduler = self.build_scheduler(self.optimizer) if scheduler is None else scheduler
        if train_data is None:
            built = self.build_data()
            train_data, built_eval = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
            eval_data = built_eval if eval_data is None else eval_data
        self.stream = self._open(train_data, self.engine.rank, self.engine.world_size, shuffle=self.config.data.shuffle)
        self._eval_stream = None if eval_data is None else self._open_eval(eval_data)
        assembly.check_scheduler(self.scheduler, self._eval_stream is not None)
        self.panel = Panel(self.guards)
        self.ema = None if loop.ema is None else Ema(self.model, loop.ema)
        self._find_parameters()
        self.transaction = Transaction(self.model, self._parameters)
        self.ladder = Ladder(self.config.recovery)
        self.patches = Patches()
        self.last_good: LastGood | None = None
        self.audit = Audit(self.model, self.optimizer, self.transaction, self.ema)

    def _find_parameters(self) -> None:
        self._groups = [group["params"] for group in self.optimizer.param_groups]
        self._parameters = assembly.all_parameters(self.model, self.optimizer)
        self._is_uniform = gradients.are_uniform(self._parameters)

    def _open(self, data: Any, rank: int, world_size: int, shuffle: bool) -> BatchStream:
        seed = self.config.seed or 0
        return open_stream(
            data,
            self.config.data,
            shuffle=shuffle,
            seed=seed,
            device=self.engine.device,
            rank=rank,
            world_size=world_size,
        )

    def _open_eval(self, data: Any) -> BatchStream:
        """All of it, in its order, on every rank."""
        config = dataclasses.replace(self.config.data, drop_last=False)
        return open_stream(
            data, config, shuffle=False, seed=self.config.seed or 0, device=self.engine.device, what="evaluation data"
        )

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a micro-batch: a scalar tensor, or a dict with `loss` and metrics. Runs under autocast."""
        if self._loss_fn is None:
            raise UsageError(
                "there is nothing to compute the loss with.\n"
                "To fix: pass loss_fn=…, set `loss` in the config, or define training_step in a subclass."
            )
        return self._loss_fn(model, batch)

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        """Loss and metrics of an evaluation batch; by default what `training_step` returns."""
        return self.training_step(model, batch)

    def build_model(self) -> nn.Module:
        """The model, when none was passed."""
        if self.config.model is None:
            raise UsageError(
                "there is no model.\nTo fix: pass model=…, set `model` in the config, or define build_model."
            )
        return instantiate(self.config.model)  # type: ignore[no-any-return]

    def build_data(self) -> Any:
        """The training data, or a tuple of training and evaluation data, when none was passed."""
        data = self.config.data
        if data.train is None:
            raise UsageError(
                "there is no training data.\nTo fix: pass train_data=…, set `data.train` in the config, or define build_data."
            )
        return instantiate(data.train), None if data.eval is None else instantiate(data.eval)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer, when none was passed."""
        return instantiate(self.config.optimizer, [p for p in model.parameters() if p.requires_grad])  # type: ignore[no-any-return]

    def build_scheduler(self, optimizer: Optimizer) -> Any:
        """The learning-rate scheduler or None, when none was passed. Stepped once per committed step."""
        return None if self.config.scheduler is None else instantiate(self.config.scheduler, optimizer)

    def on_commit(self, view: StepView) -> None:
        """Called after each committed step."""

    def on_incident(self, incident: Incident) -> None:
        """Called after each refused step, before the run stops if it does."""
