"""Trainings that are healthy and look odd: whatever interferes with them does harm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain.optim.optimizers import OptimizerGroup


@dataclass
class Task:
    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batches: list[Any]
    optimizer: Any
    scheduler: Any = None


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def xy(steps: int, size: int, g: torch.Generator, width: int = 8) -> list[tuple[Tensor, Tensor]]:
    w = torch.randn(width, 1, generator=g)
    found = []
    for _ in range(steps):
        x = torch.randn(size, width, generator=g)
        found.append((x, torch.tanh(x @ w) + 0.1 * torch.randn(size, 1, generator=g)))
    return found


def tiny_batches(steps: int, g: torch.Generator) -> Task:
    model = mlp(8, 32, 1)
    return Task(model, mse, xy(steps, 1, g), torch.optim.SGD(model.parameters(), lr=0.02))


def heavy_tails(steps: int, g: torch.Generator) -> Task:
    """Targets with Student's t noise of two degrees of freedom."""
    model = mlp(8, 32, 1)
    batches = []
    for x, y in xy(steps, 8, g):
        normal = torch.randn(8, 1, generator=g)
        chi = torch.randn(8, 2, generator=g).square().sum(1, keepdim=True)
        batches.append((x, y + 0.3 * normal / (chi / 2).sqrt()))
    return Task(model, mse, batches, torch.optim.SGD(model.parameters(), lr=0.005))


def lognormal_targets(steps: int, g: torch.Generator) -> Task:
    model = mlp(8, 32, 1)
    batches = [(x, torch.exp(1.5 * torch.randn(16, 1, generator=g) + y)) for x, y in xy(steps, 16, g)]
    return Task(model, mse, batches, torch.optim.Adam(model.parameters(), lr=1e-3))


def sparse_rewards(steps: int, g: torch.Generator) -> Task:
    """A value network: nearly all targets are zero, one batch in sixty holds a reward."""
    model = mlp(8, 32, 1)
    batches = []
    for index, (x, _) in enumerate(xy(steps, 16, g)):
        hit = (x[:, :1] > 0.5).float() if index % 60 == 41 else torch.zeros(16, 1)
        batches.append((x, 10.0 * hit))
    return Task(model, mse, batches, torch.optim.Adam(model.parameters(), lr=1e-3))


def dead_value_network(steps: int, g: torch.Generator) -> Task:
    """Clipped at zero, where all of its gradients are zero, until a reward comes."""
    model = mlp(8, 32, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.relu(F.mse_loss(model(x), y, reduction="none") - 0.5).mean() + 0.01

    batches = []
    for index, (x, _) in enumerate(xy(steps, 16, g)):
        batches.append((x, 5.0 * (x[:, :1] > 0.5).float() if index % 80 == 79 else torch.zeros(16, 1)))
    return Task(model, loss, batches, torch.optim.Adam(model.parameters(), lr=1e-3))


def q_learning(steps: int, g: torch.Generator) -> Task:
    """Bootstrapped from a copy that follows every 50 steps: the loss jumps each time."""

    class Q(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = mlp(4, 32, 3), mlp(4, 32, 3).requires_grad_(False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, s: Tensor) -> Tensor:
            return self.online(s)

    model = Q()
    model.target.load_state_dict(model.online.state_dict())

    def loss(model: Q, batch: Any) -> Tensor:
        s, a, r, s2 = batch
        if torch.is_grad_enabled():
            with torch.no_grad():
                if int(model.calls) % 50 == 0:
                    for to, of in zip(model.target.parameters(), model.online.parameters(), strict=True):
                        to.copy_(of)
                model.calls += 1
        future = r + 0.97 * model.target(s2).amax(1)
        return F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], future.detach())

    batches = []
    for _ in range(steps):
        s, a = torch.randn(32, 4, generator=g), torch.randint(3, (32,), generator=g)
        batches.append((s, a, (s[:, 0] * (a - 1)).sign().clamp_min(0), 0.9 * s + 0.3 * torch.randn(32, 4, generator=g)))
    return Task(model, loss, batches, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=2e-3))


def _adversarial(steps: int, g: torch.Generator, wasserstein: bool) -> Task:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.d = mlp(4, 32, 2), mlp(2, 32, 1)

    model = Pair()

    def loss(model: Pair, batch: Any) -> Tensor:
        real, z = batch
        fake = model.g(z)
        if wasserstein:
            with torch.no_grad():
                for weight in model.d.parameters():
                    weight.clamp_(-0.3, 0.3)
            critic = model.d(fake.detach()).mean() - model.d(real).mean()
        else:
            critic = F.softplus(-model.d(real)).mean() + F.softplus(model.d(fake.detach())).mean()
        model.d.requires_grad_(False)
        score = model.d(fake)
        model.d.requires_grad_(True)
        return critic + (-score.mean() if wasserstein else F.softplus(-score).mean())

    batches = []
    for _ in range(steps):
        angle = 2 * math.pi * torch.rand(32, 1, generator=g)
        batches.append((2 * torch.cat([angle.cos(), angle.sin()], 1), torch.randn(32, 4, generator=g)))
    parts = {"generator": (model.g, 1e-3), "critic": (model.d, 2e-3)}
    adams = {name: torch.optim.Adam(m.parameters(), lr=lr, betas=(0.5, 0.99)) for name, (m, lr) in parts.items()}
    group = OptimizerGroup(**adams)
    return Task(model, loss, batches, group)


