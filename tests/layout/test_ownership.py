"""Ownership: whole parameters shared out evenly, the same on every rank."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from headway.layout.ownership import share_out


def heaviest(sizes: list[int], owners: list[int], copies: int) -> int:
    return max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == copy) for copy in range(copies))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_owner_is_near_the_least_possible(sizes: list[int], copies: int) -> None:
    named = {f"w{i}": size for i, size in enumerate(sizes)}
    owners = share_out(named, dict.fromkeys(named, (0,)), copies)
    best = min(heaviest(sizes, list(way), copies) for way in product(range(copies), repeat=len(sizes)))
    got = heaviest(sizes, [owners[name] for name in named], copies)
    assert best <= got <= best * (4 / 3 - 1 / (3 * copies)) + 1e-9


def test_equal_layers_are_dealt_out_in_turn() -> None:
    sizes = {f"blocks.{i}.{kind}": size for i in range(6) for kind, size in (("up", 400), ("down", 400), ("bias", 4))}
    owners = share_out(sizes, dict.fromkeys(sizes, (0,)), 3)
    loads = [sum(size for name, size in sizes.items() if owners[name] == copy) for copy in range(3)]
    assert len(set(loads)) == 1
    assert owners == share_out(dict(reversed(sizes.items())), dict.fromkeys(sizes, (0,)), 3)  # not by the order given


def test_a_tied_parameter_has_one_owner_and_each_rank_is_balanced_for_itself() -> None:
    sizes = {"word": 100, "a": 60, "b": 40, "c": 90, "d": 10}
    holders = {"word": (0, 1), "a": (0,), "b": (0,), "c": (1,), "d": (1,)}
    owners = share_out(sizes, holders, 2)
    for stage in (0, 1):
        loads = [sum(sizes[n] for n in sizes if stage in holders[n] and owners[n] == copy) for copy in (0, 1)]
        assert sorted(loads) == [100, 100]
    # both stages on one rank: one load counts
    owners = share_out(sizes, holders, 2, placement=(0, 0))
    assert {sum(sizes[n] for n in sizes if owners[n] == copy) for copy in (0, 1)} == {150}


def test_one_parameter_larger_than_all_others_stays_whole() -> None:
    owners = share_out({"embedding": 1000, "a": 10, "b": 10}, {"embedding": (0,), "a": (0,), "b": (0,)}, 2)
    assert owners == {"embedding": 0, "a": 1, "b": 1}
