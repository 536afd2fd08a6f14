"""What all tests share: their order, and a torch that each test finds as the first one did."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Quick and fundamental first; what starts processes or trains comes last, so that a broken foundation shows first.
FIRST = ("house", "graph", "layout", "schedule", "cost", "planner", "launch", "report", "collective", "run")
LAST = ("checkpoint", "cli", "screen", "examples", "several", "numerics", "bugs", "zoo")

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by folder, keeping the order inside each file."""

    def place(item: pytest.Item) -> tuple[int, str]:
        path = item.path.relative_to(ROOT / "tests")
        folder = path.parts[0] if len(path.parts) > 1 else ""
        if folder in LAST:
            return len(FIRST) + 1 + LAST.index(folder), path.as_posix()
        return FIRST.index(folder) if folder in FIRST else len(FIRST), path.as_posix()

    items.sort(key=place)


@pytest.fixture(autouse=True)
def same_torch() -> Iterator[None]:
    """Seed torch before each test, and undo a change of default dtype or thread count after it.

    Tests of the parts that do without torch do not import it here.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def root() -> Path:
    """Folder of the repository."""
    return ROOT
