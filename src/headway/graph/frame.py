"""Frame: one module call in progress: where it stands in the program, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.graph.model import BETWEEN, Position

Landmarks = Mapping[Position, Mapping[tuple[str, int], tuple[int, int]]]
"""For the position of a frame: the place of each module call in it, by path and occurrence."""


def number_modules(paths: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
    """Place the module calls of a frame, by path and occurrence; a "+" before a path puts it after the one before it.

    Those without are landmarks 1, 2, ...; those with one were not seen when the program was recorded.
    """
    seen: dict[str, int] = {}
    table: dict[tuple[str, int], tuple[int, int]] = {}
    number = count = 0
    for path in paths:
        if path.startswith("+"):
            path, count = path[1:], count + BETWEEN
        else:
            number, count = number + 1, 0
        seen[path] = seen.get(path, -1) + 1
        table[(path, seen[path])] = (number, count)
    return table


class Answered:
    """A module call that was answered at once, linked to the one that followed it with nothing between them.

    Where such calls come in a row again, a frame is told of all of them when its place is next asked for.
    """

    __slots__ = ("next", "occurrence", "path", "position")

    def __init__(self, position: Position, path: str, occurrence: int) -> None:
        self.position, self.path, self.occurrence = position, path, occurrence
        self.next: Answered | None = None


class Frame:
    """One module call in progress: its position, its path, and how far it has come."""

    __slots__ = ("answered", "count", "known", "landmark", "path", "position", "seen", "told")

    def __init__(self, position: Position, path: str, known: Mapping[tuple[str, int], tuple[int, int]] | None) -> None:
        self.position = position
        self.path = path
        self.known = known
        self.landmark = 0  # number of the last module call
        self.count = 0  # events since
        self.seen: dict[str, int] = {}
        self.answered: Answered | None = None  # the last event, if it was a call that was answered at once
        self.told: Answered | None = None  # the last of those that is counted in the numbers above

    def next_module(self, path: str) -> Position:
        """Place the next module call: at its landmark when it is known, else as an event after the last one."""
        if self.answered is not None:
            self._catch_up()
        occurrence = self.seen.get(path, 0)
        self.seen[path] = occurrence + 1
        place: tuple[int, int] | None = (self.landmark + 1, 0)
        if self.known is not None:
            place = self.known.get((path, occurrence))
        if place is None or place <= (self.landmark, self.count):
            self.count += 1
        else:
            self.landmark, self.count = place
        return (*self.position, self.landmark, self.count)

    def next_event(self) -> Position:
        """Say where the next torch call stands."""
        if self.answered is not None:
            self._catch_up()
        return (*self.position, self.landmark, self.count + 1)

    def answer(self, call: Answered, after: Answered | None) -> None:
        """Note that the call that was placed last was answered at once, right `after` another such call or None."""
        if after is not None:
            after.next = call
        self.answered = self.told = call

    def _catch_up(self) -> None:
        told, last = self.told, self.answered
        self.told = self.answered = None
        while told is not last:
            assert told is not None and told.next is not None
            told = told.next
            if self.seen.get(told.path, 0) == told.occurrence:
                self.seen[told.path] = told.occurrence + 1
                self.landmark, self.count = told.position[-2:]
            else:  # something else was called before, this time
                self.next_module(told.path)
