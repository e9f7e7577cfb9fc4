import lightning
import torch
from torch import nn

from safetrain.integrations.lightning import SafetrainCallback

torch.manual_seed(0)


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


x = torch.randn(320, 4)
x[187] = float("nan")  # one bad sample
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = Regression()
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", callbacks=[SafetrainCallback(run_dir="runs/lightning")], **quiet
)
trainer.fit(model, loader)

print("weights are finite:", all(p.isfinite().all().item() for p in model.parameters()))
