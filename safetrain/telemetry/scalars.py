"""The numbers of a step, by the tags of TensorBoard and trackers. NaN is logged like any other number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .sink import StepRecord
from .vitals import Vitals

LAYOUT = {
    "Run health": {
        "loss": ["loss/train", "loss/eval"],
        "gradient norm": ["health/grad_norm", "health/grad_norm_p50", "health/grad_norm_p95", "health/grad_norm_p99"],
        "status: 0 healthy, 1 recovering, 2 refused, 3 rolled back, 4 stopped": ["health/status"],
        "steps that were not finite, skipped, rolled back": [
            "health/nonfinite_losses",
            "health/nonfinite_gradients",
            "health/skipped",
            "health/rollbacks",
        ],
        "learning rate": ["optim/lr"],
        "scale of the learning rate, share of clipped steps": ["health/lr_scale", "health/clip_fraction"],
        "loss, in deviations from the recent ones": ["health/loss_z"],
        "update-to-weight ratio": ["health/update_size"],
    }
}
"""Charts of TensorBoard's custom scalars: the whole state of a run on one page."""


def step_scalars(record: StepRecord, vitals: Vitals) -> dict[str, float]:
    """`health/` comes first, because tags are sorted by name."""
    view, scale = record.view, record.decision.lr_scale
    values = {
        "health/status": vitals.status,
        "health/nonfinite_losses": vitals.num_bad_losses,
        "health/nonfinite_gradients": vitals.num_bad_gradients,
        "health/skipped": vitals.num_skipped,
        "health/rollbacks": vitals.num_rollbacks,
        "health/grad_norm": view.grad_norm,
        **{f"health/grad_norm_p{p}": norm for p, norm in vitals.grad_norm_percentiles().items()},
        "health/lr_scale": scale,
        "loss/train": record.loss,
        **{f"metric/{name}": value for name, value in view.metrics.items()},
        "optim/lr": view.lr * scale,
        **{f"optim/lr_group_{index}": lr * scale for index, lr in enumerate(view.lrs) if index > 0},
    }
    known = {"health/clip_fraction": vitals.clip_fraction, "perf/steps_per_second": vitals.steps_per_second}
    if len(vitals.recent_losses) >= 10:
        values["health/loss_z"] = vitals.loss_z  # NaN for a NaN loss
    if view.limits.norm < view.grad_norm:
        values["health/clipped_to"] = view.limits.norm / view.grad_norm
    if view.update_size is not None:
        values["health/update_size"] = view.update_size
    if view.loss_scale != 1.0:
        values |= {"precision/loss_scale": view.loss_scale, "precision/overflows": vitals.num_overflows}
    known |= {tag: gauge() for tag, gauge in vitals.gauges.items()}
    return values | {tag: value for tag, value in known.items() if not math.isnan(value)}


def eval_scalars(metrics: Mapping[str, float]) -> dict[str, float]:
    return {("loss/eval" if k == "loss" else f"metric/eval_{k}"): v for k, v in metrics.items() if k != "step"}


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """The settings of a config, one by one under their dotted names; what is not set is left out."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{key}.")
        elif isinstance(value, (bool, int, float, str)):
            flat[f"{prefix}{key}"] = value
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat


HYPERPARAMETERS = ("seed", "model", "data", "loss", "optimizer", "scheduler", "loop")
"""Sections of a config that define the training."""


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, float | str]:
    """What distinguishes one training from another, as TensorBoard's table of hyperparameters takes it."""
    chosen = flat_settings({name: settings[name] for name in HYPERPARAMETERS if settings.get(name) is not None})
    del chosen["loop.log_every"]
    return {
        name: str(value).lower() if isinstance(value, bool) or value != value else value
        for name, value in chosen.items()
    }
