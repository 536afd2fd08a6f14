"""where: a line of the user's code, named so that it can be told from others and found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headway.graph.where import short_path, user_line


def test_the_line_of_the_caller() -> None:
    here = Path(os.path.relpath(__file__)).as_posix()
    assert user_line() == f"{here}:{test_the_line_of_the_caller.__code__.co_firstlineno + 2}"


@pytest.mark.parametrize(
    ("path", "short"),
    [
        (torch.__file__, "torch/__init__.py"),
        ("/usr/lib/python3/dist-packages/models/net.py", "models/net.py"),
        ("/a/site-packages/b/site-packages/c/d.py", "c/d.py"),
        (str(Path.cwd() / "models" / "net.py"), "models/net.py"),
        (str(Path.cwd().parent / "elsewhere.py"), "elsewhere.py"),
        ("<string>", "<string>"),
    ],
)
def test_short_paths(path: str, short: str) -> None:
    assert short_path(path) == short
