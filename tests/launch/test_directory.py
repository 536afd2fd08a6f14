"""The run's directory: unique, also when many launchers start at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.errors import HeadwayError
from headway.launch.directory import make_run_directory, shown


def test_numbers_go_on_after_the_largest(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "named").mkdir()
    assert [make_run_directory(runs=tmp_path).name for _ in range(2)] == ["8", "9"]


def test_many_launchers_at_once_get_a_directory_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: make_run_directory(runs=tmp_path / "runs"), range(64)))
    assert len(set(made)) == 64


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HeadwayError, match="not a name"):
        make_run_directory(name, tmp_path)


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    assert make_run_directory("mine", tmp_path) == tmp_path / "mine"
    with pytest.raises(HeadwayError, match="exists"):
        make_run_directory("mine", tmp_path)


def test_shown_relative_where_it_lies_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs" / "3") == "runs/3/"
    assert shown(Path("/elsewhere/3")) == "/elsewhere/3/"
