"""Sweep: carries many cases out on real processes: `python -m tests.soak.sweep --first 0 --count 300 --ranks 2`."""

from __future__ import annotations

import argparse
import ast
import faulthandler
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headway.collective.world import World
from headway.errors import HeadwayError
from tests.several.ranks import Outcome, outcomes_on_ranks
from tests.soak.cases import case_of
from tests.soak.training import carry_out

TOGETHER = 25
"""Cases that run in the same processes, one after the other."""


WRONG = ("differs", "zeros", "raises", "hangs")

PATIENCE = 45.0
"""Seconds that a case may take before each rank writes down where it is."""


def run_cases(world: World, size: int, seeds: Sequence[int], name: str) -> None:
    """Carry out cases on these ranks; each rank writes down what it begins, and rank 0 what came of it."""
    folder = Path(name)
    for seed in seeds:
        (folder / f"at{world.rank}").write_text(str(seed))
        started = time.monotonic()
        faulthandler.dump_traceback_later(PATIENCE)  # where it hangs
        verdict, words = carry_out(world, case_of(seed, size), folder)
        if world.rank == 0:
            with (folder / "verdicts").open("a") as file:
                file.write(repr((seed, verdict, words, time.monotonic() - started)) + "\n")
        faulthandler.cancel_dump_traceback_later()
        world.barrier()


def _short(trace: str) -> str:
    """Keep of a traceback the program's own lines, and the last."""
    lines = trace.splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("  ") and "File" in line), default=0)
    files = [i for i, line in enumerate(lines[:last]) if line.startswith("  File")]
    own = [f"{lines[i]} {lines[i + 1].strip()}" for i in files if "/soak/" in lines[i] or i in files[-4:]]
    return "\n".join(own + lines[last:])


def sweep(size: int, seeds: Sequence[int], *, timeout: float = 60.0, tell: bool = True) -> dict[int, tuple[str, str]]:
    """Carry out all cases; returns (verdict, words) by seed. A case that raises costs new processes.

    Verdicts: "same"; "refused" beforehand, or "stopped" on the way, by an error of Headway's own; "unfit", plain torch
    refuses it too; "zeros", gradients of zeros where one process has none; "differs", "raises", "hangs".
    """
    found: dict[int, tuple[str, str]] = {}
    left = list(seeds)
    while left:
        with tempfile.TemporaryDirectory(prefix="headway-soak-") as name:
            some = left[:TOGETHER]
            limit = timeout + 15 * len(some)
            outcomes = outcomes_on_ranks(size, run_cases, size, some, name, timeout=limit, deadline=timeout)
            told = Path(name) / "verdicts"
            rows = [ast.literal_eval(line) for line in told.read_text().splitlines()] if told.exists() else []
            found.update({seed: (verdict, words) for seed, verdict, words, _ in rows})
            if any(outcome.code != 0 for outcome in outcomes):
                began = [Path(name) / f"at{rank}" for rank in range(size)]
                at = {int(path.read_text()) for path in began if path.exists()} - found.keys()
                found[min(at) if at else some[0]] = _ended(outcomes)
        for seed in [seed for seed in left if seed in found]:
            left.remove(seed)
            verdict, words = found[seed]
            if tell and verdict != "same":
                print(f"{seed} on {size}: {verdict}: {words}", flush=True)
    return found


def _ended(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Say how a case ended that did not come to its end on all ranks."""
    errors = [outcome.error for outcome in outcomes]
    hangs = any(error is None for error in errors)
    raises = any(not isinstance(error, HeadwayError) for error in errors)
    texts = []
    for rank, outcome in enumerate(outcomes):
        consequence = getattr(outcome.error, "consequence", False)
        trace = "" if consequence else _short(outcome.trace) or outcome.output[-3000:]
        texts.append(f"  rank {rank} after {outcome.seconds:.1f} s: {outcome.error!r}\n{trace}")
    return "hangs" if hangs else "raises" if raises else "stopped", "\n".join(texts)


def main() -> int:
    """Sweep, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seeds", type=int, nargs="*")
    given = parser.parse_args()
    bad = 0
    for size in given.ranks:
        found = sweep(size, given.seeds or range(given.first, given.first + given.count))
        counts = Counter(verdict for verdict, _ in found.values())
        told = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
        print(f"{size} ranks: {told}", flush=True)
        bad += sum(counts[verdict] for verdict in WRONG)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
