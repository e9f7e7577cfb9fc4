"""Every broken twin: where it goes wrong, what must be found, and how far it may end from the healthy run.

The healthy run is the twin with the fix in its header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from recipe_runs import load, needs, run

from safetrain import FitResult
from safetrain.cli.recipes import all_recipes, bundled_dir


@dataclass(frozen=True)
class Twin:
    name: str
    first_step: int | tuple[int, int]
    """The attempted step of the first incident; a range if it depends on rounding."""
    signal: str
    phase: str
    code: str
    """Part of the blamed line; for bad data, of the first line that used it."""
    cause: str
    metric: str
    distance: float
    """Between the best evaluation and the healthy run's, at most."""
    guard: str = "finite"
    """The guard that refuses the step first."""
    off: tuple[str, ...] = ()
    """Overrides that disable guards which refuse the step before it is non-finite, so that there is an origin to find."""

    @property
    def fix(self) -> list[str]:
        """The overrides in the line `the fix` of the header."""
        text = (bundled_dir() / "configs" / f"{self.name}.yaml").read_text(encoding="utf-8")
        found = re.search(rf"^#   (?:the fix|without fault) +safetrain fit {self.name} (.+)$", text, re.M)
        assert found is not None, "the header must show the change that fixes it"
        return found[1].split()


# fmt: off
TWINS = [
    Twin("tabular_broken", 0, "loss", "data", "return self.layers(features)", "bad_input_data", "r2", 0.02),
    Twin("tabular_classification_broken", (100, 400), "loss", "forward", "torch.log(1 - p)", "log_of_nonpositive", "accuracy", 0.02),
    Twin("image_broken", 0, "loss", "forward", "self.stem(images)", "fp16_overflow", "accuracy", 0.05),
    Twin("char_gpt_broken", 40, "loss", "forward", "weights = F.softmax(scores, dim=-1)", "neg_inf_mask", "loss", 0.05),
    Twin("quickstart", 46, "loss", "forward", "nll.sum(1) / real.sum(1)", "division_by_zero", "loss", 0.05),
    Twin("vae_broken", 0, "loss", "forward", "deviation = torch.exp(0.5 * log_var)", "exp_overflow", "loss", 0.8),
    Twin("lstm_broken", (2, 25), "loss", "forward", "F.mse_loss(forecast, future)", "divergence", "skill", 0.1, guard="spike", off=("guards.spike=null", "guards.stall=null")),
    Twin("contrastive_broken", 22, "loss", "forward", "std = raw.std(0)", "empty_reduction", "recall_at_1", 0.02),
    Twin("diffusion_broken", 29, "loss", "forward", "snr.clamp(max=max_snr) / snr", "division_by_zero", "sliced_distance", 0.05),
    Twin("policy_gradient_broken", (100, 1400), "grad_norm", "backward", "ratio = torch.exp(", "masked_branch_gradient", "mean_return", 100),
    Twin("finetune_hf_broken", 12, "loss", "forward", "loss = F.cross_entropy(", "empty_reduction", "loss", 0.4),
]
# fmt: on

# contrastive_broken takes the standard deviation of one value.
pytestmark = pytest.mark.filterwarnings(r"ignore:std\(\). degrees of freedom is <= 0:UserWarning")


@pytest.fixture(params=TWINS, ids=lambda twin: twin.name)
def twin(request: pytest.FixtureRequest) -> Twin:
    found: Twin = request.param
    needs(found.name)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    """Results by name and overrides; each config is trained once."""

    @cache
    def result(name: str, *overrides: str) -> FitResult:
        directory: Path = tmp_path_factory.mktemp(name)
        return run(load(name, *overrides), directory / "run")

    return result


def recipe_source(name: str) -> str:
    """The file that holds the recipe's model."""
    model = load(name).model
    assert model is not None
    return model["_target_"].partition(":")[0]


def test_every_broken_config_has_a_row_and_every_recipe_a_broken_config():
    assert sorted(twin.name for twin in TWINS) == sorted(recipe.name for recipe in all_recipes() if recipe.breaks)
    sources = {recipe_source(recipe.name) for recipe in all_recipes() if not recipe.breaks}
    assert sources == {recipe_source(recipe.breaks) for recipe in all_recipes() if recipe.breaks}


@pytest.mark.slow
def test_first_incident(twin: Twin, results):
    incident = results(twin.name).incidents[0]
    first, last = twin.first_step if isinstance(twin.first_step, tuple) else (twin.first_step, twin.first_step)
    assert first <= incident.step <= last
    assert incident.trigger.guard == twin.guard
    if isinstance(twin.first_step, int):
        assert incident.trigger.signal == twin.signal


@pytest.mark.slow
def test_the_fix_in_the_header_works_and_without_it_as_much_is_learned(twin: Twin, results):
    broken, healthy = results(twin.name), results(twin.name, *twin.fix)
    assert healthy.healthy
    assert broken.status == "done"
    assert broken.steps == healthy.steps
    assert broken.best is not None
    assert healthy.best is not None
    assert abs(broken.best[twin.metric] - healthy.best[twin.metric]) <= twin.distance


@pytest.mark.slow
def test_origin_and_cause_are_found(twin: Twin, results):
    incidents = results(twin.name, *twin.off).incidents
    incident = next(i for i in incidents if i.trigger.guard == "finite" and i.trigger.signal == twin.signal)
    assert incident.origin.phase == twin.phase
    assert twin.code in (incident.origin.code or "")
    assert incident.cause.label == twin.cause
    assert incident.fix
