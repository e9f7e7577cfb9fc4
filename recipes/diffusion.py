"""A denoising diffusion model (DDPM). Run it with `safetrain fit diffusion`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset[Tensor]):
    """Points of the plane, on two interleaved half circles (`moons`) or on a `ring`, with a little noise."""

    def __init__(self, kind: str, num_points: int, noise: float = 0.05, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        angle = torch.rand(num_points, generator=generator) * math.pi
        second = torch.arange(num_points) % 2
        if kind == "moons":
            x, y = torch.cos(angle), torch.sin(angle) - 0.25
            points = torch.stack([torch.where(second == 1, 1 - x, x) - 0.5, torch.where(second == 1, -y, y)], 1)
        elif kind == "ring":
            points = torch.stack([torch.cos(2 * angle), torch.sin(2 * angle)], 1)
        else:
            raise ValueError(f"kind is {kind!r}; use 'moons' or 'ring'")
        self.points = points + noise * torch.randn(num_points, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index]


class Diffusion(nn.Module):
    """Predicts the noise in a noisy sample. Knows the noise schedule: `kept[t]` is the share of the signal's variance at t.

    `zero_terminal_snr` rescales the schedule so that nothing of the signal is left at the last time.
    """

    kept: Tensor

    def __init__(
        self, num_dimensions: int = 2, width: int = 128, num_times: int = 200, zero_terminal_snr: bool = False
    ) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 20 / num_times, num_times, dtype=torch.float64)
        signal = torch.cumprod(1 - betas, 0).sqrt()
        if zero_terminal_snr:
            signal = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
        self.register_buffer("kept", (signal**2).float())
        self.register_buffer("frequencies", 2.0 ** torch.arange(6) * math.pi / 2)
        self.denoiser = nn.Sequential(
            nn.Linear(num_dimensions + 12, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, num_dimensions),
        )

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        phase = times[:, None] / len(self.kept) * self.frequencies
        return self.denoiser(torch.cat([noisy, phase.sin(), phase.cos()], 1))

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """New samples, from noise, one time step after the other."""
        before = torch.cat([self.kept.new_ones(1), self.kept[:-1]])
        x = torch.randn(count, self.denoiser[-1].out_features, device=self.kept.device)
        for t in reversed(range(len(self.kept))):
            noise = self(x, torch.full((count,), t, device=x.device))
            alpha = self.kept[t] / before[t]
            clean = ((x - (1 - self.kept[t]).sqrt() * noise) / self.kept[t].sqrt().clamp(min=1e-4)).clamp(-3, 3)
            weight_clean = before[t].sqrt() * (1 - alpha) / (1 - self.kept[t])
            weight_x = alpha.sqrt() * (1 - before[t]) / (1 - self.kept[t])
            variance = (1 - alpha) * (1 - before[t]) / (1 - self.kept[t])
            x = weight_clean * clean + weight_x * x + variance.sqrt() * torch.randn_like(x)
        return x


def sliced_distance(one: Tensor, other: Tensor, num_directions: int = 64) -> Tensor:
    """Mean Wasserstein distance between the projections of two sets of equally many points on random directions."""
    directions = F.normalize(torch.randn(num_directions, one.shape[1], device=one.device), dim=1)
    gap = (one @ directions.T).sort(0).values - (other @ directions.T).sort(0).values
    return gap.abs().mean()


def diffusion_loss(model: nn.Module, clean: Tensor, max_snr: float = 100.0) -> dict[str, Tensor]:
    """Squared error of the predicted noise, weighted so that no time with a signal-to-noise ratio above `max_snr` dominates."""
    network = getattr(model, "module", model)  # the model itself, also when it is wrapped for several processes
    times = torch.randint(len(network.kept), (len(clean),), device=clean.device)
    kept = network.kept[times]
    noise = torch.randn_like(clean)
    noisy = kept.sqrt()[:, None] * clean + (1 - kept).sqrt()[:, None] * noise
    squared_error = (model(noisy, times) - noise).square().mean(1)
    snr = kept / (1 - kept)
    weight = snr.clamp(max=max_snr) / snr
    metrics = {"loss": (weight * squared_error).mean()}
    if not model.training:
        metrics["sliced_distance"] = sliced_distance(network.sample(len(clean)), clean)
    return metrics
