"""Data streams resume in the middle of an epoch: exactly, and without reading what was consumed before."""

import pytest
import torch
from checkpoint_cases import Counting, Iterable, OwnState, make_samples
from small import assert_same
from torch.utils.data import DataLoader

from safetrain.config.schema import DataConfig
from safetrain.data.sampler import ResumableBatchSampler
from safetrain.data.stream import open_stream


def stream_over(data, workers=0, rank=0, world_size=1, drop_last=False):
    config = DataConfig(batch_size=4, num_workers=workers, drop_last=drop_last)
    return open_stream(
        data, config, shuffle=True, seed=3, device=torch.device("cpu"), rank=rank, world_size=world_size
    )  # fmt: skip


def rest_of(stream, num_epochs=2):
    """The remaining batches of this epoch and of the ones after it."""
    found = []
    for _ in range(num_epochs):
        while window := stream.take(2):
            found += window
        stream.next_epoch()
    return found


KINDS = {
    "data set": lambda: make_samples(38),
    "list": lambda: [torch.full((2,), float(i)) for i in range(9)],
    "loader": lambda: DataLoader(make_samples(), batch_size=4, shuffle=True),
    "loader with generator": lambda: DataLoader(
        make_samples(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)
    ),
    "weighted": lambda: DataLoader(
        make_samples(), batch_size=4, sampler=torch.utils.data.WeightedRandomSampler(torch.rand(36), 36)
    ),
    "iterable": Iterable,
    "with state": OwnState,
}


@pytest.mark.parametrize("position", [0, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_resumes_where_its_state_says(kind, position):
    torch.manual_seed(5)
    one = stream_over(KINDS[kind]())
    torch.manual_seed(6)
    one.take(1)
    one.next_epoch()
    if position:
        one.take(position)
    state, random = one.state_dict(), torch.get_rng_state()
    expected = rest_of(one)
    torch.manual_seed(5)
    other = stream_over(KINDS[kind]())
    other.load_state_dict(state)
    torch.set_rng_state(random)
    assert_same(expected, rest_of(other))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_style_data_set_resumes_without_reading_earlier_samples(workers):
    data = Counting(400)
    stream = stream_over(data, workers)
    stream.take(90)
    state = stream.state_dict()
    expected = stream.take(10)
    stream.close()
    fresh = Counting(400)
    resumed = stream_over(fresh, workers)
    resumed.load_state_dict(state)
    assert_same(expected, resumed.take(10))
    resumed.close()
    assert len(fresh.asked) <= 40  # in this process; with workers none at all


def test_a_loader_resumes_by_drawing_indices_only():
    data = Counting(400)
    stream = stream_over(DataLoader(data, batch_size=4, shuffle=True))
    stream.take(90)
    state = stream.state_dict()
    expected = stream.take(10)
    data.asked.clear()
    resumed = stream_over(DataLoader(data, batch_size=4, shuffle=True))
    resumed.load_state_dict(state)
    assert_same(expected, resumed.take(10))
    assert len(data.asked) == 40


def test_prefetched_batches_do_not_move_the_cursor():
    stream = stream_over(Counting(80), workers=2)
    stream.take(3)
    assert (stream.epoch, stream.num_consumed) == (0, 3)
    stream.close()


def test_a_skip_moves_the_cursor():
    stream, other = stream_over(make_samples()), stream_over(make_samples())
    stream.take(2)
    stream.skip(3)
    other.take(5)
    assert_same(stream.take(4), other.take(4))
    stream.skip(100)
    assert (stream.num_consumed, stream.take(1)) == (9, [])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_batch_sampler_starts_at_any_position(shuffle, rank):
    batches = ResumableBatchSampler(21, 2, seed=4, shuffle=shuffle, rank=rank, world_size=2)
    batches.epoch = 3
    whole = list(batches)
    assert len(whole) == len(batches) == 5
    for start in range(7):
        batches.start = start
        assert list(batches) == whole[start:]


def test_a_shard_of_a_list_resumes():
    batches = [torch.tensor([float(i)]) for i in range(11)]
    stream = stream_over(batches, rank=1, world_size=2)
    stream.take(2)
    resumed = stream_over(batches, rank=1, world_size=2)
    resumed.load_state_dict(stream.state_dict())
    assert [t.item() for t in resumed.take(9)] == [t.item() for t in stream.take(9)] == [5.0, 7.0, 9.0]
