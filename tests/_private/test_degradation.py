"""Every undocumented thing that is relied on, missing: what then happens is what the table says, and never an AttributeError."""

import copy
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from process_group import run_ranks
from small import assert_same, deep_state, make_batches, make_model, mse
from torch import nn
from torch.utils.data import DataLoader

from safetrain import SafeTrainer, watch
from safetrain._private import allocator, compiler, dataloader, dtensor, feature, modules, parent, storage, table
from safetrain.distributed.replicas import Replicas
from safetrain.errors import UsageError
from safetrain.forensics import investigate
from safetrain.guards.loss_graph import broadcast
from safetrain.optim.ema import Ema
from safetrain.precision.compiled import lowers_islands, note_compiled
from safetrain.precision.islands import island
from safetrain.preflight.observer import Observer
from safetrain.tensors import gradients

BAD_STEP = 3
NAMES = [each.name for each in table.FEATURES]


def train(path, *missing):
    """A run with one step that cannot be repaired: what became of it, and its incident."""
    torch.manual_seed(0)
    model, batches = make_model(), make_batches(6, bad=[BAD_STEP])
    config = {
        "loop": {"device": "cpu"},
        "guards": {"backoff": None},  # it lowers the learning rate unless the cause is known to be in the data
        "checkpoint": {"snapshot_every": 2},
        "logging": {"console": "off", "tensorboard": False},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with feature.without(*missing):
        trainer = SafeTrainer(model, loss_fn=mse, optimizer=optimizer, train_data=batches, config=config, run_dir=path)
        result = trainer.fit()
    (incident,) = result.incidents
    return deep_state(trainer), [str(loss) for loss in result.losses], incident


@cache
def train_with_all(path):
    return train(path)


@pytest.fixture
def expected(tmp_path_factory, known_state):
    return train_with_all(tmp_path_factory.getbasetemp() / "run with all")


@pytest.mark.parametrize("missing", [*([name] for name in NAMES), NAMES], ids=lambda names: "+".join(names)[:30])
def test_training_and_a_refused_step_do_not_need_it(expected, tmp_path, missing):
    state, losses, incident = train(tmp_path / "run", *missing)
    assert losses == expected[1]
    assert_same(state, expected[0])
    assert (incident.step, incident.decision.action) == (BAD_STEP, expected[2].decision.action)
    if "tracing" in missing:
        assert incident.cause.label == "unknown"
        assert "operations cannot be traced: turned off by SAFETRAIN_WITHOUT" in incident.cause.explanation
    else:
        assert incident.cause == expected[2].cause
        assert incident.origin == expected[2].origin


def divide(model, batch):
    return model(batch / batch.sum(1, keepdim=True)).mean()


@pytest.mark.parametrize("missing", [*([name] for name in NAMES), NAMES], ids=lambda names: "+".join(names)[:30])
def test_investigate_answers_or_says_why_not(missing):
    batch = torch.ones(4, 3)
    healthy, batch[2] = batch.clone(), 0.0
    with feature.without(*missing):
        incident = investigate(nn.Linear(3, 1), divide, batch)
        assert incident is not None
        assert incident.cause.label == ("unknown" if "tracing" in missing else "division_by_zero")
        assert investigate(nn.Linear(3, 1), divide, healthy) is None


# ---- what each one is for --------------------------------------------------------------------------------------


def sparse_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))


def clipped(limits):
    model = sparse_model()
    model(torch.tensor([1, 1, 4])).square().sum().backward()
    parameters = list(model.parameters())
    grads = gradients.collect(parameters)
    norm, peak = gradients.global_norm(grads), gradients.peak(grads)
    gradients.clip([parameters], parameters, limits, norm, None)
    return [norm, peak, gradients.overflow_free_norm(grads), *(p.grad.to_dense() for p in parameters)]


