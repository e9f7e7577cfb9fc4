"""An incident says since when the parameter that its value came from is as large as it is, and which samples of the data set it was."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from safetrain import SafeTrainer, TrainingStopped
from safetrain.core.result import FitResult


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(1) * self.scale.detach().exp().exp() * 1e-30


def fitted(trainer: SafeTrainer) -> FitResult:
    try:
        return trainer.fit()
    except TrainingStopped as stopped:
        return stopped.result


def test_a_parameter_that_has_grown() -> None:
    torch.manual_seed(0)
    model = Scaled()
    result = fitted(
        SafeTrainer(
            model,
            loss_fn=lambda model, x: model(x).square().mean() - 30 * model.scale,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            train_data=[torch.rand(4, 4) for _ in range(5)],
            config={"guards": {"clip": None, "spike": None, "stall": None, "sanity": None}, "loop": {"max_epochs": 1}},
            run_dir=False,
        )
    )
    end = result.incidents[0].lineage[-1]
    assert (end.kind, end.name) == ("parameter", "scale")
    assert "which has grown" in end.text
    assert "before" in end.text


def test_samples_by_their_index_in_the_data_set() -> None:
    torch.manual_seed(0)
    data = torch.rand(12, 4) + 0.1
    data[7] = 0
    model = nn.Linear(4, 1)
    result = fitted(
        SafeTrainer(
            model,
            loss_fn=lambda model, x: model(x[0] / x[0].sum(1, keepdim=True)).square().mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            train_data=torch.utils.data.TensorDataset(data),
            config={"data": {"batch_size": 4}, "loop": {"max_epochs": 1}},
            run_dir=False,
        )
    )
    end = result.incidents[0].lineage[-1]
    assert end.kind == "data"
    assert "sample 7 of the data set" in end.text
