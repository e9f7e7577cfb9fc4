"""Finds where a step went bad, for a model that no rank can run alone: sharded by FSDP2, or with SyncBatchNorm.

All ranks run the step once more at the same time, through forward and backward whatever the values, and each watches the
modules that its own window goes through. That finds the module, not the operation: tracing every operation, searching samples
and trying remedies would take more passes on one rank than on another, and the others would hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from ..core.incident import Cause, Origin, Replay
from ..forensics import Diagnosis
from ..forensics.finding import DATA, LOSS
from ..forensics.values import bad_positions, kind_of, statistics
from ..step.joint import JointExchange
from ..step.step import Step
from ..tensors.nest import named_tensors, tensors_in
from .refused_step import RefusedStep


def locate(step: Step, case: RefusedStep) -> Diagnosis | None:
    """What this rank's part of the step has to do with it. Every rank must call it; None if the step raised."""
    if case.view.error is not None:
        return None
    assert isinstance(step.exchange, JointExchange)
    watch = _Watch(step.model)
    step.transaction.rewind()
    with watch, step.exchange.reports_kept():
        step.attempt(case.window, watch)
    step.undo(case.view.loss_scale)
    found = _in_data(case.window) or _in_state(case) or watch.found or _in_loss(watch.losses)
    if found is None:
        return Diagnosis(healthy=True)
    found.replay = Replay(True, None)
    return found


class _Watch:
    """Hooks on every module: the first, in time, that made something non-finite out of finite inputs."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.found: Diagnosis | None = None
        self.losses: list[Tensor] = []
        """Of each micro-batch, on this rank."""
        self._micro_batch = 0
        self._in_backward = False
        self._last_finite = LOSS
        """The last module whose gradient was finite."""
        self._hooks = ExitStack()

    def forward(self, micro_batch: int) -> None:
        self._micro_batch, self._in_backward = micro_batch, False

    def backward(self, loss: Tensor) -> None:
        self.losses.append(loss)
        self._in_backward = True

    def __enter__(self) -> _Watch:
        for name, module in self._modules.items():
            self._hooks.callback(module.register_forward_hook(self._hook(name)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _hook(self, name: str) -> Any:
        def watch(module: nn.Module, args: Any, output: Any) -> None:
            if self.found is not None:
                return
            outputs = [leaf for leaf in tensors_in(output) if leaf.is_floating_point()]
            inputs = [leaf for leaf in tensors_in(args) if leaf.is_floating_point()]
            if any(map(kind_of, outputs)) and not any(map(kind_of, inputs)):
                self.found = self._made_by(name, inputs, outputs)
            for leaf in outputs:
                if leaf.requires_grad:
                    leaf.register_hook(lambda gradient: self._gradient_seen(name, gradient))  # type: ignore[no-untyped-call]

        return watch

    def _made_by(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Diagnosis:
        kind = type(self._modules[name]).__name__
        origin = Origin(
            phase="forward",
            module=name,
            module_type=kind,
            inputs=[statistics(f"input {index}", tensor) for index, tensor in enumerate(inputs)],
            outputs=[statistics(f"output {index}", tensor) for index, tensor in enumerate(outputs)],
        )
        samples = sorted({row for tensor in outputs for row in _bad_rows(tensor)})
        explanation = f"the first non-finite value comes out of {name or 'the model'} ({kind}), whose inputs are finite"
        return Diagnosis(
            signal="loss",
            micro_batch=self._micro_batch,
            origin=origin,
            cause=Cause("unknown", explanation),
            samples=samples,
        )

    def _gradient_seen(self, name: str, gradient: Tensor) -> None:
        if self.found is not None or not self._in_backward:
            return
        if not kind_of(gradient):
            self._last_finite = name
            return
        module = self._last_finite
        kind = type(self._modules[module]).__name__ if module in self._modules else None
        explanation = f"the first non-finite gradient comes out of the backward pass of {module or 'the model'}"
        self.found = Diagnosis(
            signal="gradients",
            micro_batch=self._micro_batch,
            origin=Origin(phase="backward", module=module, module_type=kind),
            cause=Cause("unknown", explanation),
            samples=_bad_rows(gradient),
        )


def _bad_rows(tensor: Tensor) -> list[int]:
    """Which entries of the first dimension hold something bad; none if all do."""
    bad = bad_positions(tensor)
    if bad is None or bad.dim() == 0:
        return []
    rows: list[int] = bad.flatten(1).any(1).nonzero().flatten().tolist() if bad.dim() > 1 else []
    return rows if len(rows) < len(tensor) else []


def _in_data(window: Sequence[Any]) -> Diagnosis | None:
    for index, batch in enumerate(window):
        for path, leaf in named_tensors(batch):
            if leaf.is_floating_point() and kind_of(leaf):
                explanation = f"batch field {path or '0'} already holds non-finite values when the step begins"
                origin = Origin(phase="data", op="data", name="input", module=DATA, inputs=[statistics(path, leaf)])
                cause = Cause("bad_input_data", explanation)
                return Diagnosis(signal="loss", micro_batch=index, origin=origin, cause=cause, samples=_bad_rows(leaf))
    return None


def _in_state(case: RefusedStep) -> Diagnosis | None:
    for verdict in case.decision.verdicts.values():
        for name, problem in verdict.bad_state.items():
            explanation = f"{name} is bad before the step begins: {problem}"
            origin = Origin(phase="params", module=name.rpartition(".")[0])
            return Diagnosis(signal="state", origin=origin, cause=Cause("corrupt_parameter", explanation))
    return None


def _in_loss(losses: Sequence[Tensor]) -> Diagnosis | None:
    for index, loss in enumerate(losses):
        if kind_of(loss):
            explanation = "every module's output is finite and the loss is not: it comes from the loss function"
            return Diagnosis(
                signal="loss",
                micro_batch=index,
                origin=Origin(phase="forward", module=LOSS),
                cause=Cause("unknown", explanation),
            )
    return None
