"""The import law: each room knows only the rooms below it, and torch stays where it is named."""

from __future__ import annotations

import ast

import pytest

from tests.house import law
from tests.house.source import Source, dotted, imports, sources

LEVEL = {room: level for level, rooms in enumerate(law.ORDER) for room in rooms}


def breaches(source: Source) -> list[str]:
    """List the imports that the law forbids in this file."""
    found = []
    for line, name in imports(source):
        parts = name.split(".")
        if parts[0] == "headway":
            target = parts[1] if len(parts) > 1 else ""
            if target not in LEVEL:
                if source.path in law.FACE:
                    continue
                found.append(f"{source.path}:{line} imports {name}, which is no room: import from where it is made")
            elif source.room and not allowed(source.room, target):
                found.append(f"{source.path}:{line} imports {name}: {source.room} may not know {target}")
        elif parts[0] == "torch" and source.room in law.THINKING and source.path not in law.TORCH_WHILE_THINKING:
            found.append(f"{source.path}:{line} imports {name}: {source.room} thinks without torch")
    return found + distributed(source)


def allowed(room: str, target: str) -> bool:
    """Whether a file of `room` may import from `target`."""
    if room == target or (room, target) in law.NEIGHBOURS:
        return True
    if target == "launch" and room in law.WITHOUT_LAUNCH:
        return False
    return LEVEL[target] < LEVEL[room]


def distributed(source: Source) -> list[str]:
    """List uses of torch.distributed in a room that may not."""
    if source.room in law.TORCH_DISTRIBUTED:
        return []
    names = [*imports(source)]
    names += [(node.lineno, dotted(node)) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    return [
        f"{source.path}:{line} uses {name}: only {', '.join(law.TORCH_DISTRIBUTED)} may"
        for line, name in names
        if name == "torch.distributed" or (name.startswith("torch.distributed.") and "import" not in name)
    ]


def test_every_room_is_in_the_law() -> None:
    assert {source.room for source in sources()} - {""} <= LEVEL.keys()


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.path)
def test_imports(source: Source) -> None:
    assert breaches(source) == []


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("schedule/build.py", "from headway.planner.plan import Plan", "schedule may not know planner"),
        ("schedule/build.py", "def f():\n    from ..run import stage", "schedule may not know run"),
        ("layout/mesh.py", "import headway.cost.model", "layout may not know cost"),
        ("launch/start.py", "from headway.collective.world import World", "launch may not know collective"),
        ("cost/model.py", "from headway.launch.identity import identify", "cost may not know launch"),
        ("cost/model.py", "import torch.nn", "cost thinks without torch"),
        ("run/stage.py", "from headway import plan", "which is no room"),
        ("run/stage.py", "import torch\ntorch.distributed.send(x, 1)", "only collective"),
        ("report/run.py", "from torch import distributed", "only collective"),
    ],
)
def test_a_breach_is_seen(path: str, text: str, complaint: str) -> None:
    assert complaint in breaches(Source(path, text))[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("schedule/build.py", "from headway.errors import PlanError\nfrom headway.schedule.action import Action"),
        ("collective/world.py", "import torch.distributed as dist\nfrom headway.launch.identity import Identity"),
        ("graph/record.py", "import torch"),
        ("cli.py", "from headway.launch import start"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert breaches(Source(path, text)) == []


def test_exceptions_are_needed() -> None:
    """A permission that nobody uses is taken back."""
    paths = {source.path for source in sources()}
    assert [path for path in law.TORCH_WHILE_THINKING if path not in paths] == []
