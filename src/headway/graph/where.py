"""Where: file and line of the user's code that a call comes from, short and still to be found."""

from __future__ import annotations

import functools
import os
import sys


def user_line() -> str:
    """Name file and line of the nearest caller outside torch and Headway: "models/net.py:41", "?" if there is none.

    Files below the working folder are named from there, those of installed packages from their package.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "headway.")) and name != "torch":
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@functools.lru_cache(maxsize=4096)
def short_path(filename: str) -> str:
    """Shorten a path to what tells it from others: from the package, from the working folder, or the name alone."""
    parts = filename.replace(os.sep, "/").split("/")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    try:
        below = os.path.relpath(filename).replace(os.sep, "/")
    except (OSError, ValueError):  # another drive, a working folder that is gone
        return parts[-1]
    return parts[-1] if below.startswith("../") else below