def test_norms_clipping_and_averages_are_the_same_one_tensor_at_a_time():
    from safetrain.core.view import Limits

    def average():
        torch.manual_seed(0)
        model = make_model()
        ema = Ema(model, 0.9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        ema.update()
        with ema.swapped_in():
            inside = copy.deepcopy(model.state_dict())
        return [ema.state_dict(), inside, model.state_dict()]

    for limits in (Limits(norm=0.1), Limits(group_norm=0.1), Limits(value=0.01)):
        numbers = clipped(limits)
        with feature.without("foreach", "sparse_values"):
            assert_same(clipped(limits), numbers)
    averages = average()
    with feature.without("foreach"):
        assert_same(average(), averages)


def test_a_gradient_that_overflows_is_clipped_one_tensor_at_a_time():
    from safetrain.tensors.gradients import _scale

    parameter = nn.Parameter(torch.zeros(2))
    for missing in ([], ["foreach"]):
        parameter.grad = torch.full((2,), 3e38)
        with feature.without(*missing):
            _scale([parameter], 1.0, torch.tensor(torch.inf), overflowed=True)
        assert torch.allclose(parameter.grad.norm(), torch.tensor(1.0))


def test_rows_of_a_sparse_tensor_are_summed_without_its_own_memory():
    rows = torch.sparse_coo_tensor(
        torch.zeros(1, 2, dtype=torch.long), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    )
    assert storage.sparse_values(rows).tolist() == [1.0, 2.0]
    with feature.without("sparse_values"):
        assert storage.sparse_values(rows).tolist() == [3.0]


class OwnNorm(nn.modules.batchnorm._BatchNorm):
    pass


def test_only_public_modules_are_known_without_their_base_classes():
    assert isinstance(OwnNorm(2), modules.batch_norms())
    kinds = modules.batch_norms, modules.convolutions, modules.transposed_convolutions, modules.norms_over_channels
    examples = nn.BatchNorm2d(2), nn.Conv1d(2, 2, 1), nn.ConvTranspose3d(2, 2, 1), nn.InstanceNorm1d(2)
    with feature.without("module_base_classes"):
        assert all(isinstance(example, kind()) for example, kind in zip(examples, kinds, strict=True))
        assert not isinstance(OwnNorm(2), modules.batch_norms())


@pytest.mark.parametrize("missing", [[], ["saved_buffers"]])
def test_which_buffers_are_saved(missing):
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)
    with feature.without(*missing):
        assert modules.is_saved(module, "kept")
        assert not modules.is_saved(module, "derived")


def test_a_compiled_model_is_investigated_as_it_is():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))

        def forward(self, x):
            return self.inner(x).mul(0).log().mean()

    compiled = torch.compile(Root(), backend="eager")
    assert compiler.original(compiled) is not compiled
    with feature.without("compiled_module"):
        assert compiler.original(compiled) is compiled
        incident = investigate(compiled, lambda model, x: model(x), torch.ones(2, 2))
    assert incident.cause.label == "log_of_nonpositive"
    assert incident.origin.module == "_orig_mod"


@pytest.mark.skipif(not compiler.BACKWARD.works, reason="this torch has no backward_pass_autocast")
def test_an_island_leaves_the_compiler_alone():
    import torch._functorch.config as config

    before = config.backward_pass_autocast
    remove = island(nn.Linear(1, 1))
    assert config.backward_pass_autocast == "off"
    remove()
    with feature.without("compiled_backward"):
        remove = island(nn.Linear(1, 1))
        assert config.backward_pass_autocast == before
        remove()
    assert config.backward_pass_autocast == before


def test_islands_of_a_compiled_model_are_said_to_be_none():
    plain, outer = nn.Linear(1, 1), nn.Linear(1, 1)
    inside = nn.Sequential(torch.compile(nn.Linear(1, 1), backend="eager"))
    note_compiled(outer, (compiled := torch.compile(outer, backend="eager")))
    with feature.without("compiled_backward"):
        assert [lowers_islands(model) for model in (plain, inside, outer, compiled)] == [False, True, True, True]
    assert not lowers_islands(outer) or not compiler.BACKWARD.works


def test_layers_are_observed_without_their_operations():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    seen = []
    for missing in ([], ["tracing"]):
        with feature.without(*missing), Observer(model, 1.0) as observer:
            observer.begin(torch.ones(1, 2))
            model(torch.ones(1, 2)).sum().backward()
        seen.append((list(observer.layers), bool(observer.largest)))
    assert seen == [(["0", "1"], True), (["0", "1"], False)]


def test_a_loader_keeps_its_workers():
    loader = DataLoader(range(4), num_workers=2)
    assert dataloader.in_this_process(loader).num_workers == 0
    with feature.without("loader_without_workers"):
        assert dataloader.in_this_process(loader) is loader


def test_samples_of_a_loader_have_no_index():
    loader = DataLoader(range(4), batch_size=2)
    assert dataloader.sampling(loader, [[3]]) is not None
    with feature.without("loader_indices"):
        assert dataloader.sampling(loader, [[3]]) is None


def test_memory_goes_back_to_the_system():
    with feature.without("keep_memory"):
        assert not allocator.keep_freed_memory()


