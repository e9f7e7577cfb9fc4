"""The loops that are compared. Each calls `gate.step()` after every optimizer step, and runs until the gate is through."""

from __future__ import annotations

import importlib.util
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from .gate import Gate
from .workloads import Workload, cross_entropy

Loop = Callable[[Workload, Gate, bool], None]
DEFAULT_GUARDS = ("finite", "clip", "backoff", "spike", "rollback", "stall")


def adamw(work: Workload, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(work.model.parameters(), lr=1e-3, fused=fused or None)


def endless(batches: list[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(batches))


def plain(work: Workload, gate: Gate, fused: bool, clip: bool = False, check: bool = False) -> None:
    model, optimizer = work.model, adamw(work, fused)
    for batch in itertools.islice(endless(work.batches), gate.num_steps):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        if clip:
            norm = clip_grad_norm_(model.parameters(), 1.0)
        if not check or (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            optimizer.step()
        gate.step()


def watched(work: Workload, gate: Gate, fused: bool) -> None:
    from safetrain import watch

    model, optimizer = work.model, adamw(work, fused)
    with (
        tempfile.TemporaryDirectory() as run_dir,
        watch(model, optimizer, loss_fn=cross_entropy, run_dir=f"{run_dir}/run") as guard,
    ):
        for batch in itertools.islice(endless(work.batches), gate.num_steps):
            with guard.step(batch):
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            gate.step()


def with_accelerate(work: Workload, gate: Gate, fused: bool, is_watched: bool = False) -> None:
    from accelerate import Accelerator

    from safetrain import watch

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(work.model, adamw(work, fused))
    with tempfile.TemporaryDirectory() as run_dir, ExitStack() as stack:
        guard = stack.enter_context(watch(model, optimizer, run_dir=f"{run_dir}/run")) if is_watched else None
        for batch in itertools.islice(endless(work.batches), gate.num_steps):
            with nullcontext() if guard is None else guard.step(batch):
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            gate.step()


def safetrain(work: Workload, gate: Gate, fused: bool, guards: Any = None, config: Any = None) -> None:
    from safetrain import SafeTrainer

    class Gated(SafeTrainer):
        def on_commit(self, view: Any) -> None:
            gate.step()

    with tempfile.TemporaryDirectory() as run_dir:
        loop = {"max_steps": gate.num_steps, "log_every": 50, "device": "cpu", "keep_memory": False, **(config or {})}
        trainer = Gated(
            work.model,
            loss_fn=cross_entropy,
            optimizer=adamw(work, fused),
            train_data=work.batches,
            config={
                "loop": loop,
                "guards": guards or {},
                "checkpoint": {"enabled": False, "save_final": False},  # nobody else writes any
            },
            run_dir=f"{run_dir}/run",
        )
        gate.watch(trainer)
        result = trainer.fit()
        if result.skipped or result.rollbacks:
            raise SystemExit(f"the run was not healthy: {result.summary()}")
        gate.notes = {
            "snapshot_mb": (result.snapshots or {}).get("bytes", 0) / 2**20,
            "num_snapshots": (result.snapshots or {}).get("num_taken", 0),
        }


def lightning(work: Workload, gate: Gate, fused: bool, guards: Sequence[Any] = ()) -> None:
    import logging

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.model, batch)

        def configure_optimizers(self) -> Any:
            return adamw(work, fused)

    class Gating(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gate.step()

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return endless(work.batches)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(max_steps=gate.num_steps, accelerator="cpu", devices=1, callbacks=[*guards, Gating()], **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(Endless(), batch_size=None))


def transformers(work: Workload, gate: Gate, fused: bool, guards: Sequence[Any] = ()) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Gating(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.step()

    class Ours(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return cross_entropy(model, (inputs["inputs"], inputs["targets"]))

        def get_train_dataloader(self) -> Any:
            return [{"inputs": x, "targets": y} for x, y in work.batches]

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=gate.num_steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            max_grad_norm=0.0,
            use_cpu=True,
        )
        Ours(work.model, arguments, callbacks=[*guards, Gating()], optimizers=(adamw(work, fused), None)).train()


def ignite(work: Workload, gate: Gate, fused: bool) -> None:
    from ignite.engine import Engine, Events

    model, optimizer = work.model, adamw(work, fused)

    def update(engine: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(update)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: gate.step())
    engine.run(endless(work.batches), max_epochs=1, epoch_length=gate.num_steps)


def guarded(host: str) -> Loop:
    """The loop of a framework with its callback of safetrain."""

    def run_guarded(work: Workload, gate: Gate, fused: bool) -> None:
        callback = importlib.import_module(f"safetrain.integrations.{host}").SafetrainCallback
        with tempfile.TemporaryDirectory() as run_dir:
            {"lightning": lightning, "transformers": transformers}[host](
                work, gate, fused, [callback(run_dir=f"{run_dir}/run")]
            )

    return run_guarded


ALL_GUARDS = {"activations": {}, "batch": {}, "anomaly": {}, "islands": {}}
VARIANTS: dict[str, Loop] = {
    "plain": plain,
    "plain again (A/A)": plain,
    "plain + clip": lambda *a: plain(*a, clip=True),
    "plain + clip + finite check": lambda *a: plain(*a, clip=True, check=True),
    "accelerate + clip": with_accelerate,
    "safetrain": safetrain,
    "safetrain, all guards": lambda *a: safetrain(*a, guards=ALL_GUARDS),
    "safetrain, guards off": lambda *a: safetrain(*a, guards=dict.fromkeys(DEFAULT_GUARDS)),
    "lightning": lightning,
    "transformers": transformers,
    "ignite": ignite,
}
FUSED: dict[str, Loop] = {
    "plain + clip, fused": VARIANTS["plain + clip"],
    "safetrain, fused": safetrain,
    "safetrain, fused, host_read_every 10": lambda *a: safetrain(*a, config={"host_read_every": 10}),
}
HOSTS: dict[str, tuple[str, Loop]] = {
    "raw loop + clip, watched": ("plain + clip", watched),
    "accelerate + clip, watched": ("accelerate + clip", lambda *a: with_accelerate(*a, is_watched=True)),
    "lightning, guarded": ("lightning", guarded("lightning")),
    "transformers, guarded": ("transformers", guarded("transformers")),
}
"""Loops of others with guards, and the same loop without."""
PEERS = ("lightning", "transformers", "ignite")


def installed() -> list[str]:
    """Names of all variants that can run here."""
    return [name for name in (*VARIANTS, *FUSED) if name not in PEERS or importlib.util.find_spec(name) is not None]


def run(name: str, work: Workload, gate: Gate, fused: bool) -> None:
    warnings.simplefilter("ignore")  # other trainers' advice
    if name in HOSTS:
        HOSTS[name][1](work, gate, fused)
    elif name in FUSED:
        FUSED[name](work, gate, True)
    else:
        VARIANTS[name](work, gate, fused)
