"""The variables of `srun` become those of a launcher."""

import pytest

from safetrain.distributed.slurm import announce, first_host

TASK = {
    "SLURM_JOB_ID": "31007",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_a_task_of_srun_knows_its_rank_and_where_to_meet():
    environment = dict(TASK)
    announce(environment)
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu03"}
    assert {name: environment[name] for name in wanted} == wanted
    assert environment["MASTER_PORT"] == "16007"


@pytest.mark.parametrize(
    "change", [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}], ids=["under torchrun", "one task, with a launcher in it"]
)
def test_a_launcher_or_a_single_task_is_left_alone(change):
    environment = TASK | change
    announce(environment)
    assert environment == TASK | change


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("node7", "node7"),
        ("a,b", "a"),
        ("n[1,3]", "n1"),
        ("rack-2-n[08-11]", "rack-2-n08"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first
