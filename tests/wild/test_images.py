"""Losses and geometry of kornia and monai, the schedules of diffusers, and the codes of vector_quantize_pytorch."""

import pytest
import torch
from torch import nn
from wild_cases import Net, Wild, check_failure, check_healthy

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs
wild = Wild()


def unchanged():
    """A convolution that gives back its input, exactly."""
    model = nn.Conv2d(1, 1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


@wild.fails("kornia", "psnr.py", "reciprocal", "division_by_zero", [3])
def image_that_equals_its_target():
    from kornia.losses import psnr_loss

    def loss_fn(model, batch):
        return sum(psnr_loss(model(x[None]), y[None], 1.0) for x, y in zip(*batch, strict=True))  # here

    y = torch.rand(5, 1, 6, 6)
    x = y + 0.1 * torch.randn_like(y)
    x[3] = y[3]
    return unchanged(), loss_fn, (x, y)


@wild.fails("kornia", "imgwarp.py", "div", "division_by_zero", [1], "batch[0][1, ")
def four_corners_in_one_place():
    from kornia.geometry.transform import get_perspective_transform

    def loss_fn(model, batch):
        source, target = batch
        moved = target + 0.0 * model(source.flatten(1)).view(-1, 4, 2)
        warp = get_perspective_transform(source, moved)  # here
        return (warp * model(source.flatten(1)).mean()).square().mean()

    corners = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    source = corners.repeat(4, 1, 1) + 0.05 * torch.randn(4, 4, 2)
    source[1] = 0.5
    return Net(8, 8), loss_fn, (source, source + 0.1 * torch.randn(4, 4, 2))


@wild.fails("monai", "dice.py", "div", "division_by_zero", [2], "batch[1][2, 0, …]: 36 values, all 0")
def empty_mask():
    from monai.losses import DiceLoss

    dice = DiceLoss(smooth_nr=0.0, smooth_dr=0.0)

    def loss_fn(model, batch):
        x, y = batch
        return dice(torch.relu(model(x)), y)  # here

    x, y = torch.rand(4, 1, 6, 6), (torch.rand(4, 1, 6, 6) > 0.5).float()
    x[2] = y[2] = 0
    return unchanged(), loss_fn, (x, y)


@wild.fails("monai", "image_dissimilarity.py", "div", "division_by_zero", [1])
def patch_without_variance():
    from monai.losses import LocalNormalizedCrossCorrelationLoss

    likeness = LocalNormalizedCrossCorrelationLoss(spatial_dims=2, kernel_size=3, smooth_nr=0.0, smooth_dr=0.0)

    def loss_fn(model, batch):
        x, y = batch
        return likeness(model(x), y)  # here

    x = torch.rand(3, 1, 8, 8)
    x[1] = 0
    return nn.Conv2d(1, 1, 1), loss_fn, (x, torch.rand(3, 1, 8, 8))


@wild.fails("diffusers", "", "div", "division_by_zero", [2])
def weight_of_a_step_without_signal():
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_snr

    schedule = DDPMScheduler(num_train_timesteps=100, rescale_betas_zero_snr=True, prediction_type="v_prediction")

    def loss_fn(model, batch):
        x, t = batch
        snr = compute_snr(schedule, t)
        weight = snr.clamp(max=5) / snr  # here
        return (weight[:, None] * (model(x) - x).square()).mean()

    return Net(4, 4), loss_fn, (torch.randn(4, 4), torch.tensor([3, 50, 99, 20]))


@wild.fails("diffusers", "", "exp", "exp_overflow")
def log_variance_times_a_hundred():
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    def loss_fn(model, x):
        latent = DiagonalGaussianDistribution(model(x) * 50)
        return (latent.logvar * 100).exp().mean() + latent.kl().mean()  # here

    return nn.Conv2d(1, 4, 1), loss_fn, torch.randn(3, 1, 4, 4) * 3


@wild.fails(
    "vector_quantize_pytorch", "finite_scalar_quantization.py", "div", "division_by_zero", [], "buffer FSQ._levels[1]"
)
def one_level():
    from vector_quantize_pytorch import FSQ

    codes = FSQ(levels=[8, 1, 5])

    def loss_fn(model, x):
        return codes(model(x)[:, None])[0].square().mean()  # here

    return Net(), loss_fn, torch.randn(5, 4)


@wild.passes("kornia")
def quaternion_of_no_rotation():
    from kornia.geometry.conversions import quaternion_to_axis_angle

    q = nn.functional.normalize(torch.randn(5, 4), dim=1)
    q[2] = torch.tensor([1.0, 0, 0, 0])
    return Net(4, 3), lambda model, b: (quaternion_to_axis_angle(b) + model(b)).square().mean(), q


@wild.passes("kornia")
def black_image():
    from kornia.color import rgb_to_luv

    x = torch.rand(3, 3, 4, 4)
    x[0] = 0
    model = nn.Conv2d(3, 3, 1, bias=False)
    return model, lambda model, x: rgb_to_luv(torch.sigmoid(model(x)) * x.abs()).mean(), x


@wild.passes("monai")
def column_without_variance():
    from monai.losses import BarlowTwinsLoss

    x = torch.randn(6, 4)
    x[:, 2] = 0
    twins = BarlowTwinsLoss()
    return Net(4, 4, bias=False), lambda model, b: twins(b[0] * model(b[0]).mean(), b[1]), (x, torch.randn(6, 4))


@wild.passes("monai")
def empty_images():
    from monai.losses import DiceCELoss, FocalLoss

    dice, focal = DiceCELoss(sigmoid=True), FocalLoss()

    def loss_fn(model, batch):
        x, y = batch
        return dice(model(x), y) + focal(model(x), y)

    return nn.Conv2d(1, 1, 1), loss_fn, (torch.zeros(3, 1, 4, 4), torch.zeros(3, 1, 4, 4))


@wild.each_failure()
def test_failure(case):
    check_failure(case)


@wild.each_healthy()
def test_healthy(library, build):
    check_healthy(library, build)
