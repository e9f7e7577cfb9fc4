"""An actor-critic that learns to balance a pole by clipped policy gradients (PPO). Run it with `safetrain fit policy_gradient`.

The data depends on the model: `Rollouts` plays with the current policy, which `PolicyTrainer` gives to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain import SafeTrainer

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, SECONDS_PER_STEP = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


class CartPole:
    """A vectorised CartPole environment. A state is (position, velocity, angle, angular velocity).

    The physics of Barto, Sutton and Anderson (1983): the action 0 or 1 pushes left or right, every step gives a reward of 1,
    and an episode ends when the pole falls, the cart leaves the track, or after `max_steps`.
    """

    num_observations, num_actions = 4, 2

    def __init__(self, num_envs: int, max_steps: int = 500, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.max_steps = max_steps
        self.state = self.generator.uniform(-0.05, 0.05, (num_envs, 4))
        self.age = np.zeros(num_envs, dtype=int)

    def state_dict(self) -> dict[str, Any]:
        random = self.generator.bit_generator.state
        return {"state": self.state.tolist(), "age": self.age.tolist(), "random": random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.age = np.array(state["state"]), np.array(state["age"])
        self.generator.bit_generator.state = state["random"]

    def observe(self) -> np.ndarray:
        return self.state.astype(np.float32)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards, whether an episode failed, and whether it is over; environments whose episode is over are reset."""
        _, velocity, angle, spin = self.state.T
        total = CART_MASS + POLE_MASS
        push = (np.where(actions == 1, FORCE, -FORCE) + POLE_MASS * HALF_LENGTH * spin**2 * np.sin(angle)) / total
        inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * np.cos(angle) ** 2 / total)
        turn = (GRAVITY * np.sin(angle) - np.cos(angle) * push) / inertia
        acceleration = push - POLE_MASS * HALF_LENGTH * turn * np.cos(angle) / total
        self.state = self.state + SECONDS_PER_STEP * np.stack([velocity, acceleration, spin, turn], 1)
        self.age += 1
        failed = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > math.radians(12))
        over = failed | (self.age >= self.max_steps)
        self.state[over] = self.generator.uniform(-0.05, 0.05, (int(over.sum()), 4))
        self.age[over] = 0
        return np.ones(len(over), dtype=np.float32), failed, over


class GymEnvironments:
    """Environments of gymnasium with vector observations and discrete actions.

    Their state cannot be saved: after a resume they start new episodes.
    """

    def __init__(self, name: str, num_envs: int, seed: int = 0) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ImportError(
                f"{name} needs gymnasium. To fix: pip install gymnasium, or use env: cartpole."
            ) from error
        options = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self.envs = gymnasium.make_vec(name, num_envs, vectorization_mode="sync", vector_kwargs=options)
        self.num_observations = self.envs.single_observation_space.shape[0]
        self.num_actions = int(self.envs.single_action_space.n)
        self.observation, _ = self.envs.reset(seed=seed)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def observe(self) -> np.ndarray:
        return self.observation.astype(np.float32)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.observation, rewards, failed, cut, _ = self.envs.step(actions)
        return rewards.astype(np.float32), failed, failed | cut


def make_environments(env: str, num_envs: int, seed: int) -> CartPole | GymEnvironments:
    return CartPole(num_envs, seed=seed) if env == "cartpole" else GymEnvironments(env, num_envs, seed)


class ActorCritic(nn.Module):
    """Maps observations to the logits of the actions and the value of the state."""

    def __init__(self, num_observations: int = 4, num_actions: int = 2, width: int = 64) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(num_observations, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)
            )
            for out in (num_actions, 1)
        )

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(observations), self.critic(observations).squeeze(-1)


