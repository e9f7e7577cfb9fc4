import torch
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
inputs = torch.randn(1024, 10)
targets = inputs[:, :1] * inputs[:, 1:2]
batches = list(zip(inputs.split(32), targets.split(32), strict=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=320)


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


config = {"loop": {"max_epochs": 10}, "guards": {"clip": {"mode": "norm", "max_norm": 1.0}}}
trainer = SafeTrainer(
    model, loss_fn=loss_fn, optimizer=optimizer, scheduler=scheduler, train_data=batches, config=config
)
result = trainer.fit()
