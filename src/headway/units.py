"""Units: reads "24 GiB" and "1 Gbit/s", prints "212 ms": bytes, seconds, rates, FLOPs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

_BYTES: Mapping[str, int] = MappingProxyType(
    {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50}
)
_BITS: Mapping[str, int] = MappingProxyType({"BIT": 1, "KBIT": 10**3, "MBIT": 10**6, "GBIT": 10**9, "TBIT": 10**12})
_SECONDS: Mapping[str, float] = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
)
_AMOUNT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ/]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read an amount of memory: "24 GiB", "512MiB", "2 GB", "1024" or 1024 (bytes). Raises ValueError."""
    if isinstance(text, int):
        number, unit = float(text), "B"
    else:
        number, unit = _split(text, "an amount of memory", "'24 GiB' or '512MiB'")
    scale = _BYTES.get((unit or "B").upper())
    if scale is None:
        raise _wrong_unit(text, "an amount of memory", unit, "B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, as in '512 MiB'")
    amount = round(number * scale)
    if amount < 1:
        raise ValueError(f"{text!r} is not an amount of memory: it is less than one byte\n  Try: '512 MiB'")
    return amount


def parse_rate(text: str | int | float) -> float:
    """Read a rate in bytes per second: "1 Gbit/s", "25 GB/s", "800 MiB/s", or a number. Raises ValueError."""
    if isinstance(text, int | float):
        return float(text)
    number, unit = _split(text, "a rate", "'1 Gbit/s' or '25 GB/s'")
    name = unit.upper()
    if name.endswith("/S") and name[:-2] in _BITS:
        return number * _BITS[name[:-2]] / 8
    # "Gb/s" means bits to some and bytes to others: refused rather than guessed.
    if name.endswith("/S") and name[:-2] in _BYTES and not unit[:-2].endswith("b"):
        return number * _BYTES[name[:-2]]
    raise _wrong_unit(text, "a rate", unit, "bit/s, Mbit/s, Gbit/s, MB/s, GB/s, MiB/s or GiB/s, as in '1 Gbit/s'")


def parse_seconds(text: str | int | float) -> float:
    """Read a duration in seconds: "300", "5 min", "200 ms", "10 us", or a number. Raises ValueError."""
    if isinstance(text, int | float):
        return float(text)
    number, unit = _split(text, "a duration", "'300 s' or '5 min'")
    scale = _SECONDS.get(unit or "s")
    if scale is None:
        raise _wrong_unit(text, "a duration", unit, "ns, us, ms, s, min or h, as in '200 ms'")
    return number * scale


def format_bytes(amount: float) -> str:
    """Print bytes in powers of 1024: "0 B", "1.5 KiB", "512 MiB", "24 GiB"."""
    return _scaled(amount, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_seconds(seconds: float) -> str:
    """Print seconds: "12 us", "212 ms", "3.4 s", "1 min 40 s", "2 h 5 min"."""
    if not math.isfinite(seconds):
        return "unknown time"
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 59.95:
        for scale, unit in ((1e-6, "us"), (1e-3, "ms")):
            if seconds < 999.5 * scale:
                return f"{_three_digits(seconds / scale)} {unit}"
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def format_rate(bytes_per_second: float) -> str:
    """Print a rate in bytes per second, in powers of 1000: "1.2 GB/s"."""
    return _scaled(bytes_per_second, 1000.0, ("B/s", "KB/s", "MB/s", "GB/s", "TB/s", "PB/s"))


def format_flops(flops: float) -> str:
    """Print a number of floating-point operations: "3.2 GFLOP"."""
    return _scaled(flops, 1000.0, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_flop_rate(flops_per_second: float) -> str:
    """Print floating-point operations per second: "95 GFLOP/s"."""
    return format_flops(flops_per_second) + "/s"


def format_count(count: float) -> str:
    """Print a number of things, in powers of 1000: "950", "5.2 K", "7.1 M"."""
    return _scaled(count, 1000.0, ("", "K", "M", "G", "T")).rstrip()


def _split(text: str, kind: str, example: str) -> tuple[float, str]:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {kind}: a number and a unit are expected\n  Try: {example}")
    return float(match[1]), match[2]


def _wrong_unit(text: str | int, kind: str, unit: str, remedy: str) -> ValueError:
    fact = f"the unit {unit!r} is not known here" if unit else "it has no unit"
    return ValueError(f"{text!r} is not {kind}: {fact}\n  Try: {remedy}")


def _scaled(amount: float, base: float, units: tuple[str, ...]) -> str:
    if amount < 0:
        return "-" + _scaled(-amount, base, units)
    power = 0
    # 999.5 so that what rounds to a full unit is printed in that unit ("1 GiB", not "1024 MiB").
    while power < len(units) - 1 and amount >= (base - 0.5 if power == 0 else base * (1 - 0.5e-3)):
        amount /= base
        power += 1
    return f"{_three_digits(amount)} {units[power]}"


def _three_digits(value: float) -> str:
    """Print with at most three significant digits below 1000, without trailing zeros."""
    if value >= 99.95:
        return f"{value:.0f}"
    digits = 1 if value >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
