"""A trainer that is quiet and writes into a temporary directory."""

import pytest
from small import make_model, mse

from safetrain import SafeTrainer


@pytest.fixture
def make_trainer(tmp_path):
    """SafeTrainer with quiet output; keyword arguments of the constructor, `config` merged with the quiet defaults."""
    made = []

    def make(model=None, cls=SafeTrainer, *, config=None, **parts):
        config = {**(config or {}), "logging": {"console": "off", "tensorboard": False}}
        run_dir = parts.pop("run_dir", tmp_path / f"run-{len(made)}")
        model = make_model() if model is None else model
        parts.setdefault("loss_fn", mse)
        trainer = cls(model, config=config, run_dir=run_dir, **parts)
        made.append(trainer)
        return trainer

    return make
