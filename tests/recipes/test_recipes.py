"""Every healthy recipe reaches the metric in its header, and is bit-identical to a plain loop and after a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from recipe_runs import load, needs
from small import assert_same

from safetrain import Interrupted, SafeTrainer
from safetrain.cli.recipes import all_recipes, read_recipe
from safetrain.config import Config, import_target

STEPS = {
    **{"tabular": 60, "tabular_classification": 60, "image": 30, "char_gpt": 4, "vae": 50, "lstm": 45},
    **{"contrastive": 30, "diffusion": 20, "diffusion_images": 8, "policy_gradient": 40, "finetune_hf": 10},
}
"""For the comparison with a plain loop, by recipe; more than one epoch where epochs are short."""


@pytest.fixture(params=STEPS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    needs(found)
    return found


def test_every_recipe_is_tested():
    assert sorted(STEPS) == sorted(recipe.name for recipe in all_recipes() if not recipe.breaks)


@pytest.mark.slow
def test_reaches_the_metric_in_its_header(name: str, train):
    metric, relation, number = read_recipe(name).goal()
    result = train(name)
    assert result.healthy
    assert result.best is not None
    reached = result.best[metric]
    assert reached >= number if relation == ">=" else reached <= number


def test_weights_equal_those_of_a_plain_loop(name: str, tmp_path: Path):
    config = load(name, f"loop.max_steps={STEPS[name]}", "loop.eval_every=7", "~guards.clip")
    by_hand = build(config, tmp_path / "by_hand")
    plain_loop(by_hand, STEPS[name], config.loop.grad_accum)
    trainer = build(config, tmp_path / "trained")
    assert trainer.fit().healthy
    assert_same(by_hand.model.state_dict(), trainer.model.state_dict())
    assert_same(by_hand.optimizer.state_dict(), trainer.optimizer.state_dict())


def build(config: Config, run_dir: Path) -> SafeTrainer:
    cls = SafeTrainer if config.trainer is None else import_target(config.trainer["_target_"])
    assert issubclass(cls, SafeTrainer)
    return cls(config=config, run_dir=run_dir)


def plain_loop(parts: SafeTrainer, num_steps: int, accumulate: int) -> None:
    """The loop without safetrain, with the same model, data, loss, optimizer and schedule."""
    model, optimizer, scheduler = parts.model, parts.optimizer, parts.scheduler
    step = 0
    while True:
        while window := parts.stream.take(accumulate):
            optimizer.zero_grad()
            for batch in window:
                output = parts.training_step(model, batch)
                loss = output["loss"] if isinstance(output, dict) else output
                (loss / len(window) if len(window) > 1 else loss).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step == num_steps:
                return
        parts.stream.next_epoch()


def test_the_seed_determines_the_run(name: str, tmp_path: Path):
    weights = []
    for index, seed in enumerate((3, 3, 4)):
        torch.manual_seed(index)  # earlier random state does not matter
        trainer = build(load(name, f"seed={seed}", "loop.max_steps=2"), tmp_path / str(index))
        trainer.fit()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_resumed_run_ends_with_the_same_weights(name: str, tmp_path: Path):
    config = load(name, f"loop.max_steps={STEPS[name]}")
    whole = build(config, tmp_path / "whole")
    whole.fit()
    interrupted = build(config, tmp_path / "run")
    interrupted.on_commit = lambda view: os.kill(os.getpid(), signal.SIGTERM) if view.step == STEPS[name] // 2 else None
    with pytest.raises(Interrupted):
        interrupted.fit()
    resumed = build(config, tmp_path / "run")
    assert resumed.fit(resume=True).steps == STEPS[name]
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
