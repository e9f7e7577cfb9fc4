"""The parts of recipes, against values computed by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small import assert_same
from torch import nn
from torch.nn import functional as F

from safetrain.config import import_target

RECIPES = Path(__file__).parents[2] / "recipes"


def get(name: str):
    """`vae:VAE` from recipes/vae.py."""
    file, _, part = name.partition(":")
    return import_target(f"{RECIPES / file}.py:{part}")


# ---- tabular ---------------------------------------------------------------------------------------------------------


def test_both_forms_of_cross_entropy_agree_where_both_are_finite():
    model = get("tabular:MLP")(num_features=4)
    batch = torch.randn(16, 4), (torch.rand(16, 1) > 0.5).float()
    loss = get("tabular:classification_loss")
    safe, textbook = loss(model, batch), loss(model, batch, from_probabilities=True)
    torch.testing.assert_close(safe["loss"], textbook["loss"])
    assert safe["accuracy"] == textbook["accuracy"]
    model = nn.Linear(4, 1)
    nn.init.constant_(model.bias, 30.0)  # sigmoid(30) rounds to 1
    batch = torch.zeros(2, 4), torch.ones(2, 1)
    assert loss(model, batch)["loss"].isfinite()
    assert loss(model, batch, from_probabilities=True)["loss"].isnan()


def test_r2_is_one_for_perfect_and_zero_for_the_mean():
    loss = get("tabular:regression_loss")
    targets = torch.randn(50, 1)
    assert loss(nn.Identity().eval(), (targets, targets))["r2"] == 1
    mean = nn.Linear(1, 1)
    nn.init.zeros_(mean.weight)
    nn.init.constant_(mean.bias, targets.mean().item())
    assert loss(mean.eval(), (targets, targets))["r2"].item() == pytest.approx(0, abs=1e-5)


# ---- image -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "size", "stages"), [(1, 8, 2), (3, 64, 4)])
def test_resnet_takes_images_of_any_size(channels: int, size: int, stages: int):
    model = get("image:ResNet")(num_classes=5, channels=channels, width=8, stages=stages, blocks_per_stage=2)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 5)


# ---- vae -------------------------------------------------------------------------------------------------------------


def test_the_kl_of_the_standard_normal_is_zero():
    class Perfect(nn.Module):
        def forward(self, images):
            return torch.where(images > 0.5, 50.0, -50.0), torch.zeros(len(images), 3), torch.zeros(len(images), 3)

    images = (torch.rand(4, 1, 8, 8) > 0.5).float()
    losses = get("vae:negative_elbo")(Perfect(), (images, None))
    assert losses["kl"] == 0
    assert losses["loss"].item() == pytest.approx(0, abs=1e-6)


def test_the_kl_agrees_with_torch():
    model = get("vae:VAE")([1, 8, 8])
    images = torch.rand(4, 1, 8, 8)
    torch.manual_seed(1)
    _, mean, log_var = model(images)
    torch.manual_seed(1)
    kl = get("vae:negative_elbo")(model, (images, None))["kl"]
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, (0.5 * log_var).exp()), normal(0.0, 1.0)).sum(1).mean()
    torch.testing.assert_close(kl, expected)


# ---- lstm ------------------------------------------------------------------------------------------------------------


def test_windows_follow_each_other_and_evaluation_is_the_future():
    series = np.arange(100, dtype=np.float32)
    train, evaluation = (get("lstm:Windows")(series, split, history=10, horizon=3) for split in ("train", "eval"))
    assert (len(train), len(evaluation)) == (68, 8)
    step = train[0]["history"][1] - train[0]["history"][0]
    torch.testing.assert_close(train[0]["future"][0] - train[0]["history"][-1], step)
    assert evaluation[0]["history"][0] > train[len(train) - 1]["future"][-1]


def test_skill_of_the_naive_and_of_a_perfect_forecast():
    loss = get("lstm:forecast_loss")
    batch = {"history": torch.randn(5, 48), "future": torch.randn(5, 12)}

    class Fixed(nn.Module):
        def __init__(self, forecast):
            super().__init__()
            self.forecast = forecast

        def forward(self, history):
            return self.forecast

    assert loss(Fixed(batch["history"][:, 24:36]).eval(), batch)["skill"] == 0
    assert loss(Fixed(batch["future"]).eval(), batch)["skill"] == 1
    assert "skill" not in loss(Fixed(batch["future"]), batch)


# ---- contrastive -----------------------------------------------------------------------------------------------------


def test_info_nce_agrees_with_a_sum_over_pairs():
    embeddings, labels = F.normalize(torch.randn(6, 4), dim=1), torch.tensor([0, 0, 1, 1, 1, 2])
    similarity = (embeddings @ embeddings.T / 0.5).tolist()
    terms = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        total = math.log(sum(math.exp(similarity[i][j]) for j in others))
        terms += [total - similarity[i][j] for j in others if labels[j] == labels[i]]
    expected = sum(terms) / len(terms)
    assert get("contrastive:info_nce")(embeddings, labels, 0.5).item() == pytest.approx(expected, rel=1e-5)


def test_triplet_loss_is_zero_beyond_the_margin():
    embeddings, labels = F.normalize(torch.eye(4)[[0, 0, 1, 1]], dim=1), torch.tensor([0, 0, 1, 1])
    assert get("contrastive:triplet")(embeddings, labels, margin=0.5) == 0
    assert get("contrastive:triplet")(embeddings, torch.tensor([0, 1, 0, 1]), margin=0.5).item() == pytest.approx(2.5)


def test_recall_counts_neighbours_of_the_same_class():
    images = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    model = nn.Identity().eval()
    loss = get("contrastive:contrastive_loss")
    assert loss(model, (F.normalize(images, dim=1), torch.tensor([0, 0, 1, 1])))["recall_at_1"] == 1
    assert loss(model, (F.normalize(images, dim=1), torch.tensor([0, 1, 1, 0])))["recall_at_1"] == 0


# ---- diffusion -------------------------------------------------------------------------------------------------------


def test_the_noise_schedule_goes_from_signal_to_noise():
    kept = get("diffusion:Diffusion")(nn.Identity(), num_times=100).kept
    assert kept[0] > 0.999
    assert 0 < kept[-1] < 1e-3
    assert (kept.diff() < 0).all()
    assert get("diffusion:Diffusion")(nn.Identity(), num_times=100, zero_terminal_snr=True).kept[-1] == 0


def test_the_sliced_distance_of_a_shift_is_its_mean_projection():
    points = torch.randn(500, 2)
    distance = get("diffusion:sliced_distance")
    assert distance(points, points[torch.randperm(500)]) < 1e-6
    assert distance(points, points + torch.tensor([1.0, 0.0]), 4096).item() == pytest.approx(2 / math.pi, abs=0.02)


def test_sampling_with_a_perfect_denoiser():
    class Knows(nn.Module):
        """All data is 0.7, so the noise is the rest."""

        def forward(self, noisy, time_features):
            kept = model.kept[model.times]
            return (noisy - kept.sqrt() * 0.7) / (1 - kept).sqrt()

    class Timed(get("diffusion:Diffusion")):  # type: ignore[misc]
        def forward(self, noisy, times):
            self.times = times[0]
            return super().forward(noisy, times)

    model = Timed(Knows(), num_times=50, mean=1.0, std=2.0)
    torch.testing.assert_close(model.sample((5, 3)), torch.full((5, 3), 0.7 * 2 + 1), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("size", "channels", "levels"), [(8, 1, 1), (7, 3, 2)])
def test_the_image_denoiser_keeps_the_shape(size: int, channels: int, levels: int):
    model = get("diffusion:Diffusion")(get("diffusion:ImageDenoiser")(channels, 8, levels), num_times=5)
    images = torch.rand(3, channels, size, size)
    assert model(images, torch.arange(3)).shape == images.shape
    losses = get("diffusion:diffusion_loss")(model.eval(), (images, torch.zeros(3)))
    assert losses["sliced_distance"].isfinite()


@pytest.mark.parametrize("kind", ["moons", "ring"])
def test_points_are_reproducible_and_in_range(kind: str):
    points = get("diffusion:Points")
    assert torch.equal(points(kind, 100, seed=3).points, points(kind, 100, seed=3).points)
    assert points(kind, 1000).points.abs().max() < 2
    with pytest.raises(ValueError, match="'moons' or 'ring'"):
        points("square", 10)


# ---- policy_gradient -------------------------------------------------------------------------------------------------


def test_the_pole_falls_and_the_environment_is_reset():
    cart_pole = get("policy_gradient:CartPole")(num_envs=3)
    for step in range(200):
        _, failed, over = cart_pole.step(np.ones(3, dtype=int))
        if over.any():
            assert failed.any()
            assert np.abs(cart_pole.state[over]).max() <= 0.05
            assert 5 < step < 15  # pushed in one direction, a pole falls within a quarter of a second
            return
    pytest.fail("no pole fell")


def test_the_physics_of_one_push():
    cart_pole = get("policy_gradient:CartPole")(num_envs=1)
    cart_pole.state = np.zeros((1, 4))
    cart_pole.step(np.array([1]))
    angular = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    linear = 10 / 1.1 - 0.05 * angular / 1.1
    np.testing.assert_allclose(cart_pole.state[0], [0, 0.02 * linear, 0, 0.02 * angular])


def test_a_truncated_episode_is_not_a_failure():
    cart_pole = get("policy_gradient:CartPole")(num_envs=1, max_steps=1)
    _, failed, over = cart_pole.step(np.array([1]))
    assert over.all()
    assert not failed.any()


def test_stored_log_probabilities_are_those_of_the_behaviour_policy():
    logits = torch.tensor([[4.0, 0.0]]).repeat(2000, 1)
    rollouts = get("policy_gradient:Rollouts")(exploration=0.5)
    actions, log_probs = rollouts.act(logits)
    share = (actions == 1).float().mean().item()
    assert share == pytest.approx(log_probs[actions == 1][0].exp().item(), abs=0.04)
    assert share > 0.2
    _, forgetful = get("policy_gradient:Rollouts")(exploration=0.5, forget_exploration=True).act(logits)
    assert forgetful.min().exp().item() == pytest.approx(0.018, abs=0.001)


def test_advantages_without_a_critic_are_discounted_returns():
    rollouts = get("policy_gradient:Rollouts")(num_envs=1, horizon=3, discount=0.5, trace=1.0)
    no, zeros = torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, 1)
    experience = {"values": zeros, "rewards": torch.ones(3, 1), "over": no, "failed": no}
    assert rollouts.advantages(experience, torch.zeros(1)).flatten().tolist() == [1.75, 1.5, 1.0]


def test_rollouts_resume_from_a_saved_state():
    def rollouts():
        made = get("policy_gradient:Rollouts")(num_envs=3, horizon=8, batch_size=5, num_passes=2)
        made.policy = policy
        return made

    def take(data, count):
        """Batches of as many rollouts as it takes."""
        batches = []
        while len(batches) < count:
            for batch in data:
                batches.append(batch)
                if len(batches) == count:
                    break
        return batches

    policy = get("policy_gradient:ActorCritic")()
    first, second = rollouts(), rollouts()
    take(first, 13)  # in the middle of the second rollout
    state = first.state_dict()
    expected = take(first, 20)
    second.load_state_dict(state)
    assert_same(expected, take(second, 20))


def test_the_physics_equal_gymnasiums():
    pytest.importorskip("gymnasium")
    theirs = get("policy_gradient:GymEnvironments")("CartPole-v1", num_envs=4)
    ours = get("policy_gradient:CartPole")(num_envs=4)
    ours.state = theirs.observe().astype(np.float64)
    for action in (1, 0, 1, 1, 0):
        actions = np.full(4, action)
        one, other = ([part.tolist() for part in envs.step(actions)] for envs in (ours, theirs))
        assert one == other
        np.testing.assert_allclose(ours.observe(), theirs.observe(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("package", "part", "arguments", "message"),
    [
        (
            "gymnasium",
            "policy_gradient:Rollouts",
            {"env": "Acrobot-v1"},
            r"needs gymnasium\. To fix: pip install gymnasium",
        ),
        ("transformers", "finetune_hf:build_model", {"vocab_size": 256}, r"pip install 'safetrain\[hf\]'"),
    ],
)
def test_without_a_package_the_message_says_what_to_install(monkeypatch, package, part, arguments, message):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=message):
        get(part)(**arguments)


# ---- finetune_hf -----------------------------------------------------------------------------------------------------


def test_only_the_answer_has_labels():
    data = get("finetune_hf:Instructions")("train", max_length=32)
    example = data.examples[0]
    sample = data[0]
    learned = sample["labels"] != -100
    assert bytes(sample["labels"][learned].tolist()).decode() == example["answer"] + "\n"
    assert bytes(sample["input_ids"][sample["attention_mask"] == 1].tolist()).decode() == (
        example["prompt"] + example["answer"] + "\n"
    )
    long = get("finetune_hf:Instructions")("train", max_length=32, long_prompts=[0])[0]
    assert (long["labels"] == -100).all()
    assert long["attention_mask"].all()
