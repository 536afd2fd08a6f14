"""The laws of the house as data: which room may import which, and every named exception with its reason."""

from __future__ import annotations

# A room may import itself and the rooms of earlier lines, never a neighbour on its own line, unless NEIGHBOURS says so.
ORDER = (
    ("errors", "units"),
    ("journal", "launch"),
    ("graph",),
    ("layout", "cost"),
    ("schedule",),
    ("planner",),
    ("collective",),
    ("run",),
    ("report", "checkpoint"),
    ("cli",),
)

NEIGHBOURS = {
    ("units", "errors"): "a quantity that cannot be read is refused like everything else",
    ("launch", "journal"): "the launcher writes how a run began and ended",
}

# Values in, values out: no processes, no device, every dataclass frozen, and torch only where it is named below.
THINKING = ("errors", "units", "journal", "graph", "cost", "layout", "schedule", "planner")

# Rooms that do not know who started the process.
WITHOUT_LAUNCH = ("graph", "cost", "layout", "schedule", "planner")

# Rooms whose objects may change; dataclasses everywhere else are frozen.
MUTATING = ("collective", "run")

TORCH_WHILE_THINKING = {
    "graph/record.py": "runs the model once to see its calls",
    "graph/walk.py": "finds tensors in nested Python values while recording",
    "cost/measure.py": "times the calls on this device",
}

TORCH_DISTRIBUTED = ("collective", "checkpoint", "launch")

ENVIRONMENT = ("launch",)

VAGUE_NAMES = ("utils", "util", "helpers", "helper", "common", "misc")

MAX_FILE_LINES = 350
LONG_FILES: dict[str, str] = {}

MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}

# "file: name" of each private name of another package that no public one replaces.
PRIVATE_NAMES: dict[str, str] = {}

# "file: name" of each module-level value that changes.
MODULE_STATE: dict[str, str] = {}

# "file: class" of each dataclass that is not frozen, outside the rooms that may change things.
MUTABLE_DATACLASSES: dict[str, str] = {}
