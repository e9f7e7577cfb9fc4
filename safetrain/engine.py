"""The machine a run uses: device, precision, loss scaler and processes. The one place that talks across ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from . import islands
from .config.schema import LoopConfig
from .errors import UsageError

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Only deterministic algorithms inside; an operation that has none raises."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


class Engine:
    """Autocast and the loss scaler are torch's own on every device: accelerate would silently ignore fp16 on the CPU."""

    def __init__(self, loop: LoopConfig) -> None:
        self._accelerator = Accelerator(cpu=loop.device == "cpu", mixed_precision="no", device_placement=False)
        self.device = self._pick_device(loop.device)
        self.rank: int = self._accelerator.process_index
        self.world_size: int = self._accelerator.num_processes
        self.precision = loop.precision
        self._autocast_dtype = AUTOCAST[loop.precision]
        self._model: nn.Module | None = None
        self._scaler = torch.amp.GradScaler(self.device.type) if loop.precision == "fp16" else None
        self._check_in_effect()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def _pick_device(self, asked: str) -> torch.device:
        if asked == "auto":
            return torch.device(self._accelerator.device)
        try:
            device = torch.device(asked)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"loop.device is {asked!r}, which this machine cannot use: {str(error).splitlines()[0]}\n"
                "To fix: use loop.device=auto, or cpu."
            ) from error
        if device.type == "cuda" and self._accelerator.num_processes > 1:
            return torch.device(self._accelerator.device)  # one GPU per process
        return device

    def _check_in_effect(self) -> None:
        """Raise when what was asked for is not what will happen."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != self.world_size:
            raise UsageError(
                f"WORLD_SIZE is {world} but {self.world_size} process(es) take part.\n"
                "To fix: start the run with torchrun --nproc-per-node N, or unset WORLD_SIZE."
            )
        launched = {"no": "fp32"}.get(
            os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), os.environ.get("ACCELERATE_MIXED_PRECISION")
        )
        if launched not in ("fp32", self.precision):
            raise UsageError(
                f"accelerate was launched with mixed precision {launched} but loop.precision is {self.precision}.\n"
                f"To fix: set loop.precision={launched}, or launch without --mixed_precision."
            )
        if self._autocast_dtype is not None:
            x = torch.ones(2, 2, device=self.device)
            with self.autocast():
                effective = (x @ x).dtype
            if effective != self._autocast_dtype:
                raise UsageError(
                    f"loop.precision={self.precision} is not in effect on {self.device.type}: a product came out as {effective}.\n"
                    "To fix: use loop.precision=fp32 on this device."
                )
        if self._scaler is not None and not self._scaler.is_enabled():
            raise UsageError(
                f"the fp16 loss scaler is not available on {self.device.type}.\nTo fix: use loop.precision=bf16 or fp32."
            )

    def prepare(self, model: nn.Module, compile_with: bool | str = False) -> nn.Module:
        """What to call instead of the model: compiled and distributed as asked. The model itself is moved, not copied."""
        if self.precision == "fp16" and any(p.dtype == torch.float16 for p in model.parameters()):
            raise UsageError(
                "loop.precision=fp16 needs parameters in float32 (autocast converts them), and this model has some in float16.\n"
                "To fix: call model.float() first."
            )
        model.to(self.device)
        self._model = called = model
        if compile_with:
            called = torch.compile(model, backend="inductor" if compile_with is True else compile_with)  # type: ignore[assignment]
        if self.world_size > 1:
            called = self._accelerator.prepare_model(called, device_placement=False)
        return called

    def autocast(self) -> AbstractContextManager[object]:
        """For a training step: around all of it, or inside the model only if the loss is an fp32 island."""
        return islands.autocast(self._model, self.device.type, self._autocast_dtype)

    @contextmanager
    def gradient_sync(self, model: nn.Module, sync: bool) -> Iterator[None]:
        """Inside, a backward shares its gradients with the other ranks only if `sync`."""
        with nullcontext() if sync or self.world_size == 1 else self._accelerator.no_sync(model):
            yield

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """The gradients of all these parameters, the optimizer's and others, in their true size to the end of the step."""
        if self._scaler is None:
            return
        self._scaler.unscale_(optimizer)
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if others := [p for p in parameters if id(p) not in moved and p.grad is not None]:
            # The scaler knows gradients by their optimizer. This one is never stepped.
            self._for_unmoved = torch.optim.SGD(others, lr=0.0)
            self._scaler.unscale_(self._for_unmoved)

    def loss_scale(self) -> Tensor | None:
        """fp16: the current loss scale, on the device."""
        return None if self._scaler is None else self._scaler.scale(torch.ones((), device=self.device))

    def update_scale(self) -> None:
        """fp16: let the scaler react to this step: lower after an overflow, higher after a long run without."""
        if self._scaler is None:
            return
        if any(state["found_inf_per_device"] for state in self._scaler._per_optimizer_states.values()):
            self._scaler.update()
        else:  # there was no gradient to learn from
            self._scaler.update(self._scaler.get_scale())

    def keep_scale(self, scale: float) -> None:
        """fp16: forget this step; the scale stays as it was."""
        if self._scaler is not None and self._scaler._per_optimizer_states:
            self._scaler.update(scale)

    def scaler_state(self) -> dict[str, Any] | None:
        """fp16: the loss scale and its history. Waits for the device."""
        return None if self._scaler is None else self._scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)

    def share(self, numbers: Tensor) -> Tensor:
        """Mean over all ranks, equal on each, in one collective. NaN or Inf of any rank is every rank's."""
        if self.world_size == 1:
            return numbers
        return self._accelerator.reduce(numbers, reduction="mean")  # type: ignore[no-any-return]

    def wait_for_everyone(self) -> None:
        self._accelerator.wait_for_everyone()