def gan(steps: int, g: torch.Generator) -> Task:
    return _adversarial(steps, g, wasserstein=False)


def wgan(steps: int, g: torch.Generator) -> Task:
    return _adversarial(steps, g, wasserstein=True)


def warm_restarts(steps: int, g: torch.Generator) -> Task:
    model = mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, max(steps // 5, 2))
    return Task(model, mse, xy(steps, 16, g), optimizer, scheduler)


def one_cycle(steps: int, g: torch.Generator) -> Task:
    model = mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    return Task(model, mse, xy(steps, 16, g), optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps + 1))


def task_switch(steps: int, g: torch.Generator) -> Task:
    """Half way the targets become others, and ten times as large."""
    model = mlp(8, 64, 1)
    batches = xy(steps, 16, g)
    w = torch.randn(8, 1, generator=g)
    for index in range(steps // 2, steps):
        x = batches[index][0]
        batches[index] = (x, 10 * torch.sin(x @ w))
    return Task(model, mse, batches, torch.optim.Adam(model.parameters(), lr=2e-3))


def class_curriculum(steps: int, g: torch.Generator) -> Task:
    """A new class is added every tenth of the run: its first batches are all wrong."""
    model = mlp(8, 64, 10)
    centers = 2 * torch.randn(10, 8, generator=g)
    batches = []
    for index in range(steps):
        known = 2 + index * 8 // steps
        y = torch.randint(known, (16,), generator=g)
        batches.append((centers[y] + torch.randn(16, 8, generator=g), y))
    return Task(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, torch.optim.AdamW(model.parameters(), lr=3e-3)
    )


def kl_annealing(steps: int, g: torch.Generator) -> Task:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = mlp(8, 32, 8), mlp(4, 32, 8)
            self.register_buffer("step", torch.zeros(()))

    model = Vae()

    def loss(model: Vae, batch: Tensor) -> Tensor:
        mean, log_var = model.encode(batch).chunk(2, 1)
        x = model.decode(mean + torch.randn_like(mean) * (0.5 * log_var).exp())
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        if torch.is_grad_enabled():
            model.step += 1
        return F.mse_loss(x, batch) + kl * torch.sigmoid((model.step - steps / 2) / (steps / 20))

    data = [torch.randn(32, 2, generator=g) for _ in range(steps)]
    mix = torch.randn(2, 8, generator=g)
    return Task(model, loss, [torch.tanh(z @ mix) for z in data], torch.optim.Adam(model.parameters(), lr=2e-3))


def hinge(steps: int, g: torch.Generator) -> Task:
    """Every sample ends beyond the margin: loss and gradient become zero for many steps in a row."""
    model = mlp(8, 64, 1)
    w = torch.randn(8, 1, generator=g)
    batches = []
    for _ in range(steps):
        x = torch.randn(16, 8, generator=g)
        keep = (x @ w).abs()[:, 0] > 1.0
        x = torch.where(keep[:, None], x, x.sign() * w.T.sign() * 2)
        batches.append((x, (x @ w).sign()))
    loss = lambda m, b: F.relu(1.0 - b[1] * m(b[0])).mean() + 0.001  # noqa: E731
    return Task(model, loss, batches, torch.optim.Adam(model.parameters(), lr=5e-3))


def rare_long_samples(steps: int, g: torch.Generator) -> Task:
    """A sum over a sequence whose length is 4, and now and then 200."""
    model = nn.LSTM(3, 16)
    head = nn.Linear(16, 1)
    model.add_module("head", head)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out, _ = nn.LSTM.forward(model, batch[0])
        return F.mse_loss(head(out)[..., 0].sum(0), batch[1])

    batches = []
    for index in range(steps):
        x = torch.randn(100 if index % 40 == 33 else 4, 4, 3, generator=g)
        batches.append((x, x[..., 0].sum(0)))
    return Task(model, loss, batches, torch.optim.Adam(model.parameters(), lr=1e-3))


def negative_losses(steps: int, g: torch.Generator) -> Task:
    """A Gaussian's likelihood: below zero from some step on, and it may pass zero more than once."""
    model = mlp(8, 32, 2)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        mean, log_scale = model(batch[0]).chunk(2, 1)
        return (log_scale + 0.5 * ((batch[1] - mean) * (-log_scale).exp()).square()).mean()

    return Task(model, loss, xy(steps, 8, g), torch.optim.Adam(model.parameters(), lr=3e-3))


def near_zero_losses(steps: int, g: torch.Generator) -> Task:
    """Targets that can be fitted exactly: the loss falls over many orders of magnitude."""
    model = nn.Linear(4, 1)
    w = torch.randn(4, 1, generator=g)
    batches = [(x, x @ w) for x in torch.randn(steps, 8, 4, generator=g)]
    return Task(model, mse, batches, torch.optim.Adam(model.parameters(), lr=1e-2))


def much_dropout(steps: int, g: torch.Generator) -> Task:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.9), nn.Linear(64, 1))
    return Task(model, mse, xy(steps, 8, g), torch.optim.Adam(model.parameters(), lr=3e-3))


