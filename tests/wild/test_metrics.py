"""Losses and metrics of torchmetrics and pytorch_metric_learning."""

import pytest
import torch
from forensic_cases import incident_of
from torch.nn import Conv2d
from wild_cases import Net, Wild, check_failure, check_healthy

from safetrain.fixes import propose
from safetrain.forensics import Step

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs
wild = Wild()


@wild.fails(
    "pytorch_metric_learning", "snr_distance.py", "div", "division_by_zero", [4], "batch[4, :]: 4 values, all 0"
)
def embedding_of_zero():
    from pytorch_metric_learning.distances import SNRDistance

    distance = SNRDistance()

    def loss_fn(model, x):
        return distance(model(x)).mean()  # here

    x = torch.randn(6, 4)
    x[4] = 0
    return Net(bias=False), loss_fn, x


@wild.fails("torchmetrics", "kl_divergence.py", "div", "division_by_zero", [3], "batch[3, :]: 4 values, all 0")
def row_that_is_no_distribution():
    from torchmetrics.functional import kl_divergence

    def loss_fn(model, x):
        return kl_divergence(x.abs(), model(x).abs())  # here

    x = torch.rand(6, 4) + 0.2
    x[3] = 0
    return Net(4, 4), loss_fn, x


@wild.fails("torchmetrics", "pearson.py", "div", "division_by_zero")
def correlation_with_a_constant():
    from torchmetrics.functional import concordance_corrcoef

    def loss_fn(model, batch):
        x, y = batch
        return 1 - concordance_corrcoef(model(x).squeeze(1) * 0 + y, y)  # here

    return Net(4, 1), loss_fn, (torch.randn(6, 4), torch.full((6,), 2.0))


@wild.fails("torchmetrics", "log_mse.py", "log1p", "log_of_nonpositive", [5], "batch[1][5] = -1.5")
def target_below_minus_one():
    from torchmetrics.functional import mean_squared_log_error

    def loss_fn(model, batch):
        x, y = batch
        return mean_squared_log_error(model(x).squeeze(1).sigmoid(), y)  # here

    y = torch.rand(6)
    y[5] = -1.5
    return Net(4, 1), loss_fn, (torch.randn(6, 4), y)


@wild.fails("torchmetrics", "sam.py", "div", "division_by_zero", [1], "batch[0][1, :, 0, 0]: 3 values, all 0")
def black_pixel():
    from torchmetrics.functional.image import spectral_angle_mapper

    def loss_fn(model, batch):
        x, y = batch
        return spectral_angle_mapper(model(x), y)  # here

    x, y = torch.rand(4, 3, 4, 4), torch.rand(4, 3, 4, 4)
    x[1, :, 0, 0] = 0
    return Conv2d(3, 3, 1, bias=False), loss_fn, (x, y)


@wild.passes("pytorch_metric_learning")
def no_triplet():
    from pytorch_metric_learning.losses import TripletMarginLoss

    triplet = TripletMarginLoss()
    return Net(), lambda model, batch: triplet(model(batch[0]), batch[1]), (torch.randn(6, 4), torch.arange(6))


@wild.passes("torchmetrics")
def percentage_of_zero():
    from torchmetrics.functional import cosine_similarity, mean_absolute_percentage_error

    def loss_fn(model, batch):
        x, y = batch
        error = mean_absolute_percentage_error(model(x).squeeze(1), y)
        return error * 1e-6 + cosine_similarity(model(x), x[:, :1]).mean()

    return Net(4, 1), loss_fn, (torch.randn(6, 4), torch.zeros(6))


@wild.passes("torchmetrics")
def silent_target():
    from torchmetrics.functional.audio import signal_noise_ratio

    def loss_fn(model, batch):
        x, y = batch
        return -signal_noise_ratio(y + 0.1 * torch.tanh(model(x)) * x.abs().sum(1, keepdim=True), y).mean()

    x, y = torch.randn(6, 4), torch.randn(6, 4)
    x[2] = y[2] = 0
    return Net(4, 4), loss_fn, (x, y)


@wild.each_failure()
def test_failure(case):
    check_failure(case)


@wild.each_healthy()
def test_healthy(library, build):
    check_healthy(library, build)


def test_a_call_into_a_metric_is_made_harmless_in_the_users_line():
    pytest.importorskip("torchmetrics")
    model, loss_fn, batch = row_that_is_no_distribution()
    found = propose(Step(model, loss_fn, [batch]), incident_of(model, loss_fn, batch))
    assert found[0].kind == "source", found
    assert "# here" in found[0].diff
    assert all(proposal.file in ("", __file__) for proposal in found)
