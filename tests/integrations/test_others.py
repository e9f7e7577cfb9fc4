"""ignite, fastai and Keras 3 on torch, where they are installed: the places that docs/integrations.md names."""

from functools import partial

import pytest
import torch
from torch import nn

from safetrain import watch

QUIET = {"logging": {"console": "off", "tensorboard": False}}


def check(guard, module):
    """The one bad step is an incident, and the 19 others are applied."""
    assert (guard.result.status, guard.result.steps) == ("done", 19)
    assert [incident.cause.label for incident in guard.result.incidents] == ["bad_input_data"]
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.fixture
def data():
    torch.manual_seed(0)
    inputs, targets = torch.randn(160, 4), torch.randn(160, 1)
    inputs[77] = float("nan")
    return inputs, targets


def test_ignite(data, tmp_path):
    engine = pytest.importorskip("ignite.engine")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = watch(model, optimizer, run_dir=tmp_path / "run", config=QUIET)

    def step(engine, batch):
        with guard.step(batch):
            inputs, targets = batch
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss.item()

    engine.Engine(step).run(list(zip(*(part.split(8) for part in data), strict=True)), max_epochs=1)
    guard.close()
    check(guard, model)


def test_fastai(data, tmp_path):
    learner = pytest.importorskip("fastai.learner")
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.optimizer import OptimWrapper

    class Guarded(Callback):
        def before_fit(self):
            self.guard = watch(self.model, self.opt.opt, run_dir=tmp_path / "run", config=QUIET)

        def before_batch(self):
            if self.training:
                self.guard.begin(self.xb)

        def after_batch(self):
            if self.training:
                self.guard.end()

        def after_fit(self):
            self.guard.close()

    samples, guarded = list(zip(*data, strict=True)), Guarded()
    loaders = DataLoaders(DataLoader(samples, bs=8, num_workers=0), DataLoader(samples[:16], bs=8, num_workers=0))
    options = {"loss_func": nn.MSELoss(), "opt_func": partial(OptimWrapper, opt=torch.optim.AdamW), "cbs": [guarded]}
    learn = learner.Learner(loaders, nn.Linear(4, 1), path=tmp_path, **options)
    learn.fit(1, 0.1)
    check(guarded.guard, learn.model)


def test_keras(data, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, batch):
            inputs, targets = batch
            with self.guard.step(batch):
                loss = nn.functional.mse_loss(self(inputs), targets)
                loss.backward()
                self.sgd.step()
                self.sgd.zero_grad()
            return {"loss": loss.detach()}

    inputs, targets = data
    model = Model()
    model(inputs[:8])
    model.compile()
    model.sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model.guard = watch(model, model.sgd, run_dir=tmp_path / "run", config=QUIET)
    model.fit(inputs.numpy(), targets.numpy(), batch_size=8, shuffle=False, verbose=0)
    model.guard.close()
    check(model.guard, model)
