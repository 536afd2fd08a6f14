"""Schedules on real machines, as published: arXiv:2401.10241, tables 4 (measured), 5 (bubbles) and 6 (times)."""

from __future__ import annotations

from dataclasses import dataclass

# model, stages, layers a stage, micro-batches; milliseconds of F, B (input), W, a message; samples/GPU/s; bubble rates.
# Order of the last two: 1F1B, 1F1B interleaved, ZB-1p, ZB-2p; and of bubbles ZB-H1, ZB-H2 after those.
_TABLES = """
1.5B   8 3  24  18.522 18.086  9.337 0.601  11.8 13.1 12.9 14.5  .2431 .1055 .1585 .0433 .1585 .1083
1.5B   8 3  32  18.513 18.086  9.331 0.626  12.5 13.4 13.4 14.8  .1985 .0818 .1242 .0039 .1242 .0837
1.5B   8 3  64  18.546 18.097  9.321 0.762  13.6 13.9 14.2 14.9  .1240 .0443 .0674 .0026 .0674 .0444
6.2B   8 4  24  29.718 29.444 19.927 0.527  3.50 4.01 3.88 4.32  .2347 .0808 .1323 .0029 .1323 .0698
6.2B   8 4  32  29.802 29.428 19.530 0.577  3.70 4.08 4.00 4.35  .1898 .0628 .1045 .0022 .1045 .0559
6.2B   8 4  64  29.935 29.621 19.388 0.535  4.03 4.19 4.20 4.39  .1091 .0320 .0554 .0010 .0554 .0294
14.6B 16 3  48  11.347 11.248  8.132 0.377  1.40 1.54 1.61 1.81  .2552 .1104 .1397 .0066 .1397 .0672
14.6B 16 3  64  11.307 11.254  8.101 0.379  1.49 1.59 1.67 1.83  .2082 .0852 .1088 .0054 .1088 .0516
14.6B 16 3 128  11.325 11.308  8.109 0.378  1.64 1.66 1.76 1.85  .1251 .0445 .0576 .0028 .0576 .0266
28.3B 32 2  96  10.419 10.207  7.715 0.408  0.76 0.82 0.87 0.99  .2646 .1493 .1421 .0038 .1421 .0641
28.3B 32 2 128  10.408 10.204  7.703 0.408  0.80 0.85 0.90 1.00  .2168 .1164 .1106 .0029 .1106 .0490
28.3B 32 2 256  10.402 10.248  7.698 0.460  0.88 0.90 0.96 1.00  .1352 .0624 .0594 .0018 .0594 .0257
"""
MEASURED = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p")
PRINTED = (*MEASURED, "ZB-H1", "ZB-H2")


@dataclass(frozen=True)
class Setting:
    """One column of the tables: milliseconds of a stage, and what was measured and printed of each schedule."""

    model: str
    num_ranks: int
    layers: int
    num_micro: int
    forward: float
    input: float
    weight: float
    message: float
    samples: dict[str, float]
    bubble: dict[str, float]


def settings() -> list[Setting]:
    """List the twelve settings."""
    found = []
    for line in _TABLES.strip().splitlines():
        model, *rest = line.split()
        numbers = [float(cell) for cell in rest]
        samples = dict(zip(MEASURED, numbers[7:11], strict=True))
        bubble = dict(zip(PRINTED, numbers[11:], strict=True))
        found.append(Setting(model, *map(int, numbers[:3]), *numbers[3:7], samples, bubble))
    return found
