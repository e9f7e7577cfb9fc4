"""What does a guarded step of several processes cost, compared with a plain DDP loop? See `scripts/bench_ddp --help`."""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LIMIT = 1.05
MIN_STEP_SECONDS = 0.020


class Net(nn.Module):
    """A few wide layers, with buffers, because DDP broadcasts those of a BatchNorm."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
        self.body = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class PlainLoop:
    """The loop written by hand with accelerate: forward, backward, clip, step."""

    def __init__(self, model: nn.Module, batches: list[Any]) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        self._batches, self._index = batches, 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = self._batches[self._index % len(self._batches)]
            self._index += 1
            self._optimizer.zero_grad()
            loss = loss_of(self._model, batch)
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            loss.item()  # as a loop that logs its loss


def measure(rank: int, options: argparse.Namespace, pipe: Any) -> None:
    """Alternates blocks of guarded steps and of plain steps, in the same process, with the same batches."""
    from safetrain import SafeTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, per_turn = options.width, options.steps
    model = Net(width, options.depth)
    batches = [(torch.randn(options.batch, width), torch.randn(options.batch, 1)) for _ in range(8 * options.processes)]
    plain = PlainLoop(copy.deepcopy(model), batches)
    turns: dict[str, list[float]] = {"guarded": [], "plain": []}

    class Timed(SafeTrainer):
        began = 0.0

        def on_commit(self, view: Any) -> None:
            if (view.step + 1) % per_turn:
                return
            turns["guarded"].append((time.perf_counter() - self.began) / per_turn)
            begin = time.perf_counter()
            plain.run(per_turn)
            turns["plain"].append((time.perf_counter() - begin) / per_turn)
            self.began = time.perf_counter()

    num_steps = per_turn * (options.rounds + 2)  # the first two turns warm up
    Timed.began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        Timed(
            model,
            loss_fn=loss_of,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
            train_data=batches * (num_steps // 8 + 1),
            config={
                "loop": {"device": "cpu", "max_steps": num_steps},
                "guards": {"clip": {"mode": "norm", "max_norm": 1.0}},
                "logging": {"console": "off", "tensorboard": False},
                "checkpoint": {"enabled": False, "save_final": False},
            },
            run_dir=Path(directory) / "run",
        ).fit()
    if rank == 0:
        pipe.send({name: times[2:] for name, times in turns.items()})
    pipe.close()
    os._exit(0)  # skips the teardown of the process group, which two sets of replicas share


def child(rank: int, port: int, options: argparse.Namespace, pipe: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.processes),
        "LOCAL_WORLD_SIZE": str(options.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    measure(rank, options, pipe)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_ddp", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    import multiprocessing

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=child, args=(r, store.port, options, theirs)) for r in range(options.processes)]
    for process in ranks:
        process.start()
    times = ours.recv()
    for process in ranks:
        process.join()
    ratios = [one / other for one, other in zip(times["guarded"], times["plain"], strict=True)]
    best = min(times["guarded"]) / min(times["plain"])
    print(f"{options.processes} processes, {options.rounds} turns of {options.steps} steps of each loop, in turns")
    for name, seconds in times.items():
        print(
            f"  {name:8} {1000 * min(seconds):7.2f} ms per step at best, {1000 * statistics.median(seconds):7.2f} ms median"
        )
    print(
        f"  guarded / plain: {statistics.median(ratios):.3f} median of the turns' ratios, {best:.3f} best against best"
    )
    if min(times["plain"]) < MIN_STEP_SECONDS:
        print(f"  steps are shorter than {1000 * MIN_STEP_SECONDS:.0f} ms: raise --width, --depth or --batch")
        return 2
    return 0 if statistics.median(ratios) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
