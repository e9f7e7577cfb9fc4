"""A long run of tiny steps: does a step get slower, does memory grow?  python -m speed.soak NUM_STEPS"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from safetrain import SafeTrainer

from . import workloads


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(num_steps: int) -> None:
    torch.set_num_threads(1)
    work, tenths, seen, begin = workloads.make("mlp"), [], 0, time.perf_counter()

    class Watched(SafeTrainer):
        def on_commit(self, view: Any) -> None:
            nonlocal seen, begin
            seen += 1
            if seen % (num_steps // 10) == 0:
                now = time.perf_counter()
                journal = (self.run.dir / "journal.jsonl").stat().st_size / 2**20
                microseconds = (now - begin) / (num_steps // 10) * 1e6
                tenths.append({"us_per_step": microseconds, "resident_mb": resident_mb(), "journal_mb": journal})
                begin = now

    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-3, fused=True)
        config = {"loop": {"max_steps": num_steps, "log_every": 50, "device": "cpu"}}
        parts = {"loss_fn": workloads.cross_entropy, "optimizer": optimizer, "train_data": work.batches}
        result = Watched(work.model, config=config, run_dir=f"{folder}/run", **parts).fit()
    json.dump({"steps": result.steps, "incidents": len(result.incidents), "tenths": tenths}, out)


if __name__ == "__main__":
    main(int(sys.argv[1]))
