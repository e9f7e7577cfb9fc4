"""The hooks that a subclass of `SafeTrainer` may define. By default the hooks follow the config."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..config.schema import Config
from ..config.targets import instantiate
from ..config.tree import TARGET
from ..core.incident import Incident
from ..core.loss import LossFn, note_of_arguments
from ..core.protocols import check_hooks
from ..core.view import StepView
from ..errors import UsageError
from ..optim.build import build_optimizer


class TrainerHooks:
    config: Config
    model: nn.Module
    loss_fn: LossFn | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A method that looks like a misspelt hook is an error."""
        super().__init_subclass__(**kwargs)
        if TrainerHooks not in cls.__bases__:
            check_hooks(cls, next(base for base in cls.__mro__ if TrainerHooks in base.__bases__))

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a micro-batch: a scalar tensor, or a dict with `loss` and metrics. Runs under autocast."""
        if self.loss_fn is None:
            raise UsageError(
                "there is nothing to compute the loss with.\n"
                "To fix: pass loss_fn=…, set `loss` in the config, or define training_step in a subclass."
            )
        try:
            return self.loss_fn(model, batch)
        except (TypeError, AttributeError) as error:
            note_of_arguments(self.loss_fn, self.model, error)
            raise

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
        if data.eval is None or TARGET in data.eval:
            return instantiate(data.train), None if data.eval is None else instantiate(data.eval)
        return instantiate(data.train), {name: instantiate(node) for name, node in data.eval.items()}

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer, when none was passed."""
        return build_optimizer(self.config.optimizer, model)

    def build_scheduler(self, optimizer: Optimizer) -> Any:
        """The learning-rate scheduler or None, when none was passed. Stepped after each committed step, or once per epoch with
        `scheduler.every: epoch` (`scheduler_every="epoch"`)."""
        node = self.config.scheduler
        if node is None:
            return None
        return instantiate({key: value for key, value in node.items() if key != "every"}, optimizer)

    def on_commit(self, view: StepView) -> None:
        """Called after each committed step."""

    def on_incident(self, incident: Incident) -> None:
        """Called after each refused step, before the run stops if it does."""

    def on_evaluation(self, metrics: dict[str, float]) -> None:
        """Called after each evaluation, with its metrics and its `step`."""

    def on_epoch_end(self, epoch: int) -> None:
        """Called after the last step of each epoch (counted from 0), before its evaluation."""
