"""Keep: what each copy of the model keeps of parameters, gradients and optimizer states, under each `shard`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.collective.across import sharers
from headway.collective.fully import FullyShardedReducer
from headway.collective.outer import Outer
from headway.collective.reduce import Reducer
from headway.collective.shard import ShardedReducer
from headway.collective.slices import local
from headway.collective.world import Group, World
from headway.errors import BatchError
from headway.journal import CodecChecked
from headway.layout.ownership import share_out
from headway.planner.plan import Plan


class Kept:
    """shard="none": each copy keeps everything.

    `parameters` are this rank's, for the user's optimizer. With `every_backward` the reducer sums after each backward,
    else after a step's last; with `in_step` all copies must have equally many micro-batches.
    """

    reducer: Reducer | ShardedReducer | FullyShardedReducer
    every_backward = False
    in_step = False

    def __init__(self, world: World, parameters: Mapping[str, nn.Parameter], over: Group) -> None:
        self.world, self.parameters, self.over = world, dict(parameters), over

    def begin(self, micro_batches: int) -> None:
        """Start a step of so many micro-batches on this rank."""
        self.reducer.begin()

    def refresh(self, training: bool) -> None:
        """See that this copy has the newest parameters; before each step, evaluation and look at the state."""

    def rest(self) -> None:
        """Let go of what an evaluation left behind."""

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return forward(), with the parameters that it takes at hand."""
        return forward()

    def reduction_state(self) -> dict[str, Any] | None:
        """Return what the next gradients of this rank follow from beside its parameters; None: nothing."""
        return None

    def load_reduction_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `reduction_state` gave."""

    def observe(self, checked: Callable[[CodecChecked], None]) -> None:
        """Have `checked` called with what a codec was found to do to gradients, where that is looked at."""

    def clip(self, max_norm: float, answers_for: Collection[str]) -> torch.Tensor:
        """Clip gradients by their norm over all parameters of all ranks; each rank answers for some names."""
        grads = {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        counted = [grad for name, grad in grads.items() if name in answers_for]
        norm = get_total_norm(counted) if counted else torch.zeros((), device=self.world.device)
        if self.over.size > 1:
            square = norm.double() ** 2
            self.world.all_reduce(square, self.over)
            norm = square.sqrt().to(norm.dtype if counted else torch.float64)
        self._scale_down(max_norm, norm)
        return norm

    def _scale_down(self, max_norm: float, norm: torch.Tensor) -> None:
        clip_grads_with_norm_([p for p in self.parameters.values() if p.grad is not None], max_norm, norm)


class Whole(Kept):
    """shard="none": each copy keeps everything, and gradients are summed for all."""

    def __init__(
        self, world: World, plan: Plan, group: Group, over: Group, held: Mapping[str, nn.Parameter],
        ties: Mapping[str, Group],
    ) -> None:  # fmt: skip
        super().__init__(world, held, over)
        self.reducer: Reducer = Reducer(
            world, group, _trained(held), bucket_bytes=plan.bucket_bytes, shared=ties, codec=plan.codec,
            neighbours=plan.neighbours,
        )  # fmt: skip

    def reduction_state(self) -> dict[str, Any] | None:
        """Return what the reducer keeps; nothing for one copy."""
        return self.reducer.state_dict() if self.reducer.buckets else None

    def load_reduction_state(self, state: Mapping[str, Any]) -> None:
        """Give the reducer what it kept."""
        self.reducer.load_state_dict(state)

    def observe(self, checked: Callable[[CodecChecked], None]) -> None:
        """Have `checked` called with each check of the codec."""
        self.reducer.observe = checked


class Seldom(Kept):
    """sync_every=H: each copy trains on its own for H steps, then all meet; also when somebody looks at the model."""

    def __init__(
        self, world: World, plan: Plan, group: Group, over: Group, held: Mapping[str, nn.Parameter],
        ties: Mapping[str, Group],
    ) -> None:  # fmt: skip
        super().__init__(world, held, over)
        trained = _trained(held)
        self.reducer: Reducer = Reducer(world, world.group([world.rank]), trained, shared=ties)
        across = Reducer(
            world, group, trained, bucket_bytes=plan.bucket_bytes, codec=plan.codec, neighbours=plan.neighbours
        )
        self._copies = group.size
        self._outer = Outer(across, trained, group.size, plan.sync_every)

    def begin(self, micro_batches: int) -> None:
        """Start a step: gradients are the mean over this copy's own samples, if all copies have equally many."""
        self._outer.begin()
        self.reducer.begin(float(self._copies))

    def refresh(self, training: bool) -> None:
        """End a round when it is full; before the model is looked at, in any case."""
        if self._outer.due or not training:
            self._outer.sync()

    def reduction_state(self) -> dict[str, Any] | None:
        """End the round; return what the copies' reducer and the outer optimizer keep."""
        return self._outer.state_dict()

    def load_reduction_state(self, state: Mapping[str, Any]) -> None:
        """Begin a round from there."""
        self._outer.load_state_dict(state)

    def observe(self, checked: Callable[[CodecChecked], None]) -> None:
        """Have `checked` called with each check of the codec."""
        self._outer.reducer.observe = checked


