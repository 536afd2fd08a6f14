"""Structure: the modules and parameters that a plan was put in force for, and what has changed of them since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import is_

import torch
from torch import nn

from headway.errors import PlanError

AFRESH = (
    "change the model before headway.plan; or take model.state_dict(), build the changed model, load the state, and "
    "call headway.plan and headway.parallelize again"
)
THAW = (
    "let it require gradients before headway.plan and headway.parallelize, and freeze it afterwards: what was planned "
    "to be trained may be frozen and thawed at any step"
)


@dataclass(frozen=True)
class Row:
    """One module: its path, and what it is made of."""

    module: nn.Module
    path: str
    children: tuple[nn.Module | None, ...]
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter | None, ...] | None  # None: under these names there are other objects by and by

    @property
    def is_same(self) -> bool:
        """Whether the module has the same children and parameters, object by object."""
        children, parameters = self.module._modules, self.module._parameters
        if len(children) != len(self.children) or not all(map(is_, children.values(), self.children)):
            return False
        if self.parameters is None:
            return tuple(parameters) == self.names
        return len(parameters) == len(self.names) and all(map(is_, parameters.values(), self.parameters))


@dataclass(frozen=True)
class Structure:
    """A model as it was. To look whether it still is takes about a microsecond for each module."""

    model: nn.Module
    rows: tuple[Row, ...]
    held: Mapping[str, nn.Parameter]  # this rank's
    looks: Mapping[str, tuple[torch.dtype, torch.Size]]
    trained: frozenset[str]  # of them, which required gradients when the plan was put in force
    sliced: bool = False  # copies have slices, so that modules have other objects while they run

    @staticmethod
    def of(model: nn.Module, held: Mapping[str, nn.Parameter], *, sliced: bool = False) -> Structure:
        """Note a model's structure, and what this rank's parameters look like."""
        looks = {name: (p.dtype, p.shape) for name, p in held.items()}
        trained = frozenset(name for name, p in held.items() if p.requires_grad)
        return Structure(model, _rows(model, sliced), held, looks, trained, sliced)

    def now(self) -> Structure:
        """Compare with the model as it is: gives this structure, or a new one where modules without parameters differ.

        Raises PlanError when a plan made for the old one would train the new one wrong: other parameters, or gradients
        that were not planned for.
        """
        for name, parameter in self.held.items():
            if self.sliced and parameter.requires_grad is not (name in self.trained):
                raise PlanError(
                    f"whether {name} requires gradients has changed",
                    place='shard="parameters", which does not allow it',
                    remedy='fixed={"shard": "gradients"}, which does',
                )
            if parameter.requires_grad and name not in self.trained:
                raise PlanError(
                    f"{name} requires gradients now, and did not when the plan was put in force",
                    place="gradients of it do not cross stages, and are not reduced over copies",
                    remedy=THAW,
                )
            if (parameter.dtype, parameter.shape) != self.looks[name]:
                raise _changed(
                    f"{name} was {_look(*self.looks[name])}, and is {_look(parameter.dtype, parameter.shape)}"
                )
        if all(row.is_same for row in self.rows):
            return self
        other = replace(self, rows=_rows(self.model, self.sliced))
        self._refuse(other)
        return other

    def _refuse(self, other: Structure) -> None:
        before, after = _parameters(self.rows), _parameters(other.rows)
        new, gone = [n for n in after if n not in before], [n for n in before if n not in after]
        replaced = [n for n, p in after.items() if n in before and before[n] is not p]
        found = ((new, "new"), (gone, "gone"), (replaced, "not the same as before"))
        parts = [f"{_few(names)} {'is' if len(names) == 1 else 'are'} {what}" for names, what in found if names]
        if parts:
            raise _changed("; ".join(parts))


def _changed(what: str) -> PlanError:
    return PlanError(
        f"the model has other parameters than it was planned with: {what}",
        place="since headway.parallelize",
        remedy=AFRESH,
    )


def _rows(model: nn.Module, sliced: bool) -> tuple[Row, ...]:
    return tuple(
        Row(
            module, path, tuple(module._modules.values()), tuple(module._parameters),
            None if sliced else tuple(module._parameters.values()),
        )
        for path, module in model.named_modules()
    )  # fmt: skip


def _parameters(rows: tuple[Row, ...]) -> dict[str, nn.Parameter | None]:
    """List parameters by name; objects are None where they do not tell anything."""
    return {
        f"{row.path}.{name}".lstrip("."): None if row.parameters is None else row.parameters[place]
        for row in rows
        for place, name in enumerate(row.names)
        if row.parameters is None or row.parameters[place] is not None
    }


def _look(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
