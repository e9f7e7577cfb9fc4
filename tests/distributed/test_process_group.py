"""The test helper itself: values, exceptions and output of ranks are returned; hanging ranks are ended with their stacks."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from process_group import RanksFailed, outcomes_of, run_ranks


def add_up(rank, offset):
    accelerator = Accelerator(cpu=True)
    assert dist.get_backend() == "gloo"
    return float(accelerator.reduce(torch.tensor(float(rank + offset)), reduction="sum"))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_form_one_group(num_ranks):
    assert run_ranks(add_up, num_ranks, 10) == [sum(range(num_ranks)) + 10 * num_ranks] * num_ranks


def raise_on_one(rank):
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("of rank one")
    return rank


def test_the_exception_of_a_rank_is_reported():
    with pytest.raises(RanksFailed, match="of rank one") as failed:
        run_ranks(raise_on_one, 2)
    first, second = failed.value.outcomes
    assert (first.value, first.error) == (0, None)
    assert second.error == "ValueError"
    assert "raise_on_one" in second.traceback
    assert "rank 1 was here" in second.log


def end_one(rank):
    if rank == 1:
        os._exit(7)
    return rank


def test_the_exit_code_of_a_rank_is_reported():
    first, second = outcomes_of(end_one, 2)
    assert first.value == 0
    assert (second.error, second.message) == ("Ended", "exit code 7")


def wait_for_nobody(rank):
    if rank == 0:
        dist.init_process_group("gloo")  # the other never comes
    else:
        the_place_where_it_waits()


def the_place_where_it_waits():
    while True:
        time.sleep(60)


def test_hanging_ranks_are_ended_with_their_stacks():
    begin = time.monotonic()
    first, second = outcomes_of(wait_for_nobody, 2, timeout=3.0)
    assert time.monotonic() - begin < 20.0
    assert first.error == second.error == "Unfinished"
    assert "init_process_group" in first.log
    assert "the_place_where_it_waits" in second.log
