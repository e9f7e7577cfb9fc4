"""A metric loss of your own: any callable of (model, batch), also a module with parameters that are trained along.

Proxies (one point per class, pulled towards the class's samples) are parameters of the loss, so the optimizer gets both.
"""

import torch
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer


class ProxyLoss(nn.Module):
    def __init__(self, num_classes, num_dimensions, scale=10.0):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(num_classes, num_dimensions))
        self.scale = scale

    def forward(self, model, batch):
        inputs, labels = batch
        embeddings = F.normalize(model(inputs), dim=1)
        similarity = embeddings @ F.normalize(self.proxies, dim=1).T
        metrics = {"loss": F.cross_entropy(self.scale * similarity, labels)}
        if not model.training:
            among = (embeddings @ embeddings.T).fill_diagonal_(-torch.inf)
            metrics["recall_at_1"] = (labels[among.argmax(1)] == labels).float().mean()
        return metrics


torch.manual_seed(0)
labels = torch.arange(1200) % 6
inputs = torch.randn(6, 20)[labels] + 0.8 * torch.randn(1200, 20)
train = torch.utils.data.TensorDataset(inputs[:900], labels[:900])
evaluation = [(inputs[900:], labels[900:])]  # one batch: a neighbour may be any sample

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
loss = ProxyLoss(num_classes=6, num_dimensions=8)
optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=3e-3)
config = {"loop": {"max_epochs": 5, "monitor": "recall_at_1", "monitor_mode": "max"}, "data": {"batch_size": 30}}
parts = {"loss_fn": loss, "optimizer": optimizer, "train_data": train, "eval_data": evaluation}
result = SafeTrainer(model, **parts, config=config).fit()
print(result.best)
