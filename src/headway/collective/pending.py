"""Pending: what is under way between ranks, and the error that names who was waited for, for what, and how long."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from headway.collective.roll_call import RollCall
from headway.errors import RankError

SLICE = 0.5
"""Seconds between two looks, while waiting for a collective, for an alarm that another rank raised."""

GRACE = 1.0
"""Seconds that a wait goes on after another rank's alarm: its own error, if it comes, says more."""


class PeerError(RankError):
    """Another rank was lost, or did not answer in time: a consequence, the first cause is on that rank.

    `kind` is "lost" (its connection closed) or "late" (the deadline passed); `peers` are the ranks waited for.
    """

    consequence = True

    def __init__(
        self, fact: str, *, kind: str, peers: tuple[int, ...], place: str | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(fact, place=place, remedy=remedy)
        self.kind = kind
        self.peers = peers

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fact, self.kind, self.peers, self.place, self.remedy)


def _rebuild(
    kind_of: type[PeerError], fact: str, kind: str, peers: tuple[int, ...], place: str | None, remedy: str | None
) -> PeerError:
    return kind_of(fact, kind=kind, peers=peers, place=place, remedy=remedy)


def peer_error(
    cause: BaseException,
    awaited: str,
    peers: tuple[int, ...],
    seconds: float,
    deadline: float,
    roll_call: RollCall | None = None,
) -> PeerError:
    """Return the PeerError that says what was awaited, from whom and for how long; `cause` is why the wait ended.

    Where the one awaited may itself be waiting for another, a roll call tells who it is.
    """
    text = str(cause)
    late = isinstance(cause, TimeoutError) or "imed out" in text or "imeout" in text
    asks = roll_call is not None and (late or len(peers) > 1 or roll_call.alarm is not None)
    blamed = roll_call.blame(peers, "late" if late else "lost") if roll_call is not None and asks else {}
    peers = tuple(blamed) or peers
    awaited += "".join(f"; rank {rank} {state}" for rank, state in list(blamed.items())[:3])
    who = f"rank {peers[0]}" if len(peers) == 1 else "one of ranks " + ", ".join(map(str, peers))
    # gloo says "[file:line] what happened. This is typically caused by ..."; only the middle helps.
    detail = text.split("] ", 1)[-1].split(" This is typically")[0].split("\n")[0][:120] or "no detail"
    if late:
        return PeerError(
            f"{who} did not answer within {deadline:g} s",
            kind="late",
            peers=peers,
            place=f"waiting for {awaited}, {seconds:.1f} s",
            remedy=f"look at the log of {who} first; a longer deadline only helps when that rank was still at work",
        )
    return PeerError(
        f"the connection to {who} was lost",
        kind="lost",
        peers=peers,
        place=f"waiting for {awaited}, {seconds:.1f} s ({detail})",
        remedy=f"look at the log of {who}: the first cause is there",
    )


class Pending:
    """A collective or a message under way. It keeps its tensors alive until it has been waited for.

    Made by `World.begin`. `in_slices`: a wait that timed out may be repeated, so others' alarms are heard in it.
    """

    __slots__ = ("_awaited", "_deadline", "_in_slices", "_keep", "_peers", "_roll_call", "_work")

    def __init__(
        self,
        work: Any,
        awaited: str,
        peers: tuple[int, ...],
        deadline: float,
        keep: object = None,
        roll_call: RollCall | None = None,
        *,
        in_slices: bool = False,
    ) -> None:
        self._work = work
        self._awaited = awaited
        self._peers = peers
        self._deadline = deadline
        self._keep = keep
        self._roll_call = roll_call
        self._in_slices = in_slices and roll_call is not None

    def done(self) -> bool:
        """Tell whether waiting would return at once (true after a failure too: then `wait` raises)."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait until it is complete. Raises PeerError when a peer is lost, or after the deadline."""
        if self._work is None:
            return
        started = time.monotonic()
        try:
            if self._in_slices:
                self._wait_in_slices(started + self._deadline)
            else:
                self._work.wait(timedelta(seconds=self._deadline))
        except (RuntimeError, TimeoutError) as cause:
            spent = time.monotonic() - started
            raise peer_error(cause, self._awaited, self._peers, spent, self._deadline, self._roll_call) from cause
        self._work = self._keep = None

    def _wait_in_slices(self, end: float) -> None:
        """Wait until it is complete, the time `end` has come, or another rank has raised an alarm.

        gloo may not tell: once one collective has failed on a connection, what still comes for it there has no place
        to go, and nothing behind it is read, not even that the connection was closed.
        """
        assert self._roll_call is not None
        while True:
            left = end - time.monotonic()
            try:
                self._work.wait(timedelta(seconds=max(min(left, SLICE), 0.001)))
                return
            except RuntimeError as cause:
                if "Operation timed out" not in str(cause) or left <= SLICE:
                    raise
            alarm = self._roll_call.alarm
            if alarm is not None and time.monotonic() - alarm.heard > GRACE:
                kind = TimeoutError if alarm.kind == "late" else RuntimeError
                raise kind("another rank said so")
