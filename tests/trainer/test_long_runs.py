"""A long run neither slows down nor grows: what is kept per step is bounded, or on disk."""

import gc
import json
import sys
from functools import partial

import pytest
import torch
from small import make_batches
from torch import nn

from safetrain import SafeTrainer

NUM_STEPS = 20_000
SGD = partial(torch.optim.SGD, lr=1e-3)


@pytest.mark.slow
def test_memory_does_not_grow_over_twenty_thousand_steps(make_trainer):
    """The losses are one array, part of the result: eight bytes for each step, and no object."""
    counts, blocks = [], []

    class Watched(SafeTrainer):
        def on_commit(self, view):
            if view.step % (NUM_STEPS // 10) == NUM_STEPS // 10 - 1:
                self.run.telemetry._flush()
                gc.collect()
                counts.append(len(gc.get_objects()))
                blocks.append(sys.getallocatedblocks())

    config = {"loop": {"max_steps": NUM_STEPS, "device": "cpu"}, "checkpoint": {"every_steps": NUM_STEPS // 2}}
    trainer = make_trainer(nn.Linear(6, 1), Watched, optimizer=SGD, train_data=make_batches(10), config=config)
    result = trainer.fit()
    assert result.steps == NUM_STEPS
    # The first tenth fills windows and snapshots; later ones only end at other moments of the 50 steps between two of them.
    assert max(counts[2:]) - min(counts[2:]) < 2000
    assert max(blocks[2:]) - min(blocks[2:]) < 4000  # of memory; a single float kept of each step would be 14,000
    assert trainer.run.losses.itemsize * len(trainer.run.losses) == 8 * NUM_STEPS
    with open(result.run_dir / "journal.jsonl") as journal:
        assert sum(json.loads(line)["event"] == "step" for line in journal) == NUM_STEPS


def test_late_steps_make_no_more_calls_than_early_ones(make_trainer):
    """Counted, not timed: calls of Python functions inside a step."""
    calls = []

    class Counted(SafeTrainer):
        def run_step(self, window):
            count = 0

            def note(frame, event, argument):
                nonlocal count
                count += event == "call"

            sys.setprofile(note)
            try:
                super().run_step(window)
            finally:
                sys.setprofile(None)
            calls.append(count)

    config = {"loop": {"max_steps": 600, "device": "cpu"}}
    make_trainer(nn.Linear(6, 1), Counted, optimizer=SGD, train_data=make_batches(10), config=config).fit()
    early, late = calls[100:200], calls[500:600]
    assert min(late) <= min(early) + 2
    assert sum(late) <= 1.05 * sum(early)  # steps with a loss above the usual one take a few more
    assert sorted(late)[50] < 310  # Python calls in a healthy step, torch's own included
