"""Property tests run the same examples every time, however slow the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same examples", deadline=None, derandomize=True)
settings.load_profile("same examples")
