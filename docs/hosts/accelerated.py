import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
x = torch.randn(320, 4)
x[187] = float("nan")  # one bad sample
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

print("weights are finite:", all(p.isfinite().all().item() for p in model.parameters()))