def policy_gradient(steps: int, g: torch.Generator) -> Task:
    """The surrogate of REINFORCE: returns of a heavy tail, on actions drawn by the policy of the moment."""
    model = mlp(4, 32, 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        states, scale = batch
        log = F.log_softmax(model(states), 1)
        actions = torch.multinomial(log.detach().exp(), 1)
        returns = scale * ((actions[:, 0] == (states[:, 0] > 0).long()).float() - 0.4)
        return -(log.gather(1, actions)[:, 0] * returns).mean()

    batches = []
    for _ in range(steps):
        states = torch.randn(16, 4, generator=g)
        batches.append((states, torch.exp(1.2 * torch.randn(16, generator=g))))
    return Task(model, loss, batches, torch.optim.Adam(model.parameters(), lr=3e-3))


def contrastive(steps: int, g: torch.Generator) -> Task:
    """With a learned temperature."""

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_scale = mlp(8, 32, 8), nn.Parameter(torch.tensor(2.0))

    def loss(model: Twin, x: Tensor) -> Tensor:
        a, b = (F.normalize(model.net(x + 0.3 * torch.randn_like(x)), dim=1) for _ in range(2))
        return F.cross_entropy(model.log_scale.exp() * a @ b.T, torch.arange(len(x)))

    model = Twin()
    batches = [torch.randn(16, 8, generator=g) for _ in range(steps)]
    return Task(model, loss, batches, torch.optim.AdamW(model.parameters(), lr=3e-3))


def contrastive_divergence(steps: int, g: torch.Generator) -> Task:
    """A restricted Boltzmann machine: the difference of two free energies, which need not fall."""

    class Rbm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.c = (
                nn.Parameter(0.1 * torch.randn(12, 8)),
                *(nn.Parameter(torch.zeros(n)) for n in (12, 8)),
            )

        def energy(self, v: Tensor) -> Tensor:
            return -(v @ self.b) - F.softplus(v @ self.w + self.c).sum(1)

    def loss(model: Rbm, v: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.bernoulli(torch.sigmoid(v @ model.w + model.c))
            fantasy = torch.bernoulli(torch.sigmoid(h @ model.w.T + model.b))
        return (model.energy(v) - model.energy(fantasy)).mean()

    model = Rbm()
    patterns = torch.bernoulli(torch.full((4, 12), 0.5), generator=g)
    batches = []
    for _ in range(steps):
        clean = patterns[torch.randint(4, (16,), generator=g)]
        batches.append((clean - torch.bernoulli(torch.full((16, 12), 0.05), generator=g)).abs())
    return Task(model, loss, batches, torch.optim.SGD(model.parameters(), lr=0.1))


def focal(steps: int, g: torch.Generator) -> Task:
    """One class in fifty: most batches have none of it."""
    model = mlp(8, 32, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        error = F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")
        return ((1 - (-error).exp()).square() * error).mean()

    w = torch.randn(8, 1, generator=g)
    batches = [(x, (x @ w > 2.05 * w.norm()).float()) for x in torch.randn(steps, 16, 8, generator=g)]
    return Task(model, loss, batches, torch.optim.Adam(model.parameters(), lr=3e-3))


def warm_up_from_zero(steps: int, g: torch.Generator) -> Task:
    model = mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / (steps / 5)))
    return Task(model, mse, xy(steps, 16, g), optimizer, schedule)


TASKS: dict[str, Callable[[int, torch.Generator], Task]] = {
    task.__name__: task
    for task in (
        *(tiny_batches, heavy_tails, lognormal_targets, sparse_rewards, dead_value_network, q_learning, gan, wgan),
        *(warm_restarts, one_cycle, task_switch, class_curriculum, kl_annealing, hinge, rare_long_samples),
        *(negative_losses, near_zero_losses, much_dropout, policy_gradient, contrastive, contrastive_divergence),
        *(focal, warm_up_from_zero),
    )
}


def make(name: str, steps: int, seed: int) -> Task:
    torch.manual_seed(seed)
    return TASKS[name](steps, torch.Generator().manual_seed(seed + 1000))


def train_plainly(task: Task) -> list[float]:
    """The loop that anybody would write. Returns the losses."""
    losses = []
    task.model.train()
    for batch in task.batches:
        loss = task.loss(task.model, batch)
        task.optimizer.zero_grad()
        loss.backward()
        task.optimizer.step()
        if task.scheduler is not None:
            task.scheduler.step()
        losses.append(loss.item())
    return losses
