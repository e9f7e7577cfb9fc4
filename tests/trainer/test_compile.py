"""`loop.compile` and `loop.deterministic`."""

import pytest
import torch
from small import make_batches, make_model


def train(make_trainer, **loop):
    torch.manual_seed(1)
    model = make_model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"loop": {"eval_every": 3, **loop}}
    data = make_batches(9, bad=(4,))
    trainer = make_trainer(model, optimizer=optimizer, train_data=data, eval_data=make_batches(1), config=config)
    return trainer, trainer.fit()


def test_a_compiled_model_trains_and_refuses_like_an_eager_one(make_trainer):
    torch.manual_seed(0)
    eager, plain = train(make_trainer)
    torch.manual_seed(0)
    compiled, result = train(make_trainer, compile="aot_eager")
    assert isinstance(compiled.stepper.called, torch._dynamo.OptimizedModule)
    assert [i.step for i in result.incidents] == [i.step for i in plain.incidents] == [4]
    assert result.losses[:4] == pytest.approx(plain.losses[:4])
    assert list(compiled.model.state_dict()) == list(eager.model.state_dict())  # no "_orig_mod." in the keys


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # raised inside torch
def test_inductor_compiles_and_learns(make_trainer):
    _, plain = train(make_trainer)
    torch.manual_seed(0)
    _, result = train(make_trainer, compile=True)
    assert [i.step for i in result.incidents] == [4]
    assert result.steps == plain.steps


def test_deterministic_algorithms_are_on_only_during_the_run(make_trainer):
    seen = []

    def loss_fn(model, batch):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return model(batch[0]).mean()

    make_trainer(loss_fn=loss_fn, train_data=make_batches(2), config={"loop": {"deterministic": True}}).fit()
    assert seen == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()
