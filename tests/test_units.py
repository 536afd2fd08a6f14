"""Units: what is read means the same as what is printed, and a wrong unit is refused with a remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import units


@pytest.mark.parametrize(
    ("text", "amount"),
    [("24 GiB", 24 * 2**30), ("512MiB", 512 * 2**20), ("1.5 kib", 1536), ("2 GB", 2 * 10**9), ("77", 77), (77, 77)],
)
def test_bytes_are_read(text: str | int, amount: int) -> None:
    assert units.parse_bytes(text) == amount


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1 Gbit/s", 125e6), ("25 GB/s", 25e9), ("8 MiB/s", 8 * 2**20), ("10 bit/s", 1.25), (3.5, 3.5)],
)
def test_rates_are_read_in_bytes_per_second(text: str | float, rate: float) -> None:
    assert units.parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("300", 300), ("5 min", 300), ("200 ms", 0.2), ("10us", 1e-5), (7, 7)])
def test_durations_are_read_in_seconds(text: str | float, seconds: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (units.parse_bytes, "24 GX"),
        (units.parse_bytes, "lots"),
        (units.parse_bytes, "-3 GiB"),
        (units.parse_bytes, "0 GiB"),
        (units.parse_rate, "3 parsec"),
        (units.parse_rate, "7 Gb/s"),  # bits or bytes: not to be guessed
        (units.parse_rate, "25 GB"),
        (units.parse_seconds, "3 fortnights"),
    ],
)
def test_a_wrong_unit_is_refused_with_fact_and_remedy(read: object, text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        read(text)  # type: ignore[operator]
    assert repr(text) in str(refusal.value) and "Try: " in str(refusal.value)


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (units.format_bytes(512 * 2**20), "512 MiB"),
        (units.format_bytes(24 * 2**30), "24 GiB"),
        (units.format_bytes(2**30 - 1), "1 GiB"),
        (units.format_bytes(0), "0 B"),
        (units.format_seconds(0.212), "212 ms"),
        (units.format_seconds(0.9999), "1 s"),
        (units.format_seconds(100), "1 min 40 s"),
        (units.format_seconds(59.97), "1 min"),
        (units.format_seconds(7500), "2 h 5 min"),
        (units.format_seconds(float("inf")), "unknown time"),
        (units.format_rate(125e6), "125 MB/s"),
        (units.format_flops(3.2e9), "3.2 GFLOP"),
        (units.format_flop_rate(95e9), "95 GFLOP/s"),
        (units.format_count(5_200_000), "5.2 M"),
        (units.format_count(950), "950"),
    ],
)
def test_printing(printed: str, text: str) -> None:
    assert printed == text


@given(st.integers(1, 2**50))
def test_printed_bytes_read_back_within_three_digits(amount: int) -> None:
    assert units.parse_bytes(units.format_bytes(amount)) == pytest.approx(amount, rel=0.006)


@given(st.floats(1e-6, 59))
def test_printed_seconds_read_back_within_three_digits(seconds: float) -> None:
    assert units.parse_seconds(units.format_seconds(seconds)) == pytest.approx(seconds, rel=0.006)
