"""The machine a run uses: device, precision, loss scaler and processes. Ranks talk to each other through its `link`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from .._private.allocator import keep_freed_memory
from ..config.schema import LoopConfig
from ..distributed.link import Link
from ..distributed.replicas import Replicas
from ..errors import UsageError
from ..precision import islands
from ..precision.compiled import note_compiled
from ..tensors.rng import seed_everything
from ..tensors.sharded import is_sharded, island_names, keep_spread, shard_model

_NOTHING = nullcontext()
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
        timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=loop.rank_timeout_seconds))
        # Unless it is told so, accelerate does not let processes on a machine without a GPU find each other.
        on_cpu = loop.device == "cpu" or (loop.device == "auto" and not torch.accelerator.is_available())
        self._accelerator = Accelerator(
            cpu=on_cpu, mixed_precision="no", device_placement=False, kwargs_handlers=[timeout]
        )
        self.device = self._pick_device(loop.device)
        self.rank: int = self._accelerator.process_index
        self.world_size: int = self._accelerator.num_processes
        self.precision, self._loop = loop.precision, loop
        self._autocast_dtype = AUTOCAST[loop.precision]
        self._model: nn.Module | None = None
        self._scaler = torch.amp.GradScaler(self.device.type) if loop.precision == "fp16" else None
        self.link: Link | None = None
        """The other processes; None if there are none."""
        self.replicas: Replicas | None = None
        """The model on several processes, each with all of it; None otherwise."""
        self._check_in_effect(loop.num_processes)
        if loop.keep_memory and self.device.type == "cpu":
            keep_freed_memory()
        if self.world_size > 1:
            self.link = Link(self.rank, self.world_size, self.device, loop.rank_timeout_seconds)

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

    def _check_in_effect(self, num_processes: int | None) -> None:
        """Raise when what was asked for is not what will happen."""
        for asked, by in ((num_processes, "loop.num_processes"), (_asked_of_accelerate(), "accelerate launch")):
            if asked is not None and asked != self.world_size:
                raise UsageError(
                    f"{by} asks for {asked} process(es) but {self.world_size} take part (accelerate launch --cpu starts one, "
                    "whatever --num_processes says).\nTo fix: start the run with safetrain fit --nproc N or torchrun "
                    f"--nproc-per-node N{', or change loop.num_processes' if by.startswith('loop') else ''}."
                )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != self.world_size:
            raise UsageError(
                f"WORLD_SIZE is {world} but {self.world_size} process(es) take part.\n"
                "To fix: start the run with torchrun --nproc-per-node N, or unset WORLD_SIZE."
            )
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and self._loop.strategy != "fsdp":
            raise UsageError(
                "accelerate was launched with FSDP, and loop.strategy is ddp: every process would hold the whole model.\n"
                "To fix: set loop.strategy=fsdp, or launch without --use_fsdp."
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

    @property
    def replays_alone(self) -> bool:
        """Whether one rank can run the model without the others: not if its forward pass itself talks to them."""
        model = self._model
        if self.link is None or model is None:
            return True
        return not (is_sharded(model) or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()))

    def prepare(
        self,
        model: nn.Module,
        compile_with: bool | str = False,
        optimizer: Optimizer | None = None,
        guards: Iterable[Any] = (),
    ) -> nn.Module:
        """What to call instead of the model: compiled and distributed as asked. The model itself is moved, not copied.

        With `loop.strategy=fsdp` its parameters become other objects; an optimizer that has the old ones gets the new ones.
        """
        if self.precision == "fp16" and any(p.dtype == torch.float16 for p in model.parameters()):
            raise UsageError(
                "loop.precision=fp16 needs parameters in float32 (autocast converts them), and this model has some in float16.\n"
                "To fix: call model.float() first."
            )
        model.to(self.device)
        if is_sharded(model):
            keep_spread(model)
        elif self.world_size > 1 and self._loop.strategy == "fsdp":
            islands_in = island_names(model, guards)
            dtype = AUTOCAST[self._loop.shard_dtype]
            shard_model(model, self.device, self._loop.shard_blocks, islands_in, dtype, optimizer)
        self._model = called = model
        if compile_with:
            called = torch.compile(model, backend="inductor" if compile_with is True else compile_with)  # type: ignore[assignment]
            note_compiled(model, called)
        if self.world_size > 1 and not is_sharded(model):
            wrap = partial(self._accelerator.prepare_model, called, device_placement=False)
            self.replicas = Replicas(wrap)
            assert self.replicas.model is not None
            called = self.replicas.model
        return called

    def autocast(self) -> AbstractContextManager[object]:
        """For a training step: around all of it, or inside the model only if the loss is an fp32 island."""
        if self._autocast_dtype is None:
            return _NOTHING
        return islands.autocast(self._model, self.device.type, self._autocast_dtype)

    def gradient_sync(self, model: nn.Module, sync: bool) -> AbstractContextManager[object]:
        """Inside, a backward shares its gradients with the other ranks only if `sync`."""
        return _NOTHING if sync or self.world_size == 1 else self._accelerator.no_sync(model)

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

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank; the same answer on all. All ranks must ask."""
        return flag if self.link is None else self.link.any(flag)

    def gather(self, what: Any) -> list[Any]:
        """What each rank gives, in their order, on every rank. All ranks must ask; slow."""
        return [what] if self.link is None else self.link.gather(what)

    def separate_random_streams(self) -> None:
        """From here on each rank draws its own random numbers; those of rank 0 are the ones of a single process."""
        if self.rank > 0:
            seed_everything((torch.initial_seed() + self.rank * 1_000_003) % 2**63)

    def wait_for_everyone(self) -> None:
        self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """Let go of the other processes, in an order that does not hang: first the model that is tied to them."""
        if self.replicas is not None:
            self.replicas.close()
            self._accelerator._models.clear()
        if self.link is not None:
            self.link.close()


def leave_process_group() -> None:
    """At the end of a program, after every engine was closed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()


def _asked_of_accelerate() -> int | None:
    """The number of processes on the command line of an `accelerate launch` that started this one, which may ignore it."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # another system
        return None
    return num_processes_asked(words)


def num_processes_asked(words: Sequence[str]) -> int | None:
    """Of a command line, if it is one of `accelerate launch`, by whatever name."""
    at_once = any(word.endswith(("accelerate-launch", "accelerate.commands.launch")) for word in words)
    in_two = "launch" in words and any("accelerate" in word for word in words[: words.index("launch")])
    if not at_once and not in_two:
        return None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in ("--num_processes", "--num-processes") and (value or following).isdigit():
            return int(value or following)
    return None
