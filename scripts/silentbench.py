"""Runs every case and says what was noticed, when, and with which cause. See scripts/silentbench."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass

# Some virtual machines announce AMX and then kill the process at its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from safetrain import TrainingStopped
from scripts.silentbench_cases import CASES, Case


@dataclass
class Score:
    name: str
    like: str
    expected: tuple[str, ...]
    labels: tuple[str, ...]
    """Of warnings and incidents, in their order."""
    first: int | None
    """The step at which something was said."""
    stopped: bool
    start: float
    end: float

    @property
    def is_right(self) -> bool:
        """Noticed with an exact cause; of a healthy run: nothing was said."""
        return bool(set(self.labels) & set(self.expected)) if self.expected else not self.labels


def run(case: Case, seed: int = 0) -> Score:
    torch.manual_seed(seed)
    problem = case.build()
    quiet = {"logging": {"console": "off", "tensorboard": False}, "checkpoint": {"enabled": False}}
    with tempfile.TemporaryDirectory() as directory:
        trainer = problem.trainer(
            problem.model,
            loss_fn=problem.loss,
            optimizer=problem.optimizer,
            train_data=problem.data,
            eval_data=problem.evaluation,
            scheduler=problem.scheduler,
            config={**quiet, **problem.config},
            run_dir=f"{directory}/run",
        )
        try:
            result, stopped = trainer.fit(), False
        except TrainingStopped as raised:
            result, stopped = raised.result, True
    said = [(warning["step"], warning["label"]) for warning in result.warnings]
    said += [(incident.step, incident.cause.label) for incident in result.incidents]
    said.sort()
    labels = tuple(dict.fromkeys(label for _, label in said))
    first = said[0][0] if said else None
    losses = result.losses
    return Score(case.name, case.like, case.expected, labels, first, stopped, losses[0], losses[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="names of cases, or of benchmarks that they are like")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    logging.getLogger("safetrain").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    chosen = [case for case in CASES if not asked.only or case.name in asked.only or case.like in asked.only]
    scores = []
    for case in chosen:
        scores.append(score := run(case))
        if not asked.json:
            verdict = "right" if score.is_right else ("other cause" if score.labels and score.expected else "WRONG")
            when = "" if score.first is None else f"step {score.first}"
            course = f"{score.start:.3g} -> {score.end:.3g}{' stopped' if score.stopped else ''}"
            print(
                f"{verdict:12} {score.like:12} {score.name:40} {when:9} {', '.join(score.labels):40} {course}",
                flush=True,
            )
    if asked.json:
        print(json.dumps([{**asdict(score), "is_right": score.is_right} for score in scores], indent=2))
        return
    totals, right = Counter(s.like for s in scores), Counter(s.like for s in scores if s.is_right)
    print("; ".join(f"{like}: {right[like]} of {total}" for like, total in totals.items()))
    sys.exit(0 if all(score.is_right for score in scores) else 1)


if __name__ == "__main__":
    main()
