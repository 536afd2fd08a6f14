"""`headway plan` runs the script up to its call of headway.plan, and says clearly when there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headway.errors import HeadwayError
from headway.launch.identity import PLAN_REQUEST, PlanRequest
from headway.launch.plan_only import plan_of_script

# Stands for headway.plan: answers the request with the request itself.
PLANS = """
import sys
from headway.launch.identity import identify
from headway.launch.plan_only import PlanDone
print("the script's own words")
try:
    raise PlanDone((identify().plan_only, sys.argv[1:], __name__))
except Exception:
    print("swallowed")
raise AssertionError("went on after the plan")
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_the_request_arrives_and_the_plan_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (list(sys.argv), list(sys.path), os.environ.get(PLAN_REQUEST))
    request = PlanRequest("2xcpu:1GiB", {"pipeline": 2}, None)
    assert plan_of_script(script(tmp_path, PLANS), ("--width", "3"), request) == (
        request,
        ["--width", "3"],
        "__main__",
    )
    assert capsys.readouterr().out == "the script's own words\n"
    assert (sys.argv, sys.path, os.environ.get(PLAN_REQUEST)) == before


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("x = 1\n", "without calling headway.plan"),
        ("import sys\nsys.exit(0)\n", "ended with sys.exit"),
        ("raise ValueError('no data')\n", "ValueError: no data"),
    ],
)
def test_a_script_that_does_not_plan_is_refused(tmp_path: Path, text: str, fact: str) -> None:
    with pytest.raises(HeadwayError, match=fact):
        plan_of_script(script(tmp_path, text), (), PlanRequest())


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no such file"):
        plan_of_script(tmp_path / "nowhere.py", (), PlanRequest())