def test_no_signal_when_the_parent_ends():
    with feature.without("parent_signal"):
        assert not parent.signal_when_parent_ends(signal.SIGTERM)


def test_nproc_names_torchrun(tmp_path):
    environment = {**os.environ, "SAFETRAIN_WITHOUT": "nproc"}
    command = [sys.executable, "-m", "safetrain", "fit", "quickstart", "--nproc", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "To fix: start it with torchrun --nproc-per-node 2 -m safetrain" in done.stderr
    assert "Traceback" not in done.stderr


def test_ddp_is_refused_before_training_starts():
    def wrap():
        raise LookupError("the model was wrapped all the same")

    with feature.without("ddp_exchange"), pytest.raises(UsageError, match=r"To fix: use loop\.strategy=fsdp"):
        Replicas(wrap)


# ---- several processes -----------------------------------------------------------------------------------------


def train_replicas(rank, path, missing):
    try:
        state, losses, incident = train(path, *missing)
    except UsageError as error:
        return str(error)
    return state["model"], losses, incident.cause.label


@pytest.mark.slow
def test_ddp_without_its_own_way_to_send_buffers(tmp_path):
    expected = run_ranks(train_replicas, 2, tmp_path / "all", [])
    found = run_ranks(train_replicas, 2, tmp_path / "without", ["ddp_buffers", "foreach"])
    assert_same(found, expected)


@pytest.mark.slow
def test_ddp_is_an_error_at_the_start_on_every_rank(tmp_path):
    for message in run_ranks(train_replicas, 2, tmp_path / "run", ["ddp_exchange"]):
        assert "To fix: use loop.strategy=fsdp, one process" in message


def parts(rank):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    found = []
    try:
        for names, mesh in (("a", init_device_mesh("cpu", (4,))), ("ab", init_device_mesh("cpu", (2, 2)))):
            for shape in ((8, 2), (5, 3), (1, 2), (3,)):
                full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
                last = Shard(len(shape) - 1)
                for placements in (
                    ([Shard(0)], [Replicate()]) if names == "a" else ([Shard(0), last], [last, Replicate()])
                ):
                    like = distribute_tensor(full, mesh, placements)
                    with feature.without("dtensor_parts"):
                        found.append((dtensor.part_of(full, like).tolist(), like.to_local().tolist()))
        module = nn.Module()
        module.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()]))
        dtensor.check_placements(module)
        with feature.without("dtensor_parts"):
            try:
                dtensor.check_placements(module)
            except UsageError as error:
                return found, str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_parts_of_sharded_tensors_are_computed():
    for found, message in run_ranks(parts, 4):
        assert [ours for ours, _ in found] == [theirs for _, theirs in found]
        assert "To fix: shard weight with Shard and Replicate only" in message


def test_a_hang_is_reported_without_the_worker_it_waits_for():
    iterator = iter(DataLoader(list(range(4)), num_workers=1, generator=torch.Generator()))

    class InLoader:
        """A frame of the thread that trains, as far as it is looked at."""

        f_code = type("Code", (), {"co_filename": torch.utils.data.dataloader.__file__})
        f_locals = {"self": iterator}  # noqa: RUF012

    wait = dataloader.waited_for([InLoader()])
    assert (wait.worker, wait.batch) == (0, 0)
    with feature.without("loader_wait"):
        assert dataloader.waited_for([InLoader()]) is None
    assert list(iterator) == [0, 1, 2, 3]


def test_no_feature_is_forgotten():
    """A new one needs a test here that says what becomes of its users."""
    text = Path(__file__).read_text()
    assert [name for name in NAMES if f'"{name}"' not in text] == []


def test_without_skipping_on_the_device_a_run_that_defers_its_reads_does_not_start(make_trainer):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {"loop": {"device": "cpu", "host_read_every": 4}}
    with feature.without("skip_on_device"), pytest.raises(UsageError, match="found_inf"):
        make_trainer(model, optimizer=optimizer, train_data=make_batches(2), config=config).fit()


def test_without_listening_no_loop_is_watched():
    model = make_model()
    with feature.without("listen_to_loops"), pytest.raises(UsageError, match="use SafeTrainer"):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_without_shapes_in_the_graph_targets_that_broadcast_are_not_seen():
    outputs = torch.randn(4, 1, requires_grad=True).tanh()
    loss = (outputs - torch.randn(4)).square().mean()
    assert broadcast(loss).label == "loss_mismatch"
    with feature.without("graph_shapes"):
        assert broadcast(loss) is None
