"""A failure as a value: an exception of the script turned into the journal's `Failed`, with the place in user code."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from headway.errors import HeadwayError, RankError
from headway.journal import Failed
from headway.units import format_bytes

# What torch and gloo say when the process at the other end is gone, or never came.
_PEER_GONE = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|Timed out waiting|[Gg]loo.*([Tt]ime|[Cc]losed)"
)
_NO_MEMORY = re.compile(r"not enough memory|can't allocate memory|Cannot allocate memory|out of memory|bad_alloc")
_WANTED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)")


def failure_of(error: BaseException, *, device_memory: int | None = None) -> Failed | None:
    """Describe how a script ended by `error`; None when that is success (sys.exit(0)).

    `device_memory`, in bytes, is the budget that an allocation may have met.
    """
    if isinstance(error, SystemExit):
        return _exit(error)
    if isinstance(error, KeyboardInterrupt):
        return Failed("KeyboardInterrupt", "interrupted (Ctrl-C)", exit_code=130, consequence=True)
    name = type(error).__name__
    if isinstance(error, HeadwayError):
        text = str(error)
    elif ran_out_of_memory(error):
        name, text = "OutOfMemory", _out_of_memory(error, device_memory)
    else:
        text = f"{name}: {error}" if str(error) else name
    # Notes say where in the model it happened; what has more than one line keeps its remedy last.
    text = "\n".join([*text.splitlines()[:1], *getattr(error, "__notes__", ()), *text.splitlines()[1:]])
    consequence = is_consequence(error)
    return Failed(
        kind=name,
        message=text,
        place=place_of(error.__traceback__),
        traceback=_stack(error),
        consequence=consequence,
        waiting=error.place if consequence and isinstance(error, HeadwayError) else None,
    )


def is_consequence(error: BaseException) -> bool:
    """Tell whether `error` says only that another rank is gone or late."""
    said = getattr(error, "consequence", None)
    if isinstance(said, bool):
        return said
    if isinstance(error, RankError) or type(error).__name__ in ("DistNetworkError", "DistStoreError"):
        return True
    return isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)) is not None


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether `error` is an allocation that failed, by Python, by torch on a CPU, or on an accelerator."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def place_of(trace: TracebackType | None) -> str | None:
    """Name the innermost line of the user's own code, "train.py:41, in step"; None when there is no line at all."""
    frames = traceback.extract_tb(trace)
    if not frames:
        return None
    own = [frame for frame in frames if _is_users(frame.filename)]
    frame = (own or frames)[-1]
    where = f"{_relative(frame.filename)}:{frame.lineno}"
    return where if frame.name == "<module>" else f"{where}, in {frame.name}"


def _stack(error: BaseException) -> str:
    """Write the stack from the script's own first line on: how the script was started is not its reader's concern."""
    trace = error.__traceback__
    while trace is not None and _starts_script(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _starts_script(filename: str) -> bool:
    return "runpy" in filename or Path(filename).parent == Path(__file__).parent


def _exit(error: SystemExit) -> Failed | None:
    if error.code is None or error.code == 0:
        return None
    place = place_of(error.__traceback__)
    trace = _stack(error)
    if isinstance(error.code, int):
        return Failed("SystemExit", f"sys.exit({error.code})", place, trace, exit_code=error.code & 0xFF or 1)
    return Failed("SystemExit", f"sys.exit: {error.code}", place, trace)


def _out_of_memory(error: BaseException, device_memory: int | None) -> str:
    wanted = _WANTED.search(str(error))
    what = "an allocation"
    if wanted:
        scale = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[wanted[2]]
        what = f"an allocation of {format_bytes(float(wanted[1]) * scale)}"
    if device_memory is None:
        fact = f"out of memory: {what} failed"
        return f"{fact}\n  Try: more processes (the plan may then split the model), or a smaller model or batch."
    fact = f"out of memory: {what} does not fit into what is left of the budget of {format_bytes(device_memory)}"
    return f"{fact} (--device-memory)\n  Try: a larger --device-memory, more processes, or a smaller model or batch."


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = os.path.abspath(filename)
    foreign = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    package = str(Path(__file__).resolve().parent.parent)
    # The interpreter's own folder comes first: a site-packages inside the user's tree is still not the user's.
    return not any(path.startswith(os.path.join(folder, "")) for folder in (*foreign, package))


def _relative(filename: str) -> str:
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
