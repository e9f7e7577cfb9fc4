"""A denoising diffusion model (DDPM). Run it with `safetrain fit diffusion`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Points(Dataset[Tensor]):
    """Points in the plane, on two interleaved half circles (`moons`) or on a `ring`, with a little noise."""

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


NUM_TIME_FEATURES = 12


class PointDenoiser(nn.Module):
    """Predicts the noise from noisy points [batch, dimension] and time features."""

    def __init__(self, num_dimensions: int = 2, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_dimensions + NUM_TIME_FEATURES, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, num_dimensions),
        )

    def forward(self, noisy: Tensor, time_features: Tensor) -> Tensor:
        return self.layers(torch.cat([noisy, time_features], 1))


class ConvBlock(nn.Module):
    """A residual block of two convolutions, with a shift by time between them."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.shift = nn.Linear(NUM_TIME_FEATURES, channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, time_features: Tensor) -> Tensor:
        hidden = self.first(F.silu(x)) + self.shift(time_features)[:, :, None, None]
        return self.shortcut(x) + self.second(F.silu(hidden))


class ImageDenoiser(nn.Module):
    """A U-Net for images [batch, channels, height, width] that halves the size `levels` times."""

    def __init__(self, channels: int = 1, width: int = 32, levels: int = 1) -> None:
        super().__init__()
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(ConvBlock(width, width) for _ in range(levels))
        self.middle = ConvBlock(width, width)
        self.up = nn.ModuleList(ConvBlock(2 * width, width) for _ in range(levels))
        self.leave = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, noisy: Tensor, time_features: Tensor) -> Tensor:
        x = self.enter(noisy)
        kept = []
        for block in self.down:
            x = block(x, time_features)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time_features)
        for block in self.up:
            skipped = kept.pop()
            x = block(torch.cat([F.interpolate(x, skipped.shape[2:]), skipped], 1), time_features)
        return self.leave(x)


class Diffusion(nn.Module):
    """A denoiser with its noise schedule: `kept[t]` is the share of the signal's variance left at time t (alpha-bar).

    The data is standardised by `mean` and `std`. `zero_terminal_snr` rescales the schedule so that no signal is left at the
    last time.
    """

    kept: Tensor
    frequencies: Tensor

    def __init__(
        self,
        denoiser: nn.Module,
        num_times: int = 200,
        mean: float = 0.0,
        std: float = 1.0,
        zero_terminal_snr: bool = False,
    ) -> None:
        super().__init__()
        self.denoiser, self.mean, self.std = denoiser, mean, std
        betas = torch.linspace(1e-4, min(20 / num_times, 0.999), num_times, dtype=torch.float64)
        signal = torch.cumprod(1 - betas, 0).sqrt()
        if zero_terminal_snr:
            signal = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
        self.register_buffer("kept", (signal**2).float())
        self.register_buffer("frequencies", 2.0 ** torch.arange(NUM_TIME_FEATURES // 2) * math.pi / 2)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        phase = times[:, None] / len(self.kept) * self.frequencies
        return self.denoiser(noisy, torch.cat([phase.sin(), phase.cos()], 1))

    @torch.no_grad()
    def sample(self, shape: Sequence[int]) -> Tensor:
        """Samples by denoising noise step by step."""
        before = torch.cat([self.kept.new_ones(1), self.kept[:-1]])
        x = torch.randn(*shape, device=self.kept.device)
        for t in reversed(range(len(self.kept))):
            noise = self(x, torch.full((len(x),), t, device=x.device))
            alpha = self.kept[t] / before[t]
            clean = ((x - (1 - self.kept[t]).sqrt() * noise) / self.kept[t].sqrt().clamp(min=1e-4)).clamp(-3, 3)
            weight_clean = before[t].sqrt() * (1 - alpha) / (1 - self.kept[t])
            weight_x = alpha.sqrt() * (1 - before[t]) / (1 - self.kept[t])
            variance = (1 - alpha) * (1 - before[t]) / (1 - self.kept[t])
            x = weight_clean * clean + weight_x * x + variance.sqrt() * torch.randn_like(x)
        return x * self.std + self.mean


def sliced_distance(one: Tensor, other: Tensor, num_directions: int = 64) -> Tensor:
    """Sliced Wasserstein distance of two equally large sets of points, over random directions."""
    one, other = one.flatten(1), other.flatten(1)
    directions = F.normalize(torch.randn(num_directions, one.shape[1], device=one.device), dim=1)
    gap = (one @ directions.T).sort(0).values - (other @ directions.T).sort(0).values
    return gap.abs().mean()


def diffusion_loss(model: nn.Module, batch: Tensor | Sequence[Tensor], max_snr: float = 100.0) -> dict[str, Tensor]:
    """Squared error of the predicted noise, with weights that clamp the signal-to-noise ratio at `max_snr` (min-SNR).

    Labels in the batch are ignored.
    """
    samples = batch if isinstance(batch, Tensor) else batch[0]
    network = getattr(model, "module", model)  # unwraps DDP
    clean = (samples - network.mean) / network.std
    times = torch.randint(len(network.kept), (len(clean),), device=clean.device)
    kept = network.kept[times].view(-1, *[1] * (clean.dim() - 1))
    noise = torch.randn_like(clean)
    noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    squared_error = (model(noisy, times) - noise).square()
    snr = kept / (1 - kept)
    weight = snr.clamp(max=max_snr) / snr
    metrics = {"loss": (weight * squared_error).mean()}
    if not model.training:
        metrics["sliced_distance"] = sliced_distance(network.sample(samples.shape), samples)
    return metrics
