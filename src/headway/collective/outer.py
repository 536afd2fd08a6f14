"""Outer: copies train on their own for some steps; then the mean of their changes moves the model, with momentum.

    each copy     w0 -> w1 -> ... -> wH          its own samples, its own optimizer
    all copies    d = mean of (w0 - wH);  m = 0.5 m + d;  w = w0 - 0.7 (d + 0.5 m)          Nesterov's momentum

Not the training of one process: the copies do not see each other's gradients within a round. Douillard et al. 2023,
"DiLoCo: Distributed Low-Communication Training of Language Models". Their momentum is 0.9, for thousands of rounds: it
makes a change that all rounds agree on seven times as large, and where there were ten or forty it did much harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter

from headway.collective.reduce import Reducer

RATE, MOMENTUM = 0.7, 0.5


class Outer:
    """The outer optimizer of this rank's `parameters` (name -> Parameter), every `every` steps.

    `reducer` sums over the copies, and knows no ties: what stages share moves alike on all of them. All copies call
    everything alike, with the same parameters at the start.
    """

    def __init__(self, reducer: Reducer, parameters: Mapping[str, Parameter], copies: int, every: int) -> None:
        self.reducer = reducer
        self._parameters, self._copies, self._every = dict(parameters), copies, every
        self._steps = 0
        self._start: dict[str, torch.Tensor] = {}
        self._momenta: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Count a step; the first of a round remembers where it starts."""
        if not self._steps:
            self._start = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._steps += 1

    @property
    def due(self) -> bool:
        """Whether the round is full."""
        return self._steps >= self._every

    @torch.no_grad()
    def sync(self) -> None:
        """End the round: all copies have the same parameters then. Nothing when no step was made. `.grad` stays."""
        if not self._steps:
            return
        kept = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        self.reducer.begin(1.0 / self._copies)
        for name, parameter in self._parameters.items():
            parameter.grad = self._start[name] - parameter
        self.reducer.finish()
        for name, parameter in self._parameters.items():
            change = parameter.grad
            assert change is not None
            momentum = self._momenta.setdefault(name, torch.zeros_like(change))
            momentum.mul_(MOMENTUM).add_(change)
            parameter.copy_(self._start[name] - RATE * (change + MOMENTUM * momentum))
            parameter.grad = kept[name]
        self._steps, self._start = 0, {}

    def state_dict(self) -> dict[str, Any]:
        """End the round; return the reducer's state, and "momenta" by name, the same on all copies."""
        self.sync()
        momenta = {name: momentum.clone() for name, momentum in self._momenta.items()}
        return {**self.reducer.state_dict(), "momenta": momenta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a round with a state that `state_dict` gave; a reducer's own has no momenta yet."""
        self._steps, self._start = 0, {}
        self.reducer.load_state_dict(state)
        for name, momentum in state.get("momenta", {}).items():
            if name in self._parameters:
                parameter = self._parameters[name]
                self._momenta[name] = torch.empty_like(parameter, requires_grad=False).copy_(momentum)
