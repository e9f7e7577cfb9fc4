"""Writes files below the current directory, and collects what is wrong with a config."""

from pathlib import Path

import pytest

from safetrain import ConfigError
from safetrain.config import load_config


def write(name, text):
    path = Path.cwd() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems_of(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.problems
