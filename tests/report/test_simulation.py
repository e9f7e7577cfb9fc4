"""What the guards suspect on curves: made ones here, with noise, a trend and a tail like those of language models."""

import json
import math
import random

import pytest
from click.testing import CliRunner

from safetrain import SafeTrainer
from safetrain.cli.main import program
from safetrain.config import load_config
from safetrain.errors import DataError
from safetrain.report.curve import Point, read_curve
from safetrain.report.simulation import simulate


def curve(steps=3000, noise=0.025, tail=0.005, seed=0):
    """Falls from 11 to 3.3; neighbours differ by `noise`, and a few steps are far above."""
    rng = random.Random(seed)
    return [
        (3.2 + 7.8 * math.exp(-t / 150) + 1.0 / (1 + t / 400))
        * (1.0 + rng.gauss(0, noise) + (rng.random() < tail) * rng.expovariate(8.0))
        for t in range(steps)
    ]


def judged(losses, **options):
    points = [Point(step, loss) for step, loss in enumerate(losses)]
    return simulate(points, load_config({"guards": options}).guards).to_plain()


@pytest.mark.parametrize(("noise", "tail"), [(0.01, 0.0), (0.03, 0.01), (0.06, 0.02)])
def test_a_healthy_curve_has_hardly_any_suspects(noise, tail):
    found = judged(curve(noise=noise, tail=tail))
    assert found["steps"] == 3000
    assert len(found["suspects"]) <= 6
    assert found["rollback_suspects"] == []


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("start", range(300, 2700, 400))
def test_an_excursion_is_suspected_within_five_steps(noise, start):
    losses = curve(noise=noise)
    for t in range(60):
        losses[start + t] *= 1.0 + 0.3 * (1 - t / 60)
    assert any(start <= step < start + 5 for step in judged(losses[: start + 60])["suspects"])


@pytest.mark.parametrize("start", range(305, 2700, 400))
def test_a_plateau_is_suspected_within_a_hundred_steps(start):
    losses = curve()
    found = judged([*losses[:start], *(1.4 * loss for loss in losses[start : start + 100])])
    assert any(start <= step < start + 5 for step in found["suspects"])
    assert any(start <= step < start + 100 for step in found["rollback_suspects"])


def test_options_of_the_guards_count():
    losses = curve(noise=0.03)
    assert len(judged(losses, spike={"z": 0.7})["suspects"]) > len(judged(losses)["suspects"])
    assert judged(losses, spike=None)["suspects"] == []


WRITTEN = {
    "plain.csv": "loss,grad_norm\n3.0,1.5\n2.5,\n",
    "steps.csv": "step,loss,grad_norm,lr\n10,3.0,1.5,1e-3\n20,2.5,,1e-3\n",
    "wandb.csv": '"Step","fine-frog-7 - train/loss","fine-frog-7 - train/loss__MIN","fine-frog-7 - train/loss__MAX"\n10,3.0,3.0,3.0\n15,,,\n20,2.5,2.5,2.5\n',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_csv_files_of_several_kinds(tmp_path, name):
    (tmp_path / name).write_text(WRITTEN[name])
    points = read_curve(tmp_path / name)
    assert [point.loss for point in points] == [3.0, 2.5]
    assert [point.step for point in points] == ([0, 1] if name == "plain.csv" else [10, 20])
    assert math.isnan(points[1].grad_norm)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has no loss among a, b"),
        ("loss\nx\n", "line 2: 'x' is not a number"),
        ("loss\n", "holds no losses"),
        ("a - loss,b - loss\n1,2\n", "several losses"),
        ("", "has no loss"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(tmp_path, text, message):
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_curve(tmp_path / "c.csv")


def test_a_run_and_its_tensorboard_files(tmp_path, make_trainer):
    config = {"logging": {"console": "off", "tensorboard": True}, "loop": {"log_every": 1, "max_steps": 12}}
    from small import make_batches

    result = make_trainer(cls=SafeTrainer, config=config, train_data=make_batches(12), run_dir=tmp_path / "run").fit()
    for source in (result.run_dir, max(result.run_dir.glob("*tfevents*"), key=lambda path: path.stat().st_size)):
        points = read_curve(source)
        assert [point.loss for point in points] == pytest.approx(result.losses)
        assert all(point.grad_norm > 0 for point in points)


def test_damaged_lines_of_a_journal_are_left_out(tmp_path):
    step = {"event": "step", "step": 0, "loss": 1.0}
    wrong = [{"step": {}}, {"step": None}, {"step": 1e999}, {"loss": []}, {"loss": "x"}, {"event": {}}]
    lines = [json.dumps({**step, **change}) for change in wrong]
    text = "\n".join([json.dumps(step), *lines, "[1]", "3", "[" * 100_000, '{"event": "step"}', '{"even'])
    (tmp_path / "journal.jsonl").write_text(text)
    assert read_curve(tmp_path) == [
        Point(0, 1.0, pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True))
    ]


def test_the_command(tmp_path):
    losses = curve(600)
    losses[400] = 100.0
    (tmp_path / "c.csv").write_text("\n".join(["loss", *map(str, losses)]))
    run = CliRunner().invoke(program, ["simulate", str(tmp_path / "c.csv"), "--json"])
    assert json.loads(run.output) == {"steps": 600, "suspects": [400], "rollback_suspects": [], "clips": []}
    plot = tmp_path / "c.png"
    run = CliRunner().invoke(
        program, ["simulate", str(tmp_path / "c.csv"), "guards.rollback=null", "--plot", str(plot)]
    )
    assert "400  spike     loss 100 is" in run.output
    assert plot.stat().st_size > 1000
