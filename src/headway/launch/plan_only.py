"""`headway plan` and `check`: run the script here up to its call of headway.plan, which hands back what it made."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from headway.errors import HeadwayError
from headway.launch.failure import failure_of
from headway.launch.identity import PLAN_REQUEST, PlanRequest


class PlanDone(BaseException):
    """The plan is made and nothing else was asked: ends the script. Not an Exception, so that no script catches it."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.plan = plan


def plan_of_script(script: Path, arguments: Sequence[str], request: PlanRequest) -> Any:
    """Run the script until it calls headway.plan and return what that made.

    Raises HeadwayError when the script does not exist, fails before, or comes to its end without planning.
    """
    if not script.is_file():
        remedy = f"headway {'check' if request.check else 'plan'} train.py"
        raise HeadwayError("the script cannot be run: no such file", place=str(script), remedy=remedy)
    argv, path = sys.argv, list(sys.path)
    before = os.environ.get(PLAN_REQUEST)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    os.environ[PLAN_REQUEST] = request.to_json()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except PlanDone as done:
        return done.plan
    except HeadwayError:
        raise
    except SystemExit as error:
        _refuse_exit(script, error)
    except Exception as error:
        _refuse_error(error)
    finally:
        sys.argv, sys.path[:] = argv, path
        if before is None:
            del os.environ[PLAN_REQUEST]
        else:
            os.environ[PLAN_REQUEST] = before
    raise HeadwayError(
        "the script came to its end without calling headway.plan",
        place=str(script),
        remedy="plan = headway.plan(model, loss, batch), where the script is run as __main__",
    )


def _refuse_exit(script: Path, error: SystemExit) -> NoReturn:
    failed = failure_of(error)
    how = "sys.exit(0)" if failed is None else failed.message
    if failed is not None and failed.exit_code == 2:
        raise error  # argparse has already said what is wrong with the script's arguments
    raise HeadwayError(
        f"the script ended with {how} before it called headway.plan",
        place=str(script) if failed is None or failed.place is None else failed.place,
        remedy="give the arguments with which it trains, after the script's name",
    ) from error


def _refuse_error(error: Exception) -> NoReturn:
    failed = failure_of(error)
    message, place = (str(error), None) if failed is None else (failed.message, failed.place)
    raise HeadwayError(f"the script failed before it had a plan: {message}", place=place) from error
