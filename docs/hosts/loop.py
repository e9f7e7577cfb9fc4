import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
loader = [(x, x.sum(1, keepdim=True)) for x in torch.randn(40, 8, 4)]
loader[23][0][5] = float("nan")  # one bad sample


def loss_fn(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


for batch in loader:
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()

print("weights are finite:", all(p.isfinite().all().item() for p in model.parameters()))
