"""A framework that is missing or too old is named, with what to install."""

import pytest

from safetrain import UsageError
from safetrain.integrations.required import numbers, require


def test_missing():
    with pytest.raises(UsageError, match=r'not installed.\nTo fix: pip install "safetrain\[hf\]"'):
        require("no_such_framework", "1.0", "hf")


def test_too_old():
    with pytest.raises(UsageError, match=r"torch 99\.0 or newer, and 2"):
        require("torch", "99.0", "hf")


def test_new_enough():
    assert require("torch", "2.0", "hf").startswith("2.")
    assert numbers("5.23.0.dev1") == (5, 23, 0)
