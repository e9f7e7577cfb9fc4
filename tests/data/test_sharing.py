"""One epoch sharded among processes: disjoint, complete, equally long, and continued by another number of them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from safetrain import CheckpointError
from safetrain.config.schema import DataConfig
from safetrain.data.sampler import ResumableBatchSampler
from safetrain.data.stream import open_stream


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index])


class NumberStream(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor([index]) for index in torch.randperm(24).tolist()])


class Restless(Sampler):
    """Draws from the global random state for every index."""

    def __iter__(self):
        left = list(range(24))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


def opened(data, rank, world_size, **options):
    config, cpu = DataConfig(**{"batch_size": 3, **options}), torch.device("cpu")
    return open_stream(data, config, shuffle=True, seed=5, device=cpu, rank=rank, world_size=world_size)


def streams_over(make, world_size, **options):
    streams = []
    for rank in range(world_size):
        torch.manual_seed(1)  # as all processes of a run are seeded
        streams.append(opened(make(), rank, world_size, **options))
    return streams


def windows(streams, count=10**6, size=1):
    """The windows of each process, as lists of samples; each process draws other random numbers in between."""
    found = [[] for _ in streams]
    for index in range(count):
        taken = []
        for rank, stream in enumerate(streams):
            # When data is opened, real processes would agree on the random state of the first.
            torch.manual_seed(100 * index + rank if index else 1)
            taken.append([int(n) for batch in stream.take(size) for n in batch.flatten()])
        if not any(taken):
            break
        assert all(taken), "a process got no batch while another did"
        for rank, window in enumerate(taken):
            found[rank].append(window)
    return found


def flat(found):
    return [sample for windows in found for window in windows for sample in window]


KINDS = {
    "data set": lambda: Numbers(24),
    "loader": lambda: DataLoader(Numbers(24), batch_size=3, shuffle=True),
    "loader without batches": lambda: DataLoader(Numbers(24), batch_size=None, shuffle=True),
    "sampler": lambda: DataLoader(Numbers(24), batch_size=3, sampler=Restless()),
    "batch sampler": lambda: DataLoader(Numbers(24), batch_sampler=BatchSampler(Restless(), 3, False)),
    "iterable data set": NumberStream,
    "list": lambda: [torch.arange(3 * i, 3 * i + 3) for i in range(8)],
    "function": lambda: lambda: iter(torch.randperm(24).split(3)),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_disjoint_and_cover_the_data(kind, world_size):
    streams = streams_over(KINDS[kind], world_size)
    epochs = []
    for _ in range(2):
        found = windows(streams)
        assert sorted(flat(found)) == list(range(24))
        epochs.append(found)
        for stream in streams:
            stream.next_epoch()
    assert kind == "list" or epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 1), (1, 2), (2, 4), (4, 2), (2, 2)])
def test_another_number_of_processes_continues_the_epoch(kind, saved_by, resumed_by):
    if saved_by == 1 and "sampler" in kind:
        pytest.skip(
            "alone, a sampler that draws all along draws from the stream of the model, which a resume cannot replay"
        )
    streams = streams_over(KINDS[kind], saved_by)
    size = 1 if kind != "loader without batches" else 3
    before = flat(windows(streams, count=4 // saved_by, size=size))
    states = [stream.state_dict() for stream in streams]
    others = streams_over(KINDS[kind], resumed_by)
    for stream in others:
        stream.load_state_dict(states[0])
    after = windows(others)
    assert len(before) == 12
    assert sorted(before + flat(after)) == list(range(24))
    if saved_by == resumed_by:
        assert after == windows(streams)
    for stream in others:
        stream.next_epoch()
    assert sorted(flat(windows(others))) == list(range(24))


@settings(deadline=None, max_examples=150)
@given(
    length=st.integers(0, 60),
    batch_size=st.integers(1, 7),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    taken=st.integers(0, 8),
    left_out=st.sets(st.integers(0, 59), max_size=4),
    drop_last=st.booleans(),
)
def test_every_sample_is_visited_once_whatever_the_sizes(length, batch_size, before, after, taken, left_out, drop_last):
    left_out = frozenset(index for index in left_out if index < length)

    def make(world_size, base):
        parts = [
            ResumableBatchSampler(length, batch_size, 3, True, drop_last, rank, world_size)
            for rank in range(world_size)
        ]
        for part in parts:
            part.epoch, part.base, part.left_out = 2, base, left_out
        return parts

    first = make(before, 0)
    done = [list(itertools.islice(iter(part), taken)) for part in first]
    consumed = len(done[0]) * first[0].unit
    second = make(after, consumed)
    rest = [list(part) for part in second]
    for parts in (done, rest):
        assert len({len(part) for part in parts}) == 1
        for group in zip(*parts, strict=True):
            sizes = [len(batch) for batch in group]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= batch_size
            assert not drop_last or min(sizes) == batch_size
    visited = [index for parts in (done, rest) for part in parts for batch in part for index in batch]
    assert len(visited) == len(set(visited))
    assert not left_out & set(visited)
    num_missing = length - len(left_out) - len(visited)
    assert 0 <= num_missing < (batch_size * after if drop_last else after)


def test_one_process_visits_the_seeded_permutation():
    batches = ResumableBatchSampler(7, 2, seed=4, shuffle=True)
    batches.epoch = 3
    generator = torch.Generator().manual_seed(4 * 1_000_003 + 3)
    assert list(batches) == [part.tolist() for part in torch.randperm(7, generator=generator).split(2)]


@pytest.mark.parametrize(
    ("kind", "num_missing"), [("data set", 0), ("loader", 0), ("iterable data set", 9), ("list", 9)]
)
def test_an_uneven_end_is_divided_or_dropped(kind, num_missing):
    streams = streams_over(KINDS[kind], 5)  # eight batches
    found = flat(windows(streams))
    assert len(set(found)) == len(found) == 24 - num_missing


def test_windows_of_several_batches_end_together():
    streams = streams_over(lambda: Numbers(20), 2)
    found = windows(streams, size=2)
    assert [len(window) for window in found[0]] == [6, 4]
    assert [len(window) for window in found[1]] == [6, 4]
    assert sorted(flat(found)) == list(range(20))


def test_ids_are_those_of_the_data_set():
    for stream in streams_over(lambda: Numbers(22), 2):
        while window := stream.take(2):
            assert stream.ids(window) == [batch.flatten().tolist() for batch in window]


def test_another_batch_size_continues_the_epoch():
    streams = streams_over(lambda: Numbers(30), 2, batch_size=4)
    before = flat(windows(streams, count=2))
    (other,) = streams_over(lambda: Numbers(30), 1, batch_size=5)
    other.load_state_dict(streams[0].state_dict())
    assert sorted(before + flat(windows([other]))) == list(range(30))


def own_parts(world_size):
    samplers = [DistributedSampler(Numbers(24), world_size, rank, shuffle=True) for rank in range(world_size)]
    loaders = [DataLoader(Numbers(24), batch_size=3, sampler=sampler) for sampler in samplers]
    return [opened(loader, rank, world_size) for rank, loader in enumerate(loaders)]


def test_a_distributed_sampler_is_not_sharded_again():
    streams = own_parts(2)
    found = windows(streams, count=2)
    assert len(flat(found)) == 12
    again = own_parts(2)
    for stream, other in zip(streams, again, strict=True):
        other.load_state_dict(stream.state_dict())
    assert sorted(flat(found) + flat(windows(again))) == list(range(24))


def test_presharded_data_cannot_be_resharded_within_an_epoch():
    streams = own_parts(2)
    windows(streams, count=1)
    for other in (own_parts(3)[0], streams_over(KINDS["loader"], 2)[0]):
        with pytest.raises(CheckpointError, match="own shard"):
            other.load_state_dict(streams[0].state_dict())
    windows(streams)
    for stream in streams:
        stream.next_epoch()
    other = own_parts(3)[0]
    other.load_state_dict(streams[0].state_dict())
    assert (other.epoch, other.num_consumed) == (1, 0)
