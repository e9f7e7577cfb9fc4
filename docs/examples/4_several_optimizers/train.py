"""A GAN: two networks, two optimizers, one transaction. Both move, or neither does.

Each network must learn from its own loss only, so the other one is shut out of the graph: the discriminator sees detached
samples, and the generator's loss runs through a discriminator whose parameters ask for no gradient.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer
from safetrain.optim.optimizers import OptimizerGroup


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


@contextmanager
def frozen(module):
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in module.parameters():
            parameter.requires_grad_(True)


class GANTrainer(SafeTrainer):
    def build_optimizer(self, model):
        return OptimizerGroup(
            generator=torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
            discriminator=torch.optim.Adam(model.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9)),
        )

    def training_step(self, model, real):
        fake = model.generator(torch.randn(len(real), 4, device=real.device))
        on_real, on_fake = model.discriminator(real), model.discriminator(fake.detach())
        discriminator_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        losses = {"discriminator": discriminator_loss}
        loss = discriminator_loss
        if self.step % 2 == 1:  # the generator moves in every other step; left out, it has no gradient and stays
            with frozen(model.discriminator):
                losses["generator"] = F.softplus(-model.discriminator(fake)).mean()
            loss = loss + losses["generator"]
        return {"loss": loss, **losses}


angle = torch.rand(2048, generator=torch.Generator().manual_seed(0)) * 6.2832
ring = torch.stack([angle.cos(), angle.sin()], 1)
config = {"seed": 0, "loop": {"max_steps": 600, "log_every": 100}}
trainer = GANTrainer(GAN(), train_data=list(ring.split(128)), config=config)
result = trainer.fit()
with torch.no_grad():
    samples = trainer.model.generator(torch.randn(1000, 4))
print("mean distance from the middle (1 would be perfect):", samples.norm(dim=1).mean().item())
