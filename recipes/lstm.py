"""Forecasts a time series by an LSTM. Run it with `safetrain fit lstm`."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


def seasonal_series(length: int, seed: int = 0) -> np.ndarray:
    """A synthetic series like the hourly load of a power grid: daily and weekly seasons, and autocorrelated weather."""
    generator = np.random.default_rng(seed)
    t = np.arange(length)
    weather = np.zeros(length)
    for i in range(1, length):
        weather[i] = 0.95 * weather[i - 1] + generator.normal(scale=0.1)
    day = np.sin(2 * np.pi * t / 24) + 0.4 * np.sin(4 * np.pi * t / 24 + 1)
    week = np.where(t // 24 % 7 < 5, 0.5, -0.5)
    return (100 + 20 * (day + week + weather)).astype(np.float32)


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a series: `history` steps and the `horizon` that follows them, standardised by the training part.

    The last fifth of the series is for `eval`, so that training never sees the future.
    """

    def __init__(self, series: np.ndarray, split: str, history: int = 48, horizon: int = 12) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; use 'train' or 'eval'")
        cut = len(series) * 4 // 5
        train = series[:cut]
        part = train if split == "train" else series[cut:]
        if len(part) < history + horizon:
            raise ValueError(f"the {split} part has {len(part)} steps; history + horizon need {history + horizon}")
        self.values = torch.from_numpy(np.ascontiguousarray((part - train.mean()) / train.std(), dtype=np.float32))
        self.history, self.horizon = history, horizon

    def __len__(self) -> int:
        return len(self.values) - self.history - self.horizon + 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        middle = index + self.history
        return {"history": self.values[index:middle], "future": self.values[middle : middle + self.horizon]}


class Forecaster(nn.Module):
    """Forecasts the next `horizon` steps from a history [batch, time], as changes to its last value."""

    def __init__(self, horizon: int, width: int = 32, depth: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, depth, batch_first=True)
        self.head = nn.Linear(width, horizon)

    def forward(self, history: Tensor) -> Tensor:
        states, _ = self.lstm(history.unsqueeze(-1))
        change = self.head(states[:, -1])
        return history[:, -1:] + change


def forecast_loss(model: nn.Module, batch: dict[str, Tensor], season: int = 24) -> dict[str, Tensor]:
    """Mean squared error, and `skill`: the share of the naive forecast's error that is avoided.

    The naive forecast repeats the values of one `season` before (at least the horizon, at most the history). A skill of 0 equals it, 1 is perfect.
    """
    forecast, future = model(batch["history"]), batch["future"]
    squared_error = F.mse_loss(forecast, future)
    metrics = {"loss": squared_error}
    if not model.training:
        naive = batch["history"][:, -season:][:, : future.shape[1]]
        metrics["skill"] = 1 - (forecast - future).abs().mean() / (naive - future).abs().mean()
    return metrics
