"""When bad steps are the rule the run stops, and says what the bad samples have in common."""

import pytest
import torch
from small import make_batches, make_model, with_bad_samples
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from safetrain import TrainingStopped


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def fit(make_trainer, data, model=None, loss_fn=cross_entropy, recovery=None, **config):
    config = {"seed": 0, "data": {"batch_size": 16}, "loop": {"max_epochs": 3}, **config}
    model = nn.Linear(6, 10) if model is None else model
    return make_trainer(model=model, train_data=data, loss_fn=loss_fn, config=config, recovery=recovery).fit()


def test_labels_that_begin_at_one_stop_the_run_with_the_pattern(make_trainer):
    data = TensorDataset(torch.randn(640, 6), torch.randint(1, 11, (640,)))
    with pytest.raises(TrainingStopped) as stopped:
        fit(make_trainer, data, guards={"batch": {}})
    result = stopped.value.result
    assert result.attempted <= 25
    assert "every sample whose field '1' is 10; the others go from 1 to 9" in str(stopped.value)


def test_targets_that_are_all_nan_stop_at_once(make_trainer):
    data = TensorDataset(torch.randn(160, 6), torch.full((160, 1), torch.nan))
    with pytest.raises(TrainingStopped) as stopped:
        fit(make_trainer, data, make_model(), lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    assert len(stopped.value.result.incidents) <= 3
    assert "every sample with NaN or Inf in field '1'" in str(stopped.value)


def test_labels_that_are_all_out_of_range_stop_at_once(make_trainer):
    data = TensorDataset(torch.randn(160, 6), torch.randint(100, 110, (160,)))
    with pytest.raises(TrainingStopped) as stopped:
        fit(make_trainer, data, guards={"batch": {}})
    assert len(stopped.value.result.incidents) <= 3


def test_a_few_bad_samples_are_left_out_as_before(make_trainer):
    batches = with_bad_samples(make_batches(120), *((index, index % 8) for index in range(0, 120, 6)))
    result = make_trainer(train_data=batches).fit()
    assert (result.status, len(result.incidents), result.steps) == ("done", 20, 120)


def test_it_can_be_turned_off_and_survives_a_resume(make_trainer):
    data = TensorDataset(torch.randn(640, 6), torch.randint(1, 11, (640,)))
    result = fit(make_trainer, data, guards={"batch": {}}, recovery={"max_bad_share": None}, loop={"max_steps": 30})
    assert result.status == "done"


def test_a_repeated_incident_names_its_own_samples(make_trainer):
    batches = with_bad_samples(make_batches(30), (10, 1), (20, 5))
    result = make_trainer(train_data=batches).fit()
    first, second = result.incidents
    assert (first.samples, second.samples) == ([1], [5])
    assert "sample 1" not in second.fix
    assert "[1]" not in second.fix


@pytest.mark.parametrize(
    ("targets", "pattern", "advice"),
    [
        (
            torch.arange(640) % 10 + 1,
            "every sample whose field '1' is 10; the others go from 1 to 9",
            "subtract 1 from",
        ),
        (torch.arange(640) % 10 + 100, "field '1' goes from 100 to 109", "values from 0 to one less than"),
        (torch.arange(640) % 4 - 1, "every sample whose field '1' is -1", "ignore_index=-1"),
    ],
)
def test_one_incident_is_enough_when_the_rest_of_the_data_is_like_it(make_trainer, targets, pattern, advice):
    data = TensorDataset(torch.randn(640, 6), targets)
    with pytest.raises(TrainingStopped) as stopped:
        fit(make_trainer, DataLoader(data, 16, shuffle=True))
    assert len(stopped.value.result.incidents) == 1
    assert pattern in str(stopped.value)
    assert advice in stopped.value.incident.fix


def test_a_class_that_is_rare_is_missed_at_its_first_sample(make_trainer):
    data = TensorDataset(torch.randn(1600, 6), torch.arange(1600) % 40 + 1)
    with pytest.raises(TrainingStopped) as stopped:
        fit(make_trainer, DataLoader(data, 16, shuffle=True), nn.Linear(6, 40))
    assert len(stopped.value.result.incidents) == 1
    assert "these go from 1 to 40" in stopped.value.incident.fix


def test_a_single_bad_label_is_left_out_and_looking_ahead_leaves_no_trace(make_trainer):
    x, y = torch.randn(160, 6), torch.randint(0, 10, (160,))
    orders = []
    for wrong in (False, True):
        labels = y.clone()
        labels[3] = 10 if wrong else y[3]
        torch.manual_seed(3)
        seen = []

        def loss_fn(model, batch, seen=seen):
            seen.append(batch[0].sum().item())
            return cross_entropy(model, batch)

        loader = DataLoader(TensorDataset(x, labels), 16, shuffle=True)
        result = fit(make_trainer, loader, nn.Linear(6, 10), loss_fn, loop={"max_epochs": 1})
        orders.append((result, seen))
    (_, plain), (repaired, seen) = orders
    assert (repaired.status, len(repaired.incidents)) == ("done", 1)
    assert list(dict.fromkeys(total for total in seen if total in plain)) == plain
