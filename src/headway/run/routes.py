"""Routes: where tensors come into a stage, and where they leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.graph.model import Position, position_text
from headway.layout.split import SPARE, Crossing, StagePart
from headway.run.passing import frames_around

Key = tuple[Position, int]

MOVED = "moved "
"""What the names of answers begin with that say what was sent instead of what was recorded."""


def moved(crossing: Crossing) -> str:
    """Name the answer that says what was sent instead: (place, output, function)."""
    return f"{MOVED}{position_text(crossing.position)}/{crossing.output}"


@dataclass(frozen=True)
class Routes:
    """For each place of the program what a stage receives there, and what it sends."""

    receives: tuple[Crossing, ...]
    incoming: Mapping[Position, Mapping[int, Crossing]]  # by the call that makes it, and which of its outputs
    functions: Mapping[Position, str]  # that make what comes in
    outgoing: Mapping[Position, Mapping[int, Crossing]]
    sends: tuple[Crossing, ...]
    expected: tuple[Key, ...]  # to be sent whatever the batch
    spares: tuple[Crossing, ...]  # for what a batch that strays holds at the end
    frames: frozenset[Position]  # in which something to be sent is made
    origins: tuple[Key, ...]  # what stands in for it
    given: Mapping[Position, tuple[Crossing, ...]]  # by the module call that was seen to give it
    homes: frozenset[Position]  # the frames of those calls
    results: Mapping[Position, Mapping[int, Crossing]] = field(
        default_factory=dict
    )  # what comes in as a leaf of a result
    follow: frozenset[Position] = frozenset()  # module calls in which something comes in that was not recorded there
    unsure: frozenset[Position] = frozenset()  # those, and the ones that did not make what crosses, where they did once
    arrived: bool = False  # whether anything comes in that way

    @staticmethod
    def of(part: StagePart) -> Routes:
        """Say what is true for a batch that takes the recorded way."""
        outgoing: dict[Position, dict[int, Crossing]] = {}
        given: dict[Position, tuple[Crossing, ...]] = {}
        for crossing in part.sends:
            outgoing.setdefault(crossing.position, {})[crossing.output] = crossing
            if crossing.result is not None:
                given[crossing.result[0]] = (*given.get(crossing.result[0], ()), crossing)
        incoming, functions = _incoming({crossing: (*crossing.key, crossing.function) for crossing in part.receives})
        return Routes(
            receives=tuple(part.receives),
            incoming=incoming,
            functions=functions,
            outgoing=outgoing,
            sends=tuple(part.sends),
            expected=tuple(c.key for c in part.sends if c.function != SPARE),
            spares=tuple(c for c in part.sends if c.function == SPARE),
            frames=frozenset(c.position[:-2] for c in part.sends),
            origins=tuple(key for c in part.sends for key in c.origin),
            given=given,
            homes=frozenset(position[:-2] for position in given),
        )

    def told(self, answers: Mapping[str, Any]) -> Routes:
        """Give the routes of one batch, of which the stages before tell in their answers."""
        if not any(name.startswith(MOVED) for name in answers):
            return self
        places = {c: answers.get(moved(c), (*c.key, c.function)) for c in self.receives}
        results: dict[Position, dict[int, Crossing]] = {}
        follow: set[Position] = set()
        unsure: set[Position] = set()
        arrived = False
        for crossing, (position, output, function) in places.items():
            if moved(crossing) in answers and (not function or crossing.function == SPARE):
                arrived = True
                follow.update(frames_around(position))
                if not function:
                    results.setdefault(position, {})[output] = crossing
            if position != crossing.position:
                unsure.update(frames_around(crossing.position))
        incoming, functions = _incoming(places)
        return replace(
            self, incoming=incoming, functions=functions, results=results, follow=frozenset(follow),
            unsure=frozenset(unsure | follow), arrived=arrived,
        )  # fmt: skip


def _incoming(
    places: Mapping[Crossing, tuple[Position, int, str]],
) -> tuple[dict[Position, dict[int, Crossing]], dict[Position, str]]:
    incoming: dict[Position, dict[int, Crossing]] = {}
    functions: dict[Position, str] = {}
    for crossing, (position, output, function) in places.items():
        if function:  # else it comes in as the result of a module
            incoming.setdefault(position, {})[output] = crossing
            functions[position] = function
    return incoming, functions
