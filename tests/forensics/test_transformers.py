"""Models that nobody tuned the rules on: randomly initialised ones of the transformers package, when it is installed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forensic_cases import incident_of
from torch import Tensor, nn

from safetrain.forensics import investigate

transformers = pytest.importorskip("transformers")


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def tokens() -> Tensor:
    return torch.randint(1, 50, (4, 12))


def test_healthy() -> None:
    ids = tokens()
    assert investigate(gpt2(), loss_fn, {"input_ids": ids, "labels": ids}) is None


def test_every_label_ignored() -> None:
    ids = tokens()
    incident = incident_of(gpt2(), loss_fn, {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    assert (incident.origin.name, incident.cause.label) == ("cross_entropy", "empty_reduction")


def test_bad_weight_deep_inside() -> None:
    model, ids = gpt2(), tokens()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[3, 3] = math.nan
    incident = incident_of(model, loss_fn, {"input_ids": ids, "labels": ids})
    assert (incident.origin.phase, incident.origin.module) == ("params", "transformer.h.1.mlp.c_proj")


def test_overflow_of_a_projection_in_half_precision() -> None:
    model, ids = gpt2(), tokens()
    with torch.no_grad():
        for name in ("c_fc", "c_proj"):
            getattr(model.transformer.h[0].mlp, name).weight.mul_(3e4)
    incident = incident_of(model, loss_fn, {"input_ids": ids, "labels": ids}, precision="fp16")
    assert (incident.origin.module, incident.cause.label) == ("transformer.h.0.mlp.c_proj", "fp16_overflow")
    assert "fp32_island" in [remedy.name for remedy in incident.remedies if remedy.finite]


def test_infinite_pixel() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    )
    pixels = torch.randn(4, 3, 16, 16)
    pixels[3, 0, 0, 0] = math.inf
    batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1, 0, 1])}
    incident = incident_of(transformers.ViTForImageClassification(config), loss_fn, batch)
    assert (incident.origin.phase, incident.samples) == ("data", [3])
