"""Training runs that raise nothing, compute no NaN, and do not learn or learn the wrong thing; and healthy ones that look odd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from safetrain import SafeTrainer

STEPS = 80


@dataclass
class Problem:
    """What a training script would hand over."""

    model: nn.Module
    optimizer: Any = None
    loss: Any = field(default_factory=nn.CrossEntropyLoss)
    data: Any = None
    evaluation: Any = None
    scheduler: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    trainer: type[SafeTrainer] = SafeTrainer

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if self.data is None:
            self.data = blobs()


@dataclass
class Case:
    name: str
    build: Callable[[], Problem]
    expected: tuple[str, ...]
    """Causes that are right; none for a healthy run."""
    like: str = ""
    """The benchmark that has problems of this kind."""


CASES: list[Case] = []


def case(*expected: str, like: str = "mistakes") -> Callable[[Callable[[], Problem]], Callable[[], Problem]]:
    def add(build: Callable[[], Problem]) -> Callable[[], Problem]:
        CASES.append(Case(build.__name__, build, expected, like))
        return build

    return add


def healthy(build: Callable[[], Problem]) -> Callable[[], Problem]:
    CASES.append(Case(build.__name__, build, (), "healthy"))
    return build


CENTERS = torch.randn(4, 8, generator=torch.Generator().manual_seed(7)) * 2


def blobs(steps: int = STEPS, batch: int = 32, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Four classes of points in eight dimensions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (steps, batch), generator=generator)
    return [(CENTERS[y] + torch.randn(batch, 8, generator=generator), y) for y in labels]


def sums(steps: int = STEPS, batch: int = 32, width: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(x, x.sum(1, keepdim=True)) for x in torch.randn(steps, batch, width, generator=generator)]


def mlp(outputs: int = 4, *extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *extra, nn.Linear(32, outputs))


# ---- the step changes nothing, or not all ----------------------------------------------------------------------


@case("weights_unchanged")
def rate_of_zero() -> Problem:
    model = mlp()
    return Problem(model, torch.optim.SGD(model.parameters(), lr=1e-18))


@case("weights_unchanged", like="traincheck")
def optimizer_that_returns() -> Problem:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            return None

    model = mlp()
    return Problem(model, Idle(model.parameters(), lr=0.1))


@case("weights_unchanged", like="traincheck")
def low_precision_weights() -> Problem:
    model = mlp().bfloat16()
    data = [(x.bfloat16(), y) for x, y in blobs()]
    return Problem(model, torch.optim.SGD(model.parameters(), lr=1e-7), data=data)


@case("not_in_optimizer", like="traincheck")
def head_replaced_after_the_optimizer() -> Problem:
    model = mlp(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(32, 4)
    return Problem(model, optimizer)


@case("not_in_optimizer")
def only_weights_in_the_optimizer() -> Problem:
    model = mlp()
    return Problem(model, torch.optim.SGD([p for n, p in model.named_parameters() if n.startswith("0")], lr=0.1))


@case("not_in_optimizer", like="traincheck")
def optimizer_of_a_copy() -> Problem:
    model = mlp()
    before = copy.deepcopy(model)
    return Problem(model, torch.optim.SGD([*before.parameters(), model[0].bias], lr=0.1))


@case("not_registered")
def layers_in_a_list() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(8, 8) for _ in range(2)]
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.hidden:
                x = layer(x).relu()
            return self.out(x)  # type: ignore[no-any-return]

    return Problem(Net())


@case("not_reached")
def branch_that_is_not_used() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.skip, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.features(x).relu())  # type: ignore[no-any-return]

    return Problem(Net())


@case("not_reached")
def features_detached() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.features(x).relu().detach())  # type: ignore[no-any-return]

    return Problem(Net())


@case("not_reached")
def last_block_left_out() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[:-1]:
                x = x + block(x).relu()
            return self.out(x)  # type: ignore[no-any-return]

    return Problem(Net())


@case("not_reached", like="traincheck")
def frozen_in_the_middle() -> Problem:
    num_calls = 0

    def loss(model: Any, batch: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 10:
            model[0].requires_grad_(False)
        return F.cross_entropy(model(batch[0]), batch[1])

    return Problem(mlp(), loss=loss)


@case("dead_network")
def gradient_zeroed_by_a_hook() -> Problem:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    return Problem(model)


@case("not_registered")
def tensor_that_is_no_parameter() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.out = torch.randn(8, 8, requires_grad=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((x @ self.weight).relu())  # type: ignore[no-any-return]

    return Problem(Net())


# ---- the loss --------------------------------------------------------------------------------------------------


@case("loss_mismatch")
def softmax_before_cross_entropy() -> Problem:
    return Problem(nn.Sequential(mlp(), nn.Softmax(dim=1)))


@case("loss_mismatch")
def sigmoid_before_the_loss_with_logits() -> Problem:
    data = [(x, (y > 1).float()[:, None]) for x, y in blobs()]
    return Problem(nn.Sequential(mlp(1), nn.Sigmoid()), loss=nn.BCEWithLogitsLoss(), data=data)


@case("loss_mismatch")
def nll_of_raw_outputs() -> Problem:
    return Problem(mlp(), loss=nn.NLLLoss())


@case("loss_mismatch")
def softmax_over_the_batch() -> Problem:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.nll_loss(model(batch[0]).softmax(dim=0).clamp_min(1e-6).log(), batch[1])

    return Problem(mlp(), loss=loss)


@case("loss_mismatch")
def relu_before_cross_entropy() -> Problem:
    return Problem(nn.Sequential(mlp(), nn.ReLU()))


@case("loss_mismatch")
def targets_that_broadcast() -> Problem:
    model, data = mlp(1), [(x, y[:, 0]) for x, y in sums()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    return Problem(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, data)


@case("loss_mismatch")
def targets_that_broadcast_the_other_way() -> Problem:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (batch[1] - model(batch[0]).squeeze(1)).abs().mean()

    return Problem(mlp(1), loss=loss, data=sums())


@case("loss_mismatch")
def softmax_of_one_output() -> Problem:
    data = [(x, (y > 1).float()[:, None]) for x, y in blobs()]
    return Problem(nn.Sequential(mlp(1), nn.Softmax(dim=1)), loss=nn.BCELoss(), data=data)


@case("loss_mismatch")
def sigmoid_twice() -> Problem:
    data = [(x, (y > 1).float()[:, None]) for x, y in blobs()]
    return Problem(nn.Sequential(mlp(1), nn.Sigmoid(), nn.Sigmoid()), loss=nn.BCELoss(), data=data)


@case("loss_mismatch")
def loss_of_the_wrong_sign() -> Problem:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return -F.cross_entropy(model(batch[0]), batch[1])

    return Problem(mlp(), loss=loss)


@case("dead_network")
def error_rate_as_a_loss() -> Problem:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return (outputs.argmax(1) != batch[1]).float().mean() + 0 * outputs.sum()

    return Problem(mlp(), loss=loss)


# ---- modes, precision, schedule --------------------------------------------------------------------------------


@case("wrong_mode")
def left_in_eval_mode_by_the_data() -> Problem:
    model = mlp(4, nn.Dropout(0.2))

    class Mining:
        """Looks for hard samples with the model itself."""

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for index, batch in enumerate(blobs()):
                if index == 5:
                    model.eval()
                yield batch

    return Problem(model, data=Mining())


@case("wrong_mode", like="traincheck")
def left_in_eval_mode_by_the_loss() -> Problem:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        model.eval()
        return F.cross_entropy(model(batch[0]), batch[1])

    return Problem(mlp(4, nn.BatchNorm1d(32)), loss=loss)


@case("wrong_mode")
def train_that_does_not_listen() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(4, nn.Dropout(0.5))

        def train(self, mode: bool = True) -> Net:
            self.training = mode
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    return Problem(Net(), evaluation=blobs(3, seed=1), config={"loop": {"eval_every": 5}})


@case("wrong_mode")
def functional_dropout_in_evaluation() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.dropout(self.first(x).relu(), 0.5))  # type: ignore[no-any-return]

    return Problem(Net(), evaluation=blobs(3, seed=1), config={"loop": {"eval_every": 5}})


@case("precision_not_in_effect", like="traincheck")
def autocast_turned_off_inside() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.inner(x)  # type: ignore[no-any-return]

    return Problem(Net(), config={"loop": {"precision": "bf16"}})


@case("schedule_ended", like="traincheck")
def schedule_in_epochs() -> Problem:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Problem(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1))


@case("schedule_ended", like="traincheck")
def cosine_in_epochs() -> Problem:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Problem(model, optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5))


# ---- data ------------------------------------------------------------------------------------------------------


@case("repeated_data", like="traincheck")
def loader_that_returns_the_first_batch() -> Problem:
    first = blobs(1)[0]
    return Problem(mlp(), data=[(first[0].clone(), first[1].clone()) for _ in range(STEPS)])


@case("repeated_data")
def one_sample_all_over() -> Problem:
    return Problem(mlp(), data=[(x[:1].repeat(32, 1), y[:1].repeat(32)) for x, y in blobs()])


@case("no_progress")
def targets_shuffled() -> Problem:
    generator = torch.Generator().manual_seed(3)
    data = [(x, y[torch.randperm(len(y), generator=generator)]) for x, y in blobs(400)]
    return Problem(mlp(), data=data)


@case("rate_too_low")
def rate_far_too_low() -> Problem:
    model = mlp()
    return Problem(model, torch.optim.SGD(model.parameters(), lr=1e-7), data=blobs(400))


# ---- dynamics --------------------------------------------------------------------------------------------------


@case("vanishing_gradients", "no_progress", like="autotrainer")
def ten_sigmoid_layers() -> Problem:
    layers = [part for _ in range(10) for part in (nn.Linear(8, 8), nn.Sigmoid())]
    return Problem(nn.Sequential(*layers, nn.Linear(8, 4)), data=blobs(300))


@case("dead_network", like="autotrainer")
def dead_relu() -> Problem:
    model = mlp()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    return Problem(model, data=blobs(200))


@case("dead_network", "divergence", like="autotrainer")
def initial_weights_that_explode() -> Problem:
    layers = [part for _ in range(6) for part in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *layers, nn.Linear(16, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=5.0)
    return Problem(model, torch.optim.SGD(model.parameters(), lr=0.01), data=blobs(200))


@case("dead_network", like="autotrainer")
def negative_initial_weights() -> Problem:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, -0.1)
    return Problem(model, data=blobs(200))


@case("memory_corruption")
def bit_flipped_in_a_weight() -> Problem:
    class Flipping(SafeTrainer):
        def on_commit(self, view: Any) -> None:
            if view.step == 40:
                self.model[0].weight.data.view(torch.int32)[3, 2] ^= 1 << 21

    return Problem(mlp(), trainer=Flipping, config={"guards": {"sanity": {"look_every": 10}}})


# ---- healthy ---------------------------------------------------------------------------------------------------


@healthy
def plain() -> Problem:
    return Problem(mlp(), evaluation=blobs(3, seed=1))


@healthy
def backbone_frozen() -> Problem:
    model = mlp(4, nn.BatchNorm1d(32))
    model[0].requires_grad_(False)
    return Problem(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@healthy
def batch_norm_frozen() -> Problem:
    class Net(nn.Sequential):
        def train(self, mode: bool = True) -> Net:
            super().train(mode)
            self[2].eval()
            return self

    return Problem(Net(*mlp(4, nn.BatchNorm1d(32))))


@healthy
def one_batch_on_purpose() -> Problem:
    return Problem(mlp(), data=[blobs(1)[0]] * STEPS)


@healthy
def whole_data_in_one_batch() -> Problem:
    return Problem(mlp(), data=blobs(1), config={"loop": {"max_steps": 60, "max_epochs": 100}})


@healthy
def batches_of_two() -> Problem:
    model = mlp()
    return Problem(model, torch.optim.Adam(model.parameters(), lr=1e-3), data=blobs(200, 2))


@healthy
def warm_up_and_cosine() -> Problem:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Problem(model, optimizer, scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS))


@healthy
def low_rank_adapter() -> Problem:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = mlp().requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(8, 2) / 3), nn.Parameter(torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a @ self.b  # type: ignore[no-any-return]

    return Problem(Adapter())


@healthy
def experts_in_turn() -> Problem:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.turn = nn.ModuleList(mlp() for _ in range(4)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            return self.experts[self.turn % 4](x)  # type: ignore[no-any-return]

    return Problem(Experts())


@healthy
def variational_autoencoder() -> Problem:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(2, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, 1)
            return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance

    def loss(model: nn.Module, batch: Any) -> Tensor:
        decoded, mean, log_variance = model(batch[0])
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
        return F.mse_loss(decoded, batch[0]) + 0.01 * divergence.mean()

    model = Auto()
    return Problem(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, evaluation=blobs(3, seed=1))


@healthy
def generator_and_discriminator() -> Problem:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.discriminator = mlp(8), mlp(1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        made = model.generator(torch.randn(len(batch[0]), 8))
        real, fake = model.discriminator(batch[0]), model.discriminator(made.detach())
        ours = F.softplus(-real).mean() + F.softplus(fake).mean()
        return ours + F.softplus(-model.discriminator(made)).mean()

    model = Pair()
    return Problem(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss)


@healthy
def policy_gradient() -> Problem:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        policy = torch.distributions.Categorical(logits=model(batch[0]))
        actions = policy.sample()
        reward = (actions == batch[1]).float()
        return -(policy.log_prob(actions) * (reward - reward.mean())).mean()

    model = mlp()
    return Problem(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss)


@healthy
def boltzmann_machine() -> Problem:
    class Machine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 12) * 0.1)
            self.visible, self.hidden = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(12))

        def energy(self, v: Tensor) -> Tensor:
            return -(v @ self.visible) - F.softplus(v @ self.weight + self.hidden).sum(1)

        def sampled(self, v: Tensor) -> Tensor:
            h = torch.bernoulli(torch.sigmoid(v @ self.weight + self.hidden))
            return torch.bernoulli(torch.sigmoid(h @ self.weight.T + self.visible))

    def loss(model: Any, batch: Any) -> Tensor:
        data = (batch[0] > 0).float()
        with torch.no_grad():
            made = model.sampled(data)
        return (model.energy(data) - model.energy(made)).mean()  # type: ignore[no-any-return]

    return Problem(Machine(), loss=loss)


@healthy
def loss_that_is_a_sum() -> Problem:
    model = mlp()
    return Problem(model, torch.optim.SGD(model.parameters(), lr=0.1 / 32), loss=nn.CrossEntropyLoss(reduction="sum"))


@healthy
def weights_clamped_by_hand() -> Problem:
    class Clamping(SafeTrainer):
        def on_commit(self, view: Any) -> None:
            for parameter in self.model.parameters():
                parameter.data.clamp_(-0.05, 0.05)

    return Problem(mlp(), trainer=Clamping)


@healthy
def zero_initialised() -> Problem:
    model = nn.Linear(8, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return Problem(model)


@healthy
def bf16() -> Problem:
    return Problem(mlp(), config={"loop": {"precision": "bf16"}})


@healthy
def large_embedding() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(5000, 8), nn.Linear(8, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.embedding(tokens).mean(1))  # type: ignore[no-any-return]

    model = Net()
    data: Iterable[Any] = [(torch.randint(5000, (16, 6)), torch.randint(4, (16,))) for _ in range(STEPS)]
    return Problem(model, torch.optim.Adam(model.parameters(), lr=1e-2), data=list(data))


@healthy
def generator_and_discriminator_in_turn() -> Problem:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.discriminator, self.num_calls = mlp(8), mlp(1), 0

    def loss(model: Any, batch: Any) -> Tensor:
        model.num_calls += 1
        made = model.generator(torch.randn(len(batch[0]), 8))
        if model.num_calls % 2:
            return (
                F.softplus(-model.discriminator(batch[0])).mean()
                + F.softplus(model.discriminator(made.detach())).mean()
            )
        return F.softplus(-model.discriminator(made)).mean()

    model = Pair()
    return Problem(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss)


@healthy
def experts_that_are_rarely_chosen() -> Problem:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 16), nn.ModuleList(nn.Linear(8, 4) for _ in range(16))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(1)
            chosen, out = weights.argmax(1), x.new_zeros(len(x), 4)
            for index in chosen.unique().tolist():
                rows = chosen == index
                out[rows] = self.experts[index](x[rows]) * weights[rows, index, None]
            return out

    return Problem(Mixture(), data=blobs(60, 8))


@healthy
def falls_from_far_above_a_constant_answer() -> Problem:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embedding(tokens) @ self.embedding.weight.T

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].reshape(-1))

    model, generator = Tied(), torch.Generator().manual_seed(0)
    data = [(torch.arange(9) + torch.randint(50, (8, 1), generator=generator)) % 50 for _ in range(250)]
    return Problem(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, data)


@healthy
def hardly_any_positives() -> Problem:
    inputs = torch.randn(250, 16, 8, generator=torch.Generator().manual_seed(0))
    return Problem(mlp(2), data=[(x, (x[:, 0] > 2.2).long()) for x in inputs])


@healthy
def residual_branches_that_start_at_zero() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.scales, self.out = nn.ParameterList(torch.zeros(()) for _ in range(4)), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block, scale in zip(self.blocks, self.scales, strict=True):
                x = x + scale * block(x).relu()
            return self.out(x)  # type: ignore[no-any-return]

    return Problem(Net())