class Rollouts:
    """Batches of experience: plays `horizon` steps in all environments, then yields the experience `num_passes` times.

    `exploration` is the probability of a random action. The stored log-probability of an action must be that of the policy
    which chose it, exploration included; `forget_exploration` stores the log-probability of the network instead (a bug).
    """

    def __init__(
        self,
        env: str = "cartpole",
        num_envs: int = 16,
        horizon: int = 64,
        batch_size: int = 256,
        num_passes: int = 4,
        discount: float = 0.99,
        trace: float = 0.95,
        exploration: float = 0.0,
        forget_exploration: bool = False,
        seed: int = 0,
    ) -> None:
        self.envs = make_environments(env, num_envs, seed)
        self.num_envs, self.horizon, self.batch_size, self.num_passes = num_envs, horizon, batch_size, num_passes
        self.discount, self.trace = discount, trace
        self.exploration, self.forget_exploration = exploration, forget_exploration
        self.generator = torch.Generator().manual_seed(seed)
        self.policy: nn.Module | None = None
        """The model; set by the trainer."""
        self.experience: dict[str, Tensor] = {}
        self.remaining: list[Tensor] = []
        """Rows of the batches that are not yet used."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self.remaining:
            self.experience = self.play()
            for _ in range(self.num_passes):
                order = torch.randperm(len(self.experience["actions"]), generator=self.generator)
                self.remaining += order.split(self.batch_size)
        while self.remaining:
            rows = self.remaining.pop(0)
            yield {name: values[rows] for name, values in self.experience.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to continue exactly here; part of the checkpoint."""
        return {
            "envs": self.envs.state_dict(),
            "random": self.generator.get_state(),
            "experience": dict(self.experience),
            "remaining": list(self.remaining),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.envs.load_state_dict(state["envs"])
        self.generator.set_state(state["random"])
        self.experience, self.remaining = dict(state["experience"]), list(state["remaining"])

    @torch.no_grad()
    def play(self) -> dict[str, Tensor]:
        assert self.policy is not None
        device = next(self.policy.parameters()).device
        columns: dict[str, list[Tensor]] = {}
        for _ in range(self.horizon):
            observations = torch.from_numpy(self.envs.observe())
            logits, values = (output.cpu() for output in self.policy(observations.to(device)))
            actions, log_probs = self.act(logits)
            rewards, failed, over = self.envs.step(actions.numpy())
            step = {
                "observations": observations,
                "actions": actions,
                "log_probs": log_probs,
                "values": values,
                "rewards": torch.from_numpy(rewards),
                "over": torch.from_numpy(over),
                "failed": torch.from_numpy(failed),
            }
            for name, value in step.items():
                columns.setdefault(name, []).append(value)
        _, last_values = self.policy(torch.from_numpy(self.envs.observe()).to(device))
        experience = {name: torch.stack(steps) for name, steps in columns.items()}
        experience["advantages"] = self.advantages(experience, last_values.cpu())
        kept = ("observations", "actions", "log_probs", "values", "advantages")
        return {name: experience[name].flatten(0, 1) for name in kept}

    def act(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities."""
        behaviour = (1 - self.exploration) * logits.softmax(1) + self.exploration / logits.shape[1]
        actions = torch.multinomial(behaviour, 1, generator=self.generator)
        log_probs = logits.log_softmax(1) if self.forget_exploration else behaviour.log()
        return actions.squeeze(1), log_probs.gather(1, actions).squeeze(1)

    def advantages(self, experience: dict[str, Tensor], last_values: Tensor) -> Tensor:
        """Generalised advantage estimation."""
        values = torch.cat([experience["values"], last_values[None]])
        result = torch.zeros_like(experience["values"])
        running = torch.zeros(self.num_envs)
        for t in reversed(range(self.horizon)):
            goes_on = (~experience["over"][t]).float()
            # An episode truncated by max_steps did not fail: bootstrap from its value.
            cut = experience["over"][t] & ~experience["failed"][t]
            following = torch.where(cut, values[t], values[t + 1] * goes_on)
            surprise = experience["rewards"][t] + self.discount * following - values[t]
            running = surprise + self.discount * self.trace * goes_on * running
            result[t] = running
        return result


class PolicyTrainer(SafeTrainer):
    """A SafeTrainer whose data is generated by its own model."""

    def build_data(self) -> Any:
        train, evaluation = super().build_data()
        for rollouts in (train, evaluation):
            if rollouts is not None:
                rollouts.policy = self.model
        return train, evaluation


class Episodes:
    """For evaluation: plays one episode per environment with the most probable actions, and yields the returns as one batch."""

    def __init__(self, env: str = "cartpole", num_envs: int = 16, seed: int = 1) -> None:
        self.env, self.num_envs, self.seed = env, num_envs, seed
        self.policy: nn.Module | None = None

    @torch.no_grad()
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        assert self.policy is not None
        device = next(self.policy.parameters()).device
        envs = make_environments(self.env, self.num_envs, self.seed)
        returns, playing = np.zeros(self.num_envs, dtype=np.float32), np.ones(self.num_envs, dtype=bool)
        while playing.any():
            logits, _ = self.policy(torch.from_numpy(envs.observe()).to(device))
            rewards, _, over = envs.step(logits.argmax(1).cpu().numpy())
            returns += rewards * playing
            playing &= ~over
        yield {"returns": torch.from_numpy(returns)}


def actor_critic_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    max_ratio: float = 0.2,
    critic_weight: float = 0.5,
    entropy_bonus: float = 0.01,
) -> dict[str, Tensor]:
    """Clipped policy gradient, squared error of the critic, and an entropy bonus; in evaluation the mean return."""
    if "returns" in batch:
        mean_return = batch["returns"].mean()
        return {"loss": -mean_return, "mean_return": mean_return}
    logits, values = model(batch["observations"])
    log_p = logits.log_softmax(1)
    chosen = log_p.gather(1, batch["actions"][:, None]).squeeze(1)
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    ratio = torch.exp(chosen - batch["log_probs"])
    clipped = ratio.clamp(1 - max_ratio, 1 + max_ratio)
    actor = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    critic = F.mse_loss(values, batch["values"] + batch["advantages"])
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    loss = actor + critic_weight * critic - entropy_bonus * entropy
    return {"loss": loss, "actor": actor, "critic": critic, "entropy": entropy, "ratio": ratio.detach().max()}
