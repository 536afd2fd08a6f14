"""Laws on the repository's texts: no machine's paths, no notes to self, links that lead somewhere, a page a room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import law
from tests.house.source import PACKAGE, ROOT

FOLDERS = ("src", "tests", "examples", "benchmarks", "docs", ".ci")
SUFFIXES = (".py", ".md", ".toml", ".txt", ".csv", ".yaml", ".yml", ".sh", "")

# Spelt so that this file does not break its own laws.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~*/-])/(?:home|root|Users|work|opt)/\w",
    "a note to self": r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b",
    "a package registry's host": r"\b(?:files\.pythonhosted|test\.pypi|pypi)\." + r"org\b",
}


def texts() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each text file that belongs to the repository."""
    files = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in sorted(files):
        if path.suffix in SUFFIXES:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def found(pattern: str, text: str) -> list[str]:
    """Find what matches, with its line number."""
    return [f"{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)]


def rooms() -> list[str]:
    """List the folders of the package that hold code."""
    return sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py")))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_text_holds(what: str) -> None:
    assert [f"{path}:{place}" for path, text in texts() for place in found(FORBIDDEN[what], text)] == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a path of one machine", "see " + "/home" + "/someone/x.py"),
        ("a note to self", "# TO" + "DO: later"),
        ("a package registry's host", "https://pypi" + ".org/simple"),
    ],
)
def test_a_breach_is_seen(what: str, text: str) -> None:
    assert found(FORBIDDEN[what], text)


@pytest.mark.parametrize("page", sorted(ROOT.rglob("docs/**/*.md")) + sorted(ROOT.glob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"]
    assert [page.name for page in pages if f"({page.relative_to(ROOT / 'docs').as_posix()})" not in index] == []


@pytest.mark.parametrize("room", rooms())
def test_each_room_has_a_page_and_tests(room: str) -> None:
    page = ROOT / "docs" / f"{room}.md"
    assert page.exists(), f"docs/{room}.md is missing"
    title = page.read_text(encoding="utf-8").splitlines()[0]
    assert title.startswith("# ") and title.endswith("?"), f"docs/{room}.md: its title is the question it answers"
    assert any((ROOT / "tests" / room).glob("test_*.py")), f"tests/{room} is missing"


def test_decisions_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert [name[:5] for name in names] == [f"{n:04}-" for n in range(1, len(names) + 1)]


def test_the_face_exists_and_is_sorted() -> None:
    import headway

    assert sorted(headway.__all__) == headway.__all__
    assert [name for name in headway.__all__ if not hasattr(headway, name)] == []
    assert set(headway.__all__) <= set(dir(headway))


def test_rooms_are_known() -> None:
    assert set(rooms()) <= {room for rooms_of_level in law.ORDER for room in rooms_of_level}
