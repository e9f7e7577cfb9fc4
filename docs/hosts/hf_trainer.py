import torch
from torch import nn
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs, labels):
        outputs = self.net(inputs / inputs.norm(dim=1, keepdim=True))
        return {"loss": nn.functional.mse_loss(outputs, labels), "outputs": outputs}


x = torch.randn(320, 4)
x[187] = 0  # one sample of length 0
data = [{"inputs": row, "labels": row.sum().reshape(1)} for row in x]
args = TrainingArguments(
    "runs/output", num_train_epochs=1, learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True
)
trainer = Trainer(Regression(), args, train_dataset=data)
trainer.train()

print("weights are finite:", all(p.isfinite().all().item() for p in trainer.model.parameters()))
