"""Distributions and solvers: torch itself, gpytorch, linear_operator, stable_baselines3, torchdiffeq and zuko."""

import pytest
import torch
from wild_cases import Net, Wild, check_failure, check_healthy

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs
wild = Wild()


@wild.fails("torch", "", "log", "invalid_domain", [2], "batch[1][2] = 0")
def edge_of_the_support():
    def loss_fn(model, batch):
        x, y = batch
        mu, log_sigma = model(x).unbind(1)
        return -torch.distributions.LogNormal(mu, log_sigma.exp(), validate_args=False).log_prob(y).mean()  # here

    y = torch.rand(5) + 0.1
    y[2] = 0
    return Net(4, 2), loss_fn, (torch.randn(5, 4), y)


@wild.fails("gpytorch", "", "log", "log_of_nonpositive", came_from="batch[0]")
def inputs_of_a_kernel():
    from gpytorch.distributions import MultivariateNormal
    from gpytorch.kernels import RBFKernel, ScaleKernel

    kernel = ScaleKernel(RBFKernel())

    def loss_fn(model, batch):
        x, y = batch
        z = model(x).log()  # here
        return -MultivariateNormal(torch.zeros(len(x)), kernel(z).add_jitter(1e-2)).log_prob(y)

    return Net(2, 2), loss_fn, (torch.randn(6, 2), torch.randn(6))


@wild.fails("linear_operator", "cholesky.py", "NotPSDError", "degenerate_decomposition", [])
def matrix_that_is_not_positive():
    from linear_operator.utils.cholesky import psd_safe_cholesky

    def loss_fn(model, x):
        a = model(x)
        k = a @ a.T - 10 * torch.eye(len(x))
        return psd_safe_cholesky(k).diagonal().log().sum()  # here

    return Net(4, 4), loss_fn, torch.randn(5, 4)


@wild.fails("stable_baselines3", "distributions.py", "log1p", "log_of_nonpositive", [3], "batch[1][3, 1] = 1")
def action_at_its_bound():
    from stable_baselines3.common.distributions import TanhBijector

    def loss_fn(model, batch):
        states, actions = batch
        z = TanhBijector.atanh(actions)  # here
        return (model(states) - z).square().mean()

    actions = torch.tanh(torch.randn(6, 2))
    actions[3, 1] = 1.0
    return Net(4, 2), loss_fn, (torch.randn(6, 4), actions)


@wild.fails("zuko", "", "log", "log_of_nonpositive", [2], "batch[2, 0] = 3")
def outside_of_the_box():
    from zuko.distributions import BoxUniform
    from zuko.flows import NSF

    box = BoxUniform(-torch.ones(2), torch.ones(2))

    def loss_fn(model, x):
        return -(model().log_prob(x) + box.log_prob(x)).mean()  # here

    x = torch.rand(6, 2)
    x[2] = 3.0
    return NSF(2, 0, transforms=1, hidden_features=[8]), loss_fn, x


@wild.fails("torchdiffeq", "", "div", "division_by_zero", came_from="both operands are")
def solver_whose_step_becomes_zero():
    from torchdiffeq import odeint

    def loss_fn(model, x):
        def velocity(t, y):
            return model(y) / (y.sum(1, keepdim=True) - y.sum(1, keepdim=True))  # here

        return odeint(velocity, x, torch.tensor([0.0, 1.0])).square().mean()

    return Net(2, 2), loss_fn, torch.randn(4, 2)


@wild.passes("gpytorch")
def gaussian_process():
    import gpytorch

    x = torch.linspace(0, 1, 8)
    y = torch.sin(6 * x)

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(likelihood)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return model, lambda model, batch: -evidence(model(batch[0]), batch[1]), (x, y)


@wild.passes("stable_baselines3")
def squashed_sample():
    from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution

    policy = SquashedDiagGaussianDistribution(2)

    def loss_fn(model, states):
        policy.proba_distribution(model(states), torch.zeros(2))
        return -policy.log_prob(policy.sample()).mean()

    return Net(4, 2), loss_fn, torch.randn(6, 4)


@wild.passes("zuko")
def flow_far_from_its_knots():
    from zuko.flows import NSF

    model = NSF(2, 0, transforms=1, hidden_features=[8])
    return model, lambda model, x: -model().log_prob(x).mean(), torch.randn(6, 2) * 5


@wild.each_failure()
def test_failure(case):
    check_failure(case)


@wild.each_healthy()
def test_healthy(library, build):
    check_healthy(library, build)
