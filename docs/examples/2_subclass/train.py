"""A subclass: what a loss function cannot say goes into hooks. All of them are optional."""

import torch
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer


class Autoencoder(SafeTrainer):
    def build_model(self):
        return nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 16))

    def build_data(self):
        generator = torch.Generator().manual_seed(0)
        codes = torch.randn(2000, 3, generator=generator)
        samples = torch.tanh(codes @ torch.randn(3, 16, generator=generator))
        return torch.utils.data.TensorDataset(samples[:1600]), torch.utils.data.TensorDataset(samples[1600:])

    def training_step(self, model, batch):
        (clean,) = batch
        noisy = clean + 0.1 * torch.randn_like(clean)
        return F.mse_loss(model(noisy), clean)

    def evaluation_step(self, model, batch):
        (clean,) = batch
        error = F.mse_loss(model(clean), clean)
        return {"loss": error, "explained": 1 - error / clean.var()}

    def on_incident(self, incident):
        print("refused:", incident.headline())


config = {
    "seed": 0,
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
    "loop": {"max_epochs": 5, "monitor": "explained", "monitor_mode": "max"},
    "data": {"batch_size": 32},
}
result = Autoencoder(config=config).fit()
print(result.best)
