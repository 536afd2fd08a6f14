"""Frame: a module call in progress, and where each of its events stands, on this batch as on the recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from headway.graph.model import BETWEEN, Position

Landmarks = Mapping[Position, Mapping[tuple[str, int], tuple[int, int]]]
"""For the position of a frame: the place of each module call in it, by path and occurrence."""

Calls = Mapping[Position, Sequence[Sequence[str]]]
"""For the position of a frame: the torch calls after each landmark, in order, as `call_key` writes them."""


NOT_NOTED = "-"
"""Stands for an event that the recorder counted and did not note."""


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


@lru_cache(maxsize=4096)
def call_key(function: str, dims: int, weight: str = "") -> str:
    """Write without blanks what a torch call is known by: function, its first parameter, dims of its first tensor."""
    return f"{function}:{weight}/{dims}".replace(" ", "_")


def _alike(known: str, key: str, shift: int = 0) -> bool:
    """Compare two calls; one whose parameter goes by another object now (a sharded one) is known by the rest.

    Values of the model may have `shift` dims more than recorded: sequences where there were none.
    """
    if known == key:
        return True
    name, _, dims = known.rpartition("/")
    other, _, other_dims = key.rpartition("/")
    if not name or dims != other_dims and int(other_dims) - int(dims) != shift:
        return False
    call, _, weight = name.partition(":")
    other_call, _, other_weight = other.partition(":")
    return call == other_call and not (weight and other_weight and weight != other_weight)


class Answered:
    """A module call that was answered at once, linked to the one that followed it with nothing between them.

    Where such calls come in a row again, a frame is told of all of them when its place is next asked for.
    """

    __slots__ = ("next", "occurrence", "path", "position")

    def __init__(self, position: Position, path: str, occurrence: int) -> None:
        self.position, self.path, self.occurrence = position, path, occurrence
        self.next: Answered | None = None


NEAR, ALONE = 3, 12
"""So many recorded calls may be left out before one that is known at once: any; one whose like there is no other."""


class Frame:
    """One module call in progress: its position, its path, and how far it has come.

    With `known` (and `calls`) events are brought into step with the recorded run: a module call by its path and
    occurrence, a torch call by what it is. One that was not recorded stands behind the last that was, a level deeper.
    Beside that, random calls are numbered as they come (`turn`): the same under every split, and for all samples.
    """

    __slots__ = (
        "ahead", "answered", "begun", "calls", "count", "draws", "extra", "key", "known", "landmark", "modules",
        "path", "position", "seen", "shift", "strayed", "sure", "told",
    )  # fmt: skip

    def __init__(
        self, position: Position, path: str, known: Mapping[tuple[str, int], tuple[int, int]] | None = None,
        calls: Sequence[Sequence[str]] | None = None, begun: Position = (),
    ) -> None:  # fmt: skip
        self.position = position
        self.path = path
        self.known = known
        self.calls = calls
        self.landmark = 0  # number of the last module call
        self.count = 0  # events since
        self.extra = 0  # events since that one which were not recorded
        self.ahead: dict[
            int, int
        ] = {}  # where in the recorded run the last of those may have been, and how many in a row
        self.key = ""  # of the event that was placed last
        self.shift, self.sure = 0, False  # how many dims values have more than recorded, and whether that is sure
        self.strayed = False  # whether it did something else than the recorded run
        self.begun = begun  # the turn at which this call began
        self.modules = self.draws = 0  # calls of modules so far, and random calls since
        self.seen: dict[str, int] = {}
        self.answered: Answered | None = None  # the last event, if it was a call that was answered at once
        self.told: Answered | None = None  # the last of those that is counted in the numbers above

    def next_module(self, path: str) -> Position:
        """Place the next module call: at its landmark when it is known, else behind the last event."""
        if self.answered is not None:
            self._catch_up()
        self.modules, self.draws = self.modules + 1, 0
        occurrence = self.seen.get(path, 0)
        self.seen[path] = occurrence + 1
        place: tuple[int, int] | None = (self.landmark + 1, 0)
        if self.known is not None:
            place = self.known.get((path, occurrence))
        if place is not None and place > (self.landmark, self.count):
            self.strayed = self.strayed or place != (self.landmark + 1, 0)
            self.landmark, self.count = place
            self.extra, self.ahead = 0, {}
            return (*self.position, *place)
        position = self._beside()
        self.key = ""
        self._go_to(position)
        return position

    @property
    def turn(self) -> Position:
        """Number the random call that has come."""
        if self.answered is not None:
            self._catch_up()
        return (*self.begun, self.modules, self.draws)

    def draw(self) -> None:
        """Count a random call that comes."""
        if self.answered is not None:
            self._catch_up()
        self.draws += 1

    def next_event(self, key: str = "") -> Position:
        """Say where the next torch call stands: the recorded one, unless `key` says that it is another."""
        if self.answered is not None:
            self._catch_up()
        if not key or self.calls is None or self.landmark >= len(self.calls) or self.count >= BETWEEN:
            return (*self.position, self.landmark, self.count + 1)
        self.key = key
        index = self._find(self.calls[self.landmark], key)
        if index is not None:
            return (*self.position, self.landmark, index + 1)
        place = self._behind_loop(key)
        return self._beside() if place is None else (*self.position, *place)

    def _beside(self) -> Position:
        if self.calls is None or self.count >= BETWEEN:
            return (*self.position, self.landmark, self.count + 1)
        return (*self.position, self.landmark, self.count, BETWEEN, self.extra + 1)

    def _find(self, row: Sequence[str], key: str) -> int | None:
        """Find a call in the recorded row, from where the run has come; None when it was not recorded.

        The recorded run may have done something in between that is left out now. But functions recur, so the farther
        ahead a call is found, the more of those before it must have been found in a row; one with a parameter, or near
        and without its like, is known at once.
        """
        if self.count < len(row):
            following = row[self.count]
            if not (self.sure or self.shift) and "/" in following:
                self.shift = int(key.rpartition("/")[2]) - int(following.rpartition("/")[2])
                if not _alike(following, key, self.shift):
                    self.shift = 0
            if _alike(following, key, self.shift):
                return self.count
        for index in range(self.count, len(row)):
            if not _alike(row[index], key, self.shift):
                continue
            away = index - self.count
            if away <= NEAR or ":/" not in key or (away <= ALONE and row.count(row[index]) == 1):
                return index
            if self.ahead.get(index - 1, 0) * ALONE >= away:
                return index
        return None

    def _behind_loop(self, key: str) -> tuple[int, int] | None:
        """Find a call behind module calls that may be left out: further turns of a loop, whose modules were called.

        It must be the only one of its kind in the whole frame; what each turn does is no sign of the loop's end.
        """
        assert self.calls is not None
        places = [
            (landmark, index + 1)
            for landmark, row in enumerate(self.calls)
            for index, other in enumerate(row)
            if _alike(other, key, self.shift)
        ]
        if len(places) != 1 or self.known is None or places[0][0] <= self.landmark:
            return None
        passed = range(self.landmark + 1, places[0][0] + 1)
        paths = [path for (path, _), (landmark, count) in self.known.items() if landmark in passed and not count]
        return places[0] if len(paths) == len(passed) and all(path in self.seen for path in paths) else None

    def happened(self, position: Position) -> None:
        """Go on to a torch call that `next_event` placed."""
        self._go_to(position)

    def _go_to(self, position: Position) -> None:
        before, self.ahead = self.ahead, {}
        if len(position) == len(self.position) + 2:
            self.strayed = self.strayed or position[-2:] != (self.landmark, self.count + 1)
            self.sure = self.sure or (not self.shift and self.key[-1:].isdigit() and int(self.key[-1]) > 1)
            self.landmark, self.count, self.extra = position[-2], position[-1], 0
            return
        self.strayed = True
        self.extra = position[-1]
        if self.calls is not None and self.landmark < len(self.calls) and self.key:
            row = self.calls[self.landmark]
            alike = (i for i in range(self.count, len(row)) if _alike(row[i], self.key, self.shift))
            self.ahead = {i: before.get(i - 1, 0) + 1 for i in alike}

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
            if self.seen.get(told.path, 0) == told.occurrence and len(told.position) == len(self.position) + 2:
                self.seen[told.path] = told.occurrence + 1
                self.landmark, self.count = told.position[-2:]
                self.extra, self.ahead = 0, {}
                self.modules, self.draws = self.modules + 1, 0
            else:  # something else was called before, this time
                self.next_module(told.path)
