"""Schedules as text: there and back, and to and from torch's own schedules."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

from headway.errors import PlanError
from headway.schedule.action import Schedule, chain
from headway.schedule.build import gpipe, one_f_one_b
from headway.schedule.catalogue import CATALOGUE, build
from headway.schedule.exchange import read_csv, read_rows, write_csv, write_rows
from headway.schedule.lower import lower
from tests.schedule.drawing import schedules

RANKS = 4


@given(schedules())
def test_there_and_back(schedule: Schedule) -> None:
    if set(schedule.placement) == set(range(schedule.num_ranks)) and schedule.trains:
        assert read_csv(write_csv(schedule), name=schedule.name) == schedule
        assert read_rows(write_rows(lower(schedule, chain(schedule.num_stages))), name="drawn") == schedule


def test_what_it_looks_like() -> None:
    assert write_csv(one_f_one_b(2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    padded = "0F0,0F1,,0B0, 0F2 ,0B1,,0B2,\r\n,1F0,1B0,1F1,1B1,1F2,1B2,1REDUCE_GRAD\r\n"
    assert read_csv(padded).ranks == one_f_one_b(2, 3).ranks


@pytest.fixture(scope="module")
def fake_group() -> Iterator[None]:
    """Torch's schedules want a process group when they are made; this one has four ranks and no processes."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def made_by_torch(kind: type, chunks: int, num_micro: int, vee: bool = False):
    own = [0, 2 * RANKS - 1] if vee else [chunk * RANKS for chunk in range(chunks)]
    stages = [PipelineStage(torch.nn.Linear(2, 2), index, RANKS * chunks, torch.device("cpu")) for index in own]
    return kind(stages[0] if issubclass(kind, theirs.PipelineScheduleSingle) else stages, num_micro, loss_fn=sum)


def dumped(schedule) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(schedule.pipeline_order[rank] for rank in range(RANKS))
    return text.getvalue()


@pytest.mark.parametrize(
    ("kind", "chunks", "vee", "ours"),
    [
        (theirs.ScheduleGPipe, 1, False, "gpipe"),
        (theirs.ScheduleInterleaved1F1B, 2, False, "interleaved"),
        (theirs.ScheduleInterleaved1F1B, 3, False, "interleaved"),
        (theirs.ScheduleLoopedBFS, 2, False, None),  # its backwards take the micro-batches last to first
        (theirs.ScheduleInterleavedZeroBubble, 2, False, None),
        (theirs.ScheduleZBVZeroBubble, 2, True, "zero_bubble_v"),
        (theirs.ScheduleDualPipeV, 2, True, "dual_pipe_v"),
    ],
)
@pytest.mark.parametrize("num_micro", [8, 12])
@pytest.mark.usefixtures("fake_group")
def test_torchs_own_orders_are_read_and_where_we_build_the_same_they_agree(kind, chunks, vee, ours, num_micro) -> None:
    schedule = read_csv(dumped(made_by_torch(kind, chunks, num_micro, vee)))  # checked
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_micro) == (RANKS, RANKS * chunks, num_micro)
    if ours is not None:
        assert schedule.ranks == build(ours, RANKS, num_micro, chunks).ranks


@pytest.mark.usefixtures("fake_group")
def test_a_fault_in_torchs_table_of_1f1b_is_named() -> None:
    """In torch 2.13 its last rank counts forwards from 1. What torch runs is right: it does not run this table."""
    lines = dumped(made_by_torch(theirs.Schedule1F1B, 1, 8)).splitlines()
    with pytest.raises(PlanError, match="F0 of stage 3 is missing"):
        read_csv("\n".join(lines))
    for micro in range(8):
        lines[-1] = lines[-1].replace(f"3F{micro + 1}", f"3F{micro}")
    assert read_csv("\n".join(lines)).ranks == one_f_one_b(RANKS, 8).ranks


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.most != 1])
@pytest.mark.usefixtures("fake_group")
def test_torch_reads_ours_and_finds_nothing_wrong(name: str, tmp_path) -> None:
    vee = CATALOGUE[name].most == 2
    host = made_by_torch(theirs.ScheduleZBVZeroBubble if vee else theirs.ScheduleInterleaved1F1B, 2, 8, vee)
    schedule = build(name, RANKS, 8, 2)
    path = tmp_path / "schedule.csv"
    path.write_text(write_csv(schedule))
    host._load_csv(str(path), "compute_only")  # validates, adds messages
    read = tuple(tuple(str(action) for action in host.pipeline_order[rank]) for rank in range(RANKS))
    assert read == tuple(tuple(map(str, actions)) for actions in schedule.ranks)


def test_bad_text_is_refused_with_its_place() -> None:
    for text, message, place in (
        ("0F0,0B0,x", "'x' is no action", "line 1 \\(rank 0\\), cell 3"),
        ("0F0,0B0\n1F0,1Q0", "'1Q0' is no action", "line 2 \\(rank 1\\), cell 2"),
        ("0F,0B0", "'0F' is no action", "cell 1"),
        ("0F0,0SEND_F0,0B0", "'0SEND_F0' is a message", "cell 2"),
        ("0F0,0B0\n0F1,0B1", "stage 0 is on rank 0 and on rank 1", "0F1 in line 2"),
        ("0F0,0B0\n2F0,2B0", "no rank does anything for stage 1 of 3", ""),
        ("0F0,0B0,0F0", "a second time", ""),
        ("0F0,0F1,0B0", "B1 of stage 0 is missing", ""),
        ("0F0,0F99999999,0B0", "'0F99999999' is no action", ""),
        ("0B0,0F0", "can never finish", ""),
        ("0F9999999,0B9999999", "F0 of stage 0 is missing", ""),
        ("0F0,0I0", "W0 of stage 0 is missing", ""),
        ("", "needs at least one stage", ""),
        ("0F0,0B0\n\n1F0,1B0\n\n", "rank 1 does nothing", "line 2"),
    ):
        with pytest.raises(PlanError, match=message) as caught:
            read_csv(text, name="mine")
        assert caught.match(place)


def test_a_name_is_kept() -> None:
    assert read_rows(write_rows(gpipe(2, 2)), name="searched").name == "searched"
