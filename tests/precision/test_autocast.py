"""Temporary casts and autocast turned off."""

from __future__ import annotations

import torch

from safetrain.precision.autocast import autocast_disabled


def test_autocast_is_off_inside_and_on_again_after() -> None:
    x = torch.ones(2, 2)
    with autocast_disabled(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
