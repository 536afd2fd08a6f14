"""The doctor says what each codec would give, by measured rates and a ring's arithmetic."""

from __future__ import annotations

import pytest

from headway.planner.wire import PARTS
from headway.report.doctor import Measured, codec_lines, examine

WORK = {"fp16": 2e-10, "bf16": 1e-10, "int8": 3e-10, "int4": 6e-10}


def test_seconds_on_the_wire_and_of_work() -> None:
    measured = Measured(1e-4, 2e9, 1e11, 1e10, WORK)
    lines = list(codec_lines(measured, 2, 1_000_000_000, 125e6))
    assert "954 MiB of float32 gradients, 2 ranks, the link that you named of 125 MB/s" in lines[0]
    # A ring of two sends half of the bytes twice: 8 s, 4 s, 2.02 s, 1.06 s; and the work for 1e9 bytes.
    for name, line, total in zip(PARTS, lines[1:], ("8 s", "4.2 s", "4.1 s", "2.32 s", "1.66 s"), strict=False):
        assert line.split()[0] == name and f" {total} " in line, line
    assert "200 ms of work, at 5 GB/s" in lines[2]
    assert [line.split()[0:4:3] for line in lines[6:]] == [['"auto"', "fp16:"], ['"auto8"', "int8:"]]
    assert "the link here of 2 GB/s" in next(codec_lines(measured, 2, 1_000_000_000, None))
    assert list(codec_lines(measured, 2, 1_000_000_000, 1e11))[6].split()[3] == "fp32:"


@pytest.mark.several
def test_this_machine() -> None:
    lines = list(examine(2, 8_000_000))
    starts = [line.split()[0] for line in lines]
    assert [name for name in ("headway", "links", "compute", "codecs", *PARTS, "use") if name in starts] == [
        "headway", "links", "compute", "codecs", *PARTS, "use",
    ]  # fmt: skip
