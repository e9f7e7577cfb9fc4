"""A variational autoencoder of images. Run it with `safetrain fit vae`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VAE(nn.Module):
    """Maps images in [0, 1] to (logits of the pixels, mean and log-variance of the code).

    `max_log_var` bounds the log-variance on both sides; without it, its exponential can overflow for one unusual image.
    """

    def __init__(
        self, image_shape: list[int], num_latents: int = 8, width: int = 128, max_log_var: float | None = 10.0
    ) -> None:
        super().__init__()
        num_pixels = math.prod(image_shape)
        self.image_shape = tuple(image_shape)
        self.max_log_var = max_log_var
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(num_pixels, width), nn.ReLU(), nn.Linear(width, 2 * num_latents)
        )
        self.decoder = nn.Sequential(nn.Linear(num_latents, width), nn.ReLU(), nn.Linear(width, num_pixels))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(images).chunk(2, 1)
        if self.max_log_var is not None:
            log_var = log_var.clamp(-self.max_log_var, self.max_log_var)
        deviation = torch.exp(0.5 * log_var)
        code = mean + deviation * torch.randn_like(mean)
        return self.decoder(code).unflatten(1, self.image_shape), mean, log_var


def negative_elbo(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Negative ELBO in nats per image: reconstruction loss plus KL. The labels are not used."""
    images, _ = batch
    logits, mean, log_var = model(images)
    pixels = F.binary_cross_entropy_with_logits(logits, images, reduction="none")
    reconstruction = pixels.flatten(1).sum(1).mean()
    kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean()
    return {"loss": reconstruction + kl, "reconstruction": reconstruction, "kl": kl}
