"""How long does a save block training, compared with writing the same bytes directly? See `scripts/bench_checkpoint --help`."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from safetrain import SafeTrainer
from safetrain.checkpoint import CheckpointStore, Saver
from safetrain.checkpoint.state import TrainState

LIMITS = {"sync": 1.3, "async": 0.35}


def make_trainer(megabytes: int, directory: Path) -> SafeTrainer:
    """A model whose weights and Adam moments together have about this size."""
    width = int((megabytes * 2**20 / 12 / 4) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    trainer = SafeTrainer(
        model,
        loss_fn=lambda model, batch: model(batch).pow(2).mean(),
        train_data=[torch.randn(2, width)],
        config={
            "logging": {"console": "off", "tensorboard": False},
            "checkpoint": {"enabled": False, "snapshot_every": None},
        },
        run_dir=directory / "run",
    )
    trainer.fit()
    return trainer


def plain_write(state: TrainState, path: Path) -> float:
    begin = time.perf_counter()
    save_file(state.tensors, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def blocked(trainer: SafeTrainer, saver: Saver, step: int) -> float:
    """Seconds that the loop is blocked; background work is not timed."""
    begin = time.perf_counter()
    about = {"step": step, "num_committed": step, "epoch": 0, "time": "", "version": "bench", "metric": None}
    saver.save(TrainState.gather(trainer), about)
    seconds = time.perf_counter() - begin
    saver.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_checkpoint", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="safetrain-bench-", dir=arguments.directory))
    try:
        trainer = make_trainer(arguments.megabytes, directory)
        state = TrainState.gather(trainer)
        stores = {name: CheckpointStore(directory / name / "checkpoints") for name in LIMITS}
        for store in stores.values():
            store.directory.parent.mkdir()
        savers = {}
        for name, store in stores.items():
            tidy = lambda store=store: [shutil.rmtree(path) for path in store.paths()]  # noqa: E731
            savers[name] = Saver(store, name == "async", lambda path: None, tidy)
        times: dict[str, list[float]] = {"plain": [], "sync": [], "async": []}
        for index in range(arguments.rounds + 2):
            times["plain"].append(plain_write(state, directory / "plain.safetensors"))
            for name, saver in savers.items():
                times[name].append(blocked(trainer, saver, index))
    finally:
        shutil.rmtree(directory)
    # The first rounds warm up memory and disk. On a busy machine only the fastest rounds measure the cost.
    best = {name: min(seconds[2:]) for name, seconds in times.items()}
    middle = {name: statistics.median(seconds[2:]) for name, seconds in times.items()}
    print(
        f"state of {state.num_bytes / 2**20:.0f} MB, {arguments.rounds} interleaved rounds, {torch.get_num_threads()} threads"
    )
    print(f"{'':30}fastest round     median")
    print(f"  plain safetensors + fsync   {best['plain'] * 1e3:8.1f} ms {middle['plain'] * 1e3:8.1f} ms")
    good = True
    for name, limit in LIMITS.items():
        ratio = best[name] / best["plain"]
        good = good and ratio <= limit
        print(
            f"  {name:5} save, loop blocked    {best[name] * 1e3:8.1f} ms {middle[name] * 1e3:8.1f} ms    "
            f"ratio {ratio:.2f} (medians: {middle[name] / middle['plain']:.2f}), limit {limit}{'' if ratio <= limit else '   EXCEEDED'}"
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
