"""The codec of a plan: exact where that costs little, 16 bits on slow links between hosts, 8 when allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cost.cluster import Cluster, Link
from headway.planner.plan import Plan
from headway.planner.route import Route
from headway.planner.search import search
from headway.planner.wire import MENUS, NEARLY, Reduction, menu, pick
from tests.cost.graphs import chain, times

WORK = {"fp16": 2e-10, "bf16": 2e-10, "int8": 3e-10}
GIGABIT, LOOPBACK = Link(2e-4, 118e6), Link(5e-5, 2e9)


def hosts(link: Link, count: int = 2) -> Cluster:
    return Cluster.here(2, 1 << 30, num_hosts=count, link=link, link_between=link, flops=1e11, bandwidth=1e10)


def chosen(link: Link, seconds: float, asked: str | None = None, count: int = 2) -> tuple[str, str | None]:
    """Return the codec for 100 MB of gradients, and the reason; forward and backward take so many seconds each."""
    cluster = hosts(link, count)
    reduction = Reduction(100_000_000, 0, Route(2, cluster.link([0, 1])), seconds, 0.0, 2 * seconds)
    wire, why = pick(menu(asked, WORK, cluster), [reduction], apart=count > 1)
    return wire.codec, why


@pytest.mark.parametrize(
    ("link", "seconds", "asked", "codec"),
    [
        (GIGABIT, 0.3, None, "fp16"),  # 0.85 s exact, hardly hidden
        (GIGABIT, 0.3, "auto8", "int8"),
        (GIGABIT, 20.0, None, "fp32"),  # hidden behind backward, but for the last bucket
        (GIGABIT, 20.0, "auto8", "fp32"),
        (Link(1e-5, 10e9), 0.3, None, "fp32"),
        (Link(1e-5, 10e9), 0.3, "auto8", "fp32"),
        (GIGABIT, 0.3, "fp32", "fp32"),
        (GIGABIT, 20.0, "int8", "int8"),
        (GIGABIT, 20.0, "bf16", "bf16"),
    ],
)
def test_choice(link: Link, seconds: float, asked: str | None, codec: str) -> None:
    found, why = chosen(link, seconds, asked)
    assert found == codec
    assert asked == "fp32" or (why is not None and codec in why)


def test_on_one_host_gradients_stay_exact_unless_told() -> None:
    for asked in (None, "auto", "auto8"):
        assert chosen(LOOPBACK, 0.01, asked, count=1) == (
            "fp32",
            "gradients stay exact (fp32): the copies are on one host",
        )
    assert chosen(LOOPBACK, 0.01, "int8", count=1)[0] == "int8"


def test_the_least_lossy_within_five_percent() -> None:
    """Brute force over the menu, for steps from all hidden to all exposed."""
    cluster = hosts(GIGABIT)
    wires = menu("auto8", WORK, cluster)
    assert [wire.codec for wire in wires] == list(MENUS["auto8"])
    seen = set()
    for tenths in range(1, 60):
        reduction = Reduction(100_000_000, 1000, Route(2, GIGABIT), 0.1 * tenths, 0.01, 0.15 * tenths)
        step = {wire.codec: reduction.rest + reduction.seconds(wire) for wire in wires}
        within = [codec for codec in MENUS["auto8"] if step[codec] <= (1 + NEARLY) * min(step.values())]
        found = pick(wires, [reduction], apart=True)[0].codec
        assert found == within[0]
        seen.add(found)
    assert seen >= {"fp32", "fp16", "int8"}


def test_where_nothing_was_measured_nothing_is_rounded() -> None:
    assert [wire.codec for wire in menu(None, None, Cluster("2x8xH100"))] == ["fp32"]
    assert [wire.codec for wire in menu("auto8", None, Cluster("2x8xH100"))] == list(MENUS["auto8"])


def two_copies(codec: str | None, work: dict[str, float] | None = None, link: Link = GIGABIT) -> Plan:
    fixed = {"data": 2, **({"codec": codec} if codec else {})}
    return search(
        lambda n: chain(n, (1024,) * 8), times, hosts(link), global_batch=4, fixed=fixed, codec_work=work or WORK
    )


def test_the_plan_keeps_the_codec_and_expects_less(tmp_path: Path) -> None:
    exact, half, eight = two_copies("fp32"), two_copies("fp16"), two_copies("auto8")
    assert (exact.codec, half.codec, eight.codec) == ("fp32", "fp16", "int8")
    assert exact.seconds > half.seconds > eight.seconds  # type: ignore[operator]
    assert two_copies(None).codec == "fp16"
    # Eight rounds of 4 MiB as half precision: half a round to the other, from it, its sum and mine.
    assert half.memory[0] - exact.memory[0] == 8 * 4 * (1 << 20)
    assert any("cross as int8" in reason for reason in eight.reasons) and "int8" in str(eight)
    eight.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == eight


def test_what_is_not_float32_is_priced_and_told_as_exact() -> None:
    cluster = hosts(GIGABIT)
    reduction = Reduction(0, 8_000_000, Route(2, GIGABIT), 0.01, 0.0, 0.02)
    wire, why = pick(menu("int8", WORK, cluster), [reduction], apart=True)
    assert wire.codec == "int8" and why == "gradients are reduced exactly: int8 is for float32"
    exact = pick(menu("fp32", WORK, cluster), [reduction], apart=True)[0]
    assert reduction.seconds(wire) == reduction.seconds(exact)