class Owned(Kept):
    """shard="optimizer" and "gradients": each copy updates the parameters that it owns, and tells the others."""

    def __init__(
        self, world: World, plan: Plan, model: nn.Module, held: Mapping[str, nn.Parameter], ties: Mapping[str, Group],
        placement: Sequence[int],
    ) -> None:  # fmt: skip
        among = sharers(world, plan.data, plan.pipeline, plan.shard_ranks)
        group = among.near
        assert plan.split is not None and group.index is not None
        sizes = {n: p.numel() * p.element_size() for n, p in model.named_parameters() if p.requires_grad}
        owners = share_out(sizes, plan.split.holders(), group.size, placement)
        mine = {n: p for n, p in held.items() if not p.requires_grad or owners[n] == group.index}
        super().__init__(world, mine, among.model)
        self.every_backward = plan.shard == "gradients"
        trained = _trained(held)
        self.reducer: ShardedReducer = ShardedReducer(
            world, group, trained, {name: owners[name] for name in trained},
            every_backward=self.every_backward, parcel_bytes=plan.bucket_bytes, shared=ties, codec=plan.codec,
            among=among,
        )  # fmt: skip
        self._group, self._model = among.copies, model
        self._seen: Sequence[int] = ()  # what this rank's parameters were when it last told the others

    def begin(self, micro_batches: int) -> None:
        """Start a step; the copies may have different numbers of micro-batches."""
        most = _extremes(self.world, self._group, micro_batches)[1] if self.every_backward else 1
        self.reducer.begin(backwards=most)
        self.reducer.spread(at_once=_compiled(self._model))
        self._seen = ()

    def refresh(self, training: bool) -> None:
        """Get new values of all parameters from their owners, if they have changed; `begin` does so for a step."""
        if training:
            return
        now = [_look(p) for p in self.parameters.values()]
        changed = torch.tensor([float(now != self._seen)], device=self.world.device)
        self.world.all_reduce(changed, op="max")
        if changed.item():
            self.reducer.spread()
            self._seen = now


class Sliced(Kept):
    """shard="parameters": each copy keeps a slice of every parameter, and has the whole only while a block runs."""

    every_backward = True
    in_step = True

    def __init__(self, world: World, plan: Plan, model: nn.Module) -> None:
        among = sharers(world, plan.data, plan.pipeline, plan.shard_ranks)
        self.reducer: FullyShardedReducer = FullyShardedReducer(world, among, model, plan.blocks, codec=plan.codec)
        super().__init__(world, self.reducer.parameters, among.model)
        self._copies = among.copies

    def begin(self, micro_batches: int) -> None:
        """Start a step. Raises BatchError when the copies have different numbers of micro-batches."""
        least, most = _extremes(self.world, self._copies, micro_batches)
        if least != most:
            raise BatchError(
                f'with shard="parameters" all copies run together, but some have {least} micro-batches and some {most}',
                remedy="pass shares of one global batch (model.batches, model.share)",
            )
        self.reducer.begin(backwards=most)

    def refresh(self, training: bool) -> None:
        """Nothing: parameters are gathered when they are used."""

    def rest(self) -> None:
        """Let go of the parameters that are still whole."""
        self.reducer.rest()

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return forward(), with parameters gathered as they are used."""
        return self.reducer.run(forward)

    def _scale_down(self, max_norm: float, norm: torch.Tensor) -> None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor.to(parameter.dtype))


def keep(
    world: World, plan: Plan, model: nn.Module, held: Mapping[str, nn.Parameter], ties: Mapping[str, Group],
    copies: Group, stages: Group, placement: Sequence[int],
) -> Kept:  # fmt: skip
    """Divide what `held` takes among the `copies` as the plan says; `stages` are the ranks of this copy."""
    if plan.sync_every > 1 and plan.data > 1:
        return Seldom(world, plan, copies, stages, held, ties)
    if plan.shard == "none" or plan.data == 1:
        return Whole(world, plan, copies, stages, held, ties)
    if plan.shard == "parameters":
        return Sliced(world, plan, model)
    return Owned(world, plan, model, held, ties, placement)


def _trained(held: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in held.items() if parameter.requires_grad}


def _compiled(model: nn.Module) -> set[str]:
    """Name the parameters of compiled modules, which are made anew for tensors of a class that they do not know."""
    whole = [
        module
        for module in model.modules()
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    ]
    inside = {id(parameter) for module in whole for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside} if inside else set()


def _extremes(world: World, group: Group, number: int) -> tuple[int, int]:
    """Return the least and the most of the group's numbers."""
    both = torch.tensor([-number, number], dtype=torch.int64, device=world.device)
    world.all_reduce(both, group, op="max")
    return -int(both[0]), int(both[1])


def _look(parameter: nn.Parameter) -> int:
    """Sum up the bits of a parameter: another number tells that it has changed."""
    kinds: Iterable[torch.dtype] = (torch.uint8, torch.int16, torch.int32, torch.int64)
    kind = next(k for k in kinds if k.itemsize == min(parameter.element_size(), 8))
    return int(parameter.detach().contiguous().view(-1).view(kind).sum(dtype=torch.int64))
