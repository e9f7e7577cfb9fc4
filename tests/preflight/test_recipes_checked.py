"""Healthy recipes pass within seconds; for their broken twins the check finds what can be found before training."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from recipe_runs import load, needs

from safetrain import SafeTrainer, check
from safetrain.cli.fit import _trainer_class
from safetrain.preflight import FAIL, WARN, CheckReport

CONFIGS = Path(__file__).parents[2] / "configs"
BROKEN = {path.stem for path in CONFIGS.glob("*.yaml") if "#   breaks   " in path.read_text(encoding="utf-8")}
HEALTHY = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - BROKEN)
QUICK = ("tabular", "tabular_broken", "lstm_broken")
FOUND = {
    "char_gpt_broken": "finite_steps",
    "contrastive_broken": "finite_steps",
    "diffusion_broken": "finite_steps",
    "finetune_hf_broken": "empty_samples",
    "image_broken": "amp_headroom",
    "lstm_broken": "learning_rate",
    "quickstart": "empty_samples",
    "tabular_broken": "data_finite",
    "vae_broken": "finite_steps",
}
LATER = {"tabular_classification_broken", "policy_gradient_broken"}
"""Their fault needs a model that has learned something; the linter sees the first of them in the source."""


def marked(names: list[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def checked(name: str, budget: float = 10.0) -> CheckReport:
    needs(name)
    config = load(CONFIGS / f"{name}.yaml")
    return check(_trainer_class(config, SafeTrainer)(config=config), budget=budget)


@pytest.mark.parametrize("name", marked(HEALTHY))
def test_a_healthy_recipe_passes_in_seconds(name: str) -> None:
    begin = time.process_time()
    report = checked(name)
    assert [(each.name, each.reason) for each in report.with_status(FAIL)] == []
    assert {each.name for each in report.with_status(WARN)} <= {"lint"}
    assert time.process_time() - begin < 15


@pytest.mark.parametrize("name", marked(sorted(FOUND)))
def test_the_fault_of_a_broken_twin_is_found_before_training(name: str) -> None:
    found = checked(name, budget=60)[FOUND[name]]  # also on a machine that is busy
    assert found.status == FAIL
    assert found.fix


def test_every_twin_is_accounted_for() -> None:
    assert FOUND.keys() | LATER == BROKEN
    assert not FOUND.keys() & LATER
