"""Two hosts of two ranks: summing within each host first sends fewer bytes between them, exactly and with a codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.several.hosts import answer_of, tell

VALUES = 2_000_000
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    """Be one rank: sum in all four ways, count what its host sends; rank 0 prints what it found as JSON."""
    import torch

    from headway.collective.sums import make_sums
    from headway.collective.world import World
    from headway.launch.identity import identify

    torch.set_num_threads(1)
    world = World.start(identify(), deadline=20.0)
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(world.rank))
    exact = world.all_reduce(values.clone())
    found: dict[str, Any] = {}
    for name, codec, neighbours in (
        ("flat", "fp32", 1), ("by host", "fp32", 2), ("flat, int8", "int8", 1), ("by host, int8", "int8", 2),
    ):  # fmt: skip
        sums = make_sums(world, world.everyone, codec, neighbours)
        sent = 0
        for _ in range(2):  # the first one connects
            work = values.clone()
            world.barrier()
            before = int(SENT.read_text())
            if sums is None:
                world.all_reduce(work)
            else:
                sums.start(work, "a sum", residual=None, slots=()).wait()
            world.barrier()
            sent = int(SENT.read_text()) - before
        error = float((work - exact).abs().max() / exact.abs().max())
        bits = world.gather_objects(float(work.double().sum()))
        found[name] = {"sent": sent, "error": error, "same": len(set(bits)) == 1}
        if sums is not None:
            sums.close()
    tell(world, found)


@pytest.mark.several
def test_less_is_sent_between_hosts() -> None:
    found = answer_of(__file__, "200mbit", timeout=60, per_host=2)
    size = 4 * VALUES
    # A ring of four sends 2 * 3/4 of the values over each host's link; two-shot sums of four twice their half.
    expected = {"flat": 1.5 * size, "by host": size, "flat, int8": 2 * size / 4, "by host, int8": size / 4}
    for name, told in found.items():
        assert told["sent"] == pytest.approx(expected[name], rel=0.15), (name, told)
        assert told["same"] and told["error"] < (0.03 if "int8" in name else 1e-6), (name, told)


if __name__ == "__main__":
    main()
