"""The machine that a run uses: its device and its processes, set up by accelerate. Ranks talk to each other through `link`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn

from ..errors import UsageError
from . import restarted, slurm
from .comm import Link
from .replicas import Replicas

_NOTHING = nullcontext()
OTHER_MESHES = "shard with FSDP2 only (loop.strategy=fsdp), or keep the loop that you have for it and guard that with safetrain.watch"
_OTHER_LAUNCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a mesh of several kinds of parallelism",
}


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


class Machine:
    def __init__(
        self, device: str = "auto", *, num_processes: int | None = None, rank_timeout_seconds: float = 600.0
    ) -> None:
        """`num_processes`: raise unless this many take part."""
        for variable, what in _OTHER_LAUNCHES.items():
            if os.environ.get(variable) == "true":
                raise UsageError(
                    f"accelerate was launched with {what}, which SafeTrainer does not do.\nTo fix: {OTHER_MESHES}."
                )
        slurm.announce()
        seconds = timedelta(seconds=rank_timeout_seconds)
        # Without `cpu`, accelerate does not let processes on a machine without a GPU find each other.
        on_cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
        restarted.join(on_cpu, seconds)
        timeout = InitProcessGroupKwargs(timeout=seconds)
        self._shared: Accelerator | None = None
        if _has_company():
            # Its state is that of the whole process: two trainers with different devices cannot share it.
            _check_launched()
            self._shared = Accelerator(
                cpu=on_cpu, mixed_precision="no", device_placement=False, kwargs_handlers=[timeout]
            )
        self.device = self._pick_device(device)
        self.rank: int = 0 if self._shared is None else self._shared.process_index
        self.world_size: int = 1 if self._shared is None else self._shared.num_processes
        self._check_num_processes(num_processes)
        self.link: Link | None = None
        """The other processes; None if there are none."""
        self.replicas: Replicas | None = None
        """The model on several processes, each with all of it; None otherwise."""
        if self.world_size > 1:
            self.link = Link(self.rank, self.world_size, self.device, rank_timeout_seconds)

    @property
    def _accelerator(self) -> Accelerator:
        assert self._shared is not None  # only asked for with several processes
        return self._shared

    def _pick_device(self, asked: str) -> torch.device:
        if asked == "auto":
            return _own_device() if self._shared is None else torch.device(self._shared.device)
        try:
            device = torch.device(asked)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"loop.device is {asked!r}, which this machine cannot use: {str(error).splitlines()[0]}\n"
                "To fix: use loop.device=auto, or cpu."
            ) from error
        if device.type != "cpu" and self._shared is not None and self._shared.num_processes > 1:
            return torch.device(self._shared.device)  # one device per process
        return device

    def _check_num_processes(self, num_processes: int | None) -> None:
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

    def check_launch(self, precision: str, shards_model: bool) -> None:
        """Raise if `accelerate launch` was asked for something else than the config."""
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not shards_model:
            raise UsageError(
                "accelerate was launched with FSDP, and loop.strategy is ddp: every process would hold the whole model.\n"
                "To fix: set loop.strategy=fsdp, or launch without --use_fsdp."
            )
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        launched = "fp32" if asked == "no" else asked
        if launched not in ("fp32", precision):
            raise UsageError(
                f"accelerate was launched with mixed precision {launched} but loop.precision is {precision}.\n"
                f"To fix: set loop.precision={launched}, or launch without --mixed_precision."
            )

    def replicate(self, model: nn.Module) -> nn.Module:
        """The model under DistributedDataParallel, to call in its place."""
        wrap: Callable[[], nn.Module] = partial(self._accelerator.prepare_model, model, device_placement=False)
        self.replicas = Replicas(wrap)
        assert self.replicas.model is not None
        return self.replicas.model

    def gradient_sync(self, model: nn.Module, sync: bool) -> AbstractContextManager[object]:
        """Inside, a backward shares its gradients with the other ranks only if `sync`."""
        return _NOTHING if sync or self.world_size == 1 else self._accelerator.no_sync(model)

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

    def close(self) -> None:
        """Let go of the other processes, in an order that does not hang: first the model that is tied to them."""
        if self.replicas is not None:
            self.replicas.close()
            self._accelerator.free_memory()  # it holds the model, too
        if self.link is not None:
            self.link.close()


def _has_company() -> bool:
    """Whether a launcher has started several processes, in one of the ways that accelerate knows."""
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
    if any(os.environ.get(name, "1") not in ("", "1") for name in sizes):
        return True
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _check_launched() -> None:
    """A launcher sets more than WORLD_SIZE. Without the rest accelerate sets some of it for good, and then fails."""
    if torch.distributed.is_initialized() or "MASTER_ADDR" in os.environ:
        return
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UsageError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but this process was started by no launcher: MASTER_ADDR is not set.\n"
            "To fix: start the run with torchrun --nproc-per-node N, or unset WORLD_SIZE."
        )


def _own_device() -> torch.device:
    """Of a process that is alone: the current accelerator, if there is one and accelerate was not launched for the CPU."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not torch.accelerator.is_available():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else found


def leave_process_group() -> None:
    """At the end of a program, after every machine was closed."""
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
