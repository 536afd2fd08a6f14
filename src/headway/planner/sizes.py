"""Sizes: the program for each size of micro-batch, recorded for a few of them and worked out for those between."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from headway.cost.model import Times
from headway.graph.model import ModelGraph
from headway.planner.between import Between, alike
from headway.planner.program import Program, Shape

FEW = 4
"""Up to so many sizes are all recorded."""


class Programs:
    """The program for each size of micro-batch, recorded or worked out, and timed, when first asked for.

    `graph_at(samples)` records, or raises what the model raises. Where many sizes are expected, the smallest and the
    largest that the model takes and one between are recorded; when their graphs differ in nothing but numbers that grow
    evenly with the samples, those of other sizes are worked out. A model may still go another way at a size that was
    not recorded: `confirm` records the sizes of the plan that was chosen.
    """

    def __init__(self, graph_at: Callable[[int], ModelGraph], times_of: Callable[[ModelGraph], Times]) -> None:
        self._record, self._times_of = graph_at, times_of
        self._recorded: dict[int, ModelGraph | Exception] = {}
        self._worked_out: dict[int, ModelGraph] = {}
        self._timed: dict[int, Program] = {}
        self._between: Between | None = None
        self._shape: Shape | None = None
        self._family: frozenset[int] = frozenset()  # sizes of the recorded graphs that differ in nothing else
        self._tried = False

    def any_graph(self, global_batch: int) -> ModelGraph:
        """Return a graph that can be recorded, for as many samples as possible; raises what the model raises."""
        samples = global_batch
        while isinstance(self.recorded(samples), Exception) and samples > 1:
            samples //= 2
        graph = self.recorded(samples)
        if isinstance(graph, Exception):
            raise self._recorded[global_batch]  # type: ignore[misc]
        return graph

    def recorded(self, samples: int) -> ModelGraph | Exception:
        """Return the graph as recorded for that many samples, or why the model does not take so many."""
        if samples not in self._recorded:
            try:
                self._recorded[samples] = self._record(samples)
            except Exception as error:  # the model's own: batch norm of one value, a size written into its code
                self._recorded[samples] = error
        return self._recorded[samples]

    def expect(self, sizes: Iterable[int]) -> None:
        """Record a few of the sizes that will be asked for, and see whether the others follow from them."""
        wanted = sorted(set(sizes))
        if self._tried or len(wanted) <= FEW:
            return
        self._tried = True
        least = next((size for size in wanted if isinstance(self.recorded(size), ModelGraph)), None)
        recorded = [size for size, graph in self._recorded.items() if isinstance(graph, ModelGraph)]
        most = max((size for size in recorded if size >= wanted[-1]), default=None)
        if most is None:
            most = next((size for size in reversed(wanted) if isinstance(self.recorded(size), ModelGraph)), None)
        if least is None or most is None or least >= most:
            return
        middle = math.sqrt(least * most)
        inner = [size for size in wanted if least < size < most]
        self.recorded(min(inner, key=lambda size: abs(math.log(size / middle)), default=least))
        known = {size: graph for size, graph in self._recorded.items() if least <= size <= most}
        graphs = [graph for graph in known.values() if isinstance(graph, ModelGraph)]
        self._between = Between.of(graphs) if len(graphs) == len(known) else None
        if self._between is not None:
            self._shape, self._family = Shape(graphs[0]), frozenset(graph.samples for graph in graphs)

    def refused(self, sizes: Iterable[int]) -> Exception | None:
        """Return why the model does not take one of these sizes; None when it takes all, as far as is known."""
        unknown = (self.recorded(size) for size in sizes if not self._follows(size))
        return next((graph for graph in unknown if isinstance(graph, Exception)), None)

    def _follows(self, samples: int) -> bool:
        found = self._between
        return samples not in self._recorded and found is not None and found.least <= samples <= found.most

    def graph(self, samples: int) -> ModelGraph:
        """Return the graph for that many samples; raises what the model raises."""
        if self._between is not None and self._follows(samples):
            if samples not in self._worked_out:
                self._worked_out[samples] = self._between.at(samples)
            return self._worked_out[samples]
        graph = self.recorded(samples)
        if isinstance(graph, Exception):
            raise graph
        return graph

    def at(self, samples: int) -> Program:
        """Return the program for micro-batches of that many samples; raises what the model raises."""
        if samples not in self._timed:
            graph = self.graph(samples)
            shared = samples in self._worked_out or samples in self._family
            shape = self._shape if shared and self._shape is not None else Shape(graph)
            self._timed[samples] = Program(graph, self._times_of(graph), shape)
        return self._timed[samples]

    def confirm(self, sizes: Iterable[int]) -> bool:
        """Record those of these sizes that were worked out. False when one is not as it was thought to be.

        Then every size is recorded from now on.
        """
        for size in sizes:
            if self._follows(size):
                thought, found = self.graph(size), self.recorded(size)
                if isinstance(found, Exception) or not alike(thought, found):
                    self._between = self._shape = None
                    self._worked_out, self._timed, self._family = {}, {}, frozenset()
                    return False
        return True
