"""A suspicious loss early in a run: a hard batch passes, a learning rate that is too high does not."""

import torch
from small import assert_same, make_batches, make_model, mse


def hard_in_between(count):
    batches = make_batches(count)
    batches[3][1].mul_(200.0)
    return batches


def test_a_hard_batch_passes_and_changes_no_weight(make_trainer):
    batches = hard_in_between(15)
    states = []
    for guards in ({"clip": None}, None):
        torch.manual_seed(1)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        trainer = make_trainer(model, optimizer=optimizer, train_data=batches, config={"guards": guards})
        torch.manual_seed(2)
        result = trainer.fit()
        assert result.healthy
        assert result.losses[3] > 1000 * max(result.losses[:3])
        states.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*states)


def test_a_learning_rate_that_worsens_known_batches_is_reduced_at_once(make_trainer):
    x = torch.randn(64, 6)
    batches = [(x, x.sum(1, keepdim=True))] * 60
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    result = make_trainer(
        model, loss_fn=mse, optimizer=optimizer, train_data=batches, config={"loop": {"max_steps": 50}}
    ).fit()
    assert result.incidents[0].step <= 4
    assert any(reason.startswith("restart:") for reason in result.incidents[0].decision.reasons)
    assert result.final_loss < 0.1 * result.losses[0]
