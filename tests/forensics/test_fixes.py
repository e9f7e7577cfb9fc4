"""The functions that a fix names exist, when `safetrain.safe` is there to look at."""

from __future__ import annotations

import re

import pytest

from safetrain.forensics import find_bad_batches, fixes


def test_every_function_named_in_a_fix_exists() -> None:
    safe = pytest.importorskip("safetrain.safe")
    named = {name for text in fixes._SAFE.values() for name in re.findall(r"safe\.(\w+)\(", text)}
    assert len(named) > 10
    assert named <= set(dir(safe))


def test_scanning_is_offered_among_the_safe_building_blocks() -> None:
    safe = pytest.importorskip("safetrain.safe")
    assert safe.find_bad_batches is find_bad_batches
