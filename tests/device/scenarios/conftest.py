"""The test device, installed for this process, and what the scenarios share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import backend
import pytest
import torch
from backend import KNOBS, NAME, counted

backend.install()


@pytest.fixture(autouse=True)
def obedient_device():
    yield
    KNOBS.reset()


@pytest.fixture
def on_device(make_trainer):
    """A trainer on the test device; `loop` and other sections of the config are merged with that."""

    def make(*args, loop=None, config=None, **parts):
        sections = {**(config or {}), "loop": {"device": NAME, **(loop or {})}}
        return make_trainer(*args, config=sections, **parts)

    return make


@pytest.fixture
def waits_of():
    """Fits a trainer; the waits of each step and those of getting its window, both with their lines."""

    def fit(trainer):
        steps, windows = [], []
        run_step, next_window = trainer.run_step, trainer._next_window

        def counting_step(window):
            with counted() as waits:
                run_step(window)
            steps.append(waits)

        def counting_window():
            with counted() as waits:
                window = next_window()
            if window:
                windows.append(waits)
            return window

        trainer.run_step, trainer._next_window = counting_step, counting_window
        trainer.fit()
        return steps, windows

    return fit


@pytest.fixture
def device():
    return torch.device(NAME, 0)
