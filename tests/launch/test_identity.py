"""Who a process is: each launcher's variables are read, and variables that disagree are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import HeadwayError
from headway.launch.identity import Identity, PlanRequest, describe, expand_nodelist, identify

RANKS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODELIST": "gpu[07-08]"}


def test_alone() -> None:
    assert identify({}) == Identity()


def test_torchrun() -> None:
    found = identify(RANKS | MEET | {"TORCHELASTIC_RUN_ID": "none"})
    assert found == Identity(3, 4, 1, 2, "10.0.0.1", 29500, "torchrun")


def test_headway_with_its_own_settings() -> None:
    own = {"HEADWAY_LAUNCHER": "headway", "HEADWAY_RUN_DIRECTORY": "/a/runs/3", "HEADWAY_DEVICE_MEMORY": "512"}
    found = identify(RANKS | MEET | own | {"HEADWAY_DEADLINE": "20"})
    assert found == Identity(3, 4, 1, 2, "10.0.0.1", 29500, "headway", Path("/a/runs/3"), 512, 20.0)


def test_headway_inside_a_slurm_job_is_headway() -> None:
    found = identify(SLURM | {"HEADWAY_LAUNCHER": "headway", "RANK": "0", "WORLD_SIZE": "1"})
    assert (found.launcher, found.rank, found.size) == ("headway", 0, 1)


def test_slurm_meets_on_the_first_host() -> None:
    found = identify(SLURM | {"SLURM_JOB_ID": "1234567"})
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 4, 1, 2)
    assert (found.master_address, found.launcher) == ("gpu07", "slurm")
    assert found.master_port is not None and 1024 < found.master_port < 32768


def test_slurm_ports_are_the_same_on_all_ranks_and_differ_between_jobs() -> None:
    ports = [identify(SLURM | {"SLURM_PROCID": str(rank), "SLURM_JOB_ID": "70"}).master_port for rank in (2, 3)]
    assert ports[0] == ports[1] != identify(SLURM | {"SLURM_JOB_ID": "71"}).master_port


def test_slurm_with_unequal_hosts() -> None:
    uneven = {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NODELIST": "a,b,c"}
    sizes = [
        identify(SLURM | uneven | {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}).local_size
        for rank, local, node in (("0", "0", "0"), ("3", "1", "1"), ("4", "0", "2"))
    ]
    assert sizes == [2, 2, 1]


def test_a_shell_inside_a_slurm_allocation_is_alone() -> None:
    assert identify(SLURM | {"SLURM_JOB_NAME": "bash"}).launcher == "alone"


def test_kubernetes() -> None:
    found = identify({"RANK": "1", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.9"} | MEET)
    assert (found.launcher, found.local_rank, found.local_size) == ("kubernetes", 0, 1)


def test_a_request_for_a_plan_needs_no_other_process() -> None:
    request = PlanRequest("8xcpu:256MiB", {"pipeline": 2, "cuts": ("a", "b")}, Path("plan.toml"))
    found = identify(RANKS | MEET | {"HEADWAY_PLAN_REQUEST": request.to_json()})
    assert (found.plan_only, found.size) == (request, 1)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "4", "WORLD_SIZE": "4"} | MEET, "rank 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"} | MEET, "rank -1"),
        ({"RANK": "0", "WORLD_SIZE": "two"} | MEET, "two"),
        ({"RANK": "0", "WORLD_SIZE": "0"} | MEET, "0 processes"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT"),
        (RANKS | MEET | {"LOCAL_RANK": "2"}, "local rank 2"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_NTASKS"}, "SLURM_NTASKS"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_NODELIST"}, "SLURM_NODELIST"),
        (SLURM | {"SLURM_NODELIST": "gpu[a-b]"}, "a-b"),
    ],
)
def test_variables_that_disagree_are_refused(environ: dict[str, str], named: str) -> None:
    with pytest.raises(HeadwayError) as refusal:
        identify(environ)
    assert named in str(refusal.value)
    assert refusal.value.place and refusal.value.remedy


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,m2", ["n1", "m2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10],login", ["n08", "n09", "n10", "login"]),
        ("r[1-2]c[1,3]-ib", ["r1c1-ib", "r1c3-ib", "r2c1-ib", "r2c3-ib"]),
    ],
)
def test_compressed_host_lists(text: str, hosts: list[str]) -> None:
    assert list(expand_nodelist(text)) == hosts


def test_one_line_says_what_was_found() -> None:
    line = describe(identify(RANKS | MEET | {"HEADWAY_DEVICE_MEMORY": str(2**29)}), "2 cpus")
    assert "\n" not in line
    assert all(part in line for part in ("torchrun", "a limit", "2 cpus"))
    assert line.endswith("no journal (HEADWAY_RUN_DIRECTORY=runs/NAME keeps one)")
    line = describe(
        identify(RANKS | MEET | {"HEADWAY_LAUNCHER": "headway", "HEADWAY_RUN_DIRECTORY": "runs/7"}), "2 cpus"
    )
    assert line == "headway: 2 cpus; started by headway run; runs/7/"
