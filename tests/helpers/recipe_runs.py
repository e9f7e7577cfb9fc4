"""Trains recipes as `safetrain fit` does, without output."""

import importlib.util

import pytest

from safetrain import TrainingStopped
from safetrain.cli.fit import Progress
from safetrain.config import load_config

QUIET = ["logging.console=off", "logging.tensorboard=false"]


def needs(name):
    """Skip the test if the recipe uses a package that is not installed."""
    if name.startswith("finetune_hf") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")


def load(source, *overrides):
    return load_config(source, [*QUIET, *overrides])


def run(config, run_dir):
    """Train; also returns the result of a run that a guard stopped."""
    try:
        return Progress().train(config, str(run_dir))
    except TrainingStopped as stopped:
        return stopped.result
