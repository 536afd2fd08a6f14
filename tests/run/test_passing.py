"""passing: calls around a crossing are followed once for each shape; rows of calls passed over keep their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.graph.frame import Answered, Frame, number_modules
from headway.graph.record import record
from headway.layout.split import split
from headway.run.passing import borders
from headway.run.stage import Stage
from tests.graph.programs import square
from tests.run.staged import difference, train_staged, train_whole

HEARD: dict[int, list[bool]] = {}
"""Calls of blocks, noted where no stage looks: by id, whether they had values."""


class Block(nn.Module):
    """Gives a pair; a residual stream in it, and the rest beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(width, width), nn.Identity()

    def forward(self, x: torch.Tensor, rest: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        HEARD.setdefault(id(self), []).append(x.is_meta)
        made = self.drop(self.layer(x).tanh()) * (1 if self.training else 2)
        return x + made, [*rest, made[..., :1]]


class Stack(nn.Module):
    """Blocks that hand a stream and a growing list on; one of them is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest: list[torch.Tensor] = []
        for block in (*self.blocks, self.blocks[1]):
            x, rest = block(x, rest)
        return x + torch.cat(rest, -1).sum(-1, keepdim=True)


def rows(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, 6, dtype=torch.float64)


def step(stages: list[Stage], batch: torch.Tensor) -> torch.Tensor:
    received: list[dict[Any, torch.Tensor]] = [{} for _ in stages]
    answers: dict[str, Any] = {}
    for number, stage in enumerate(stages):
        result = stage.run(batch, received[number], answers)
        answers = dict(result.answers)
        for crossing in stage.split.stages[number].sends:
            if crossing.key in result.sends:
                received[crossing.target][crossing.key] = result.sends[crossing.key].detach()
    return result.output  # type: ignore[no-any-return]


def test_shapes_and_modes_in_turn() -> None:
    """What was learned for one shape or mode is not used for another, and is there again when that comes back."""
    model = Stack().double()
    graph = record(model, square, rows(3))
    for cuts in (["blocks.2"], ["blocks.1", "blocks.3.layer"], ["blocks.1.layer", "blocks.2", "blocks.1#6"]):
        if any(name not in graph.cut for name in cuts):
            cuts = [graph.cuts[i].name for i in (3, 9, 14)]
        parts = split(graph, cuts)
        stages = [Stage.of(parts, i, model, square, torch.device("cpu")) for i in range(parts.num_stages)]
        for shape, training in [((3,), True), ((3,), False), ((2, 4), True), ((3,), True), ((2, 4), True)] * 3:
            model.train(training)
            batch = rows(*shape)
            torch.testing.assert_close(step(stages, batch), square(model, batch), rtol=0, atol=0)


def test_a_call_around_a_crossing_is_followed_once() -> None:
    model = Stack().double()
    parts = split(record(model, square, rows(3)), ["blocks.3"])
    stages = [Stage.of(parts, i, model, square, torch.device("cpu")) for i in range(2)]
    inside = [position for position in borders(parts, 1) if position in stages[1].keep]
    assert inside and inside == [position for position in borders(parts, 0) if position in stages[0].keep]
    for _ in range(4):
        step(stages, rows(3))
    # stage 0 computes it each time; stage 1 runs it once, to see what comes out of it
    assert len(HEARD[id(model.blocks[2])]) == 4 + 1 + 1  # and it was recorded


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_gradients_after_learning(steps: int) -> None:
    model = Stack().double()
    graph = record(model, square, rows(3))
    want = train_whole(model, square, rows(3), graph)
    for cut in graph.cuts:
        got = train_staged(model, square, rows(3), 3, split(graph, [cut.name]), steps)
        assert difference(want, got) < 1e-12, cut.name


def test_a_frame_is_told_of_a_row_of_calls_when_its_place_is_asked_for() -> None:
    """Whether it is told at once or late, a frame places what follows alike, also when something came before."""
    known = number_modules(["a", "b", "a", "c", "d"])
    for before in ([], ["c"], ["a"]):
        plain = Frame((1, 0), "", known)
        placed = [plain.next_module(path) for path in (*before, "a", "b", "a", "d")]
        late = Frame((1, 0), "", known)
        for path in before:
            late.next_module(path)
        recorded = Frame((1, 0), "", known)
        calls = [Answered(recorded.next_module(path), path, i // 2) for i, path in enumerate(("a", "b", "a"))]
        calls[1].occurrence = 0
        for call, after in zip(calls, calls[1:], strict=False):
            call.next = after
        late.next_module("a")
        late.answer(calls[0], None)
        late.answered = calls[2]
        assert late.next_module("d") == placed[-1]
        assert late.next_event() == (*placed[-1][:-1], placed[-1][-1] + 1)


class Noting(nn.Module):
    """Does something beside its result, in one of many ways, on which later blocks depend."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.part = way, nn.Linear(3, 3), nn.Identity()
        self.kept: list[int] = []

    def note(self, state: dict[str, Any]) -> None:
        if self.way == "number in a dict":
            state["depth"] += 1
        elif self.way == "list in a dict":
            state["list"].append(None)
        elif self.way == "list in a tuple in a dict":
            state["pair"][1].append(None)
        elif self.way == "attribute":
            self.depth = getattr(state["before"], "depth", 0) + 1
        elif self.way == "list of its own":
            self.kept = [*getattr(state["before"], "kept", []), 0]
        elif self.way == "attribute of a part":
            self.part.depth = getattr(getattr(state["before"], "part", None), "depth", 0) + 1

    def depth_of(self, state: dict[str, Any]) -> int:
        own = {"attribute": "depth", "list of its own": "kept"}.get(self.way)
        if own:
            value: Any = getattr(self, own)
            return value if isinstance(value, int) else len(value)
        if self.way == "attribute of a part":
            return int(self.part.depth)  # type: ignore[arg-type]
        return int(state["depth"]) + len(state["list"]) + len(state["pair"][1])

    def forward(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        self.note(state)
        return x + self.layer(x) / self.depth_of(state)  # type: ignore[no-any-return]


class Noted(nn.Module):
    """A row of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting(way) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"depth": 0, "list": [], "pair": (0, []), "before": None}
        for block in self.blocks:
            x = block(x, state)
            state["before"] = block
        return x


@pytest.mark.parametrize(
    "way",
    ["number in a dict", "list in a dict", "list in a tuple in a dict", "attribute", "list of its own",
     "attribute of a part"],
)  # fmt: skip
def test_a_module_that_does_more_than_give_a_result_is_not_passed_over(way: str) -> None:
    torch.manual_seed(0)
    model, batch = Noted(way).double(), torch.randn(8, 3).double()
    graph = record(model, square, batch)
    want = train_whole(model, square, batch, graph)
    for steps in (1, 3):
        got = train_staged(model, square, batch, graph.samples, split(graph, ["blocks.2"]), steps)
        assert difference(want, got) < 1e-12, steps
