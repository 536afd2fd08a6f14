"""ParallelModel: the model under a plan; still an nn.Module, with this rank's parameters under their own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.collective.world import DEADLINE, World
from headway.errors import BatchError, HeadwayError, PlanError
from headway.launch.identity import identify
from headway.layout.mesh import Mesh
from headway.planner.explain import count
from headway.planner.plan import Plan
from headway.run.apart import Apart
from headway.run.arguments import check_parallelized
from headway.run.buffers import Before, agree
from headway.run.exchange import Exchange, Told
from headway.run.execute import Step, Wires
from headway.run.hold import check_parameters, drop_others, full_state, load_state, same_everywhere
from headway.run.keep import keep
from headway.run.memory import Meter
from headway.run.microbatch import Share, cut, num_tokens, offsets, to_device
from headway.run.narrate import Narrator
from headway.run.orders import Orders
from headway.run.outputs import gather_outputs, program_for
from headway.run.part import guard
from headway.run.randomness import Chance, same_generators, seeded
from headway.run.sharing import Sharing
from headway.run.stage import Stage
from headway.run.structure import Structure
from headway.run.surface import Surface
from headway.schedule.timeline import Timeline

Loss = Callable[[nn.Module, Any], Any]


def parallelize(model: nn.Module, loss: Loss, plan: Plan) -> ParallelModel:
    """Put `model` under `plan` on the processes of this job; rank 0's parameters and buffers go to all.

    Every rank calls it. Parameters that this rank does not hold are let go. Make the optimizer afterwards, from
    `parameters()` of what is returned. Raises PlanError when the plan is for another model or number of processes.
    """
    check_parallelized(model, loss, plan)
    identity = identify()
    world = World.start(identity, deadline=identity.deadline or DEADLINE)
    return ParallelModel(model, loss, plan, world, identity.run_directory)


class ParallelModel(Surface):
    """A model that trains as one process would, on many. Made by `parallelize`.

    `metrics` and `timeline` are those of the last `forward_backward` or `evaluate`, the same on every rank. `seed` and
    `steps_done` are what the random numbers of the next step follow from, whatever the plan; a resumed run sets them.
    """

    _narrator: Narrator

    def __init__(
        self, model: nn.Module, loss: Loss, plan: Plan, world: World, run_directory: Path | None = None
    ) -> None:
        super().__init__()
        check_parallelized(model, loss, plan)
        assert plan.split is not None
        if plan.size != world.size:
            raise PlanError(
                f"the plan is for {count(plan.size, 'process', 'processes')} ({plan.data} x {plan.pipeline}: copies x "
                f"ranks of each), this job has {world.size}",
                remedy=f"headway run -n {plan.size}, or plan again on {world.size}",
            )
        check_parameters(model, plan)
        object.__setattr__(self, "module", model)  # not as a submodule: names of parameters stay the model's own
        self.training = model.training
        self.plan, self.world, self.run_directory, self.split = plan, world, run_directory, plan.split
        mesh = Mesh((("pipeline", plan.pipeline), ("data", plan.data)))
        place = mesh.coordinate(world.rank)
        self._line, self._copy = place["pipeline"], place["data"]  # rank within a pipeline, and which one
        self._orders = Orders.of(plan, self._line)
        placement = self._orders.placement
        self._data_group = [world.group(ranks) for ranks in mesh.groups("data")][self._line]
        self._pipeline_group = [world.group(ranks) for ranks in mesh.groups("pipeline")][self._copy]
        holding = {name: sorted({placement[s] for s in found}) for name, found in plan.split.holders().items()}
        self._first = {name: lines[0] for name, lines in holding.items()}  # who answers for a parameter
        ties = {
            name: [world.group([mesh.rank(pipeline=s, data=c) for s in lines]) for c in range(plan.data)][self._copy]
            for name, lines in holding.items()
            if len(lines) > 1
        }
        same_everywhere(world, model)
        held_now = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        self._meter = Meter.start(world.device, already=held_now)
        mine = [part for part in plan.split.stages if placement[part.index] == self._line]
        self._owned_buffers = tuple(dict.fromkeys(name for part in mine for name in part.owned_buffers))
        self._held = drop_others(model, {name for part in mine for name in part.parameters})
        if world.device.type != "cpu":
            _move(model, world.device)
        object.__setattr__(self, "_nothing", nn.Parameter(torch.empty(0)))
        self._wires = Wires.lay(world, plan.split, lambda stage: mesh.rank(pipeline=placement[stage], data=self._copy))
        self._apart = Apart() if plan.order_for(plan.num_micro_batches).split else None
        self._kept = keep(world, plan, model, self._held, ties, self._data_group, self._pipeline_group, placement)
        before, self._held = self._held, self._kept.parameters
        guard(self, before.values(), plan)
        self._stages = {part.index: Stage.of(plan.split, part.index, model, loss, world.device) for part in mine}
        self._structure = Structure.of(model, self._held, sliced=plan.shard == "parameters" and plan.data > 1)
        self.seed = int(world.broadcast_object(torch.initial_seed()))
        self.steps_done = self._evaluations = 0  # the second since the last step
        self._exchange = Exchange.join(world)
        self._sharing = Sharing(world, plan.data, self._copy, self._data_group)
        self.metrics: Mapping[str, float] = {}
        self.timeline: Timeline | None = None
        object.__setattr__(self, "_narrator", Narrator.start(plan, world, run_directory))
        self._kept.observe(self._narrator.tell_checked)

    # training

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's share of each global batch of `loader`, which every rank iterates over alike.

        The random generators of all ranks are set to rank 0's first, so that a shuffling loader gives the same order.
        """
        same_generators(self.world)
        if self.training:  # what is evaluated in between is no step
            self._narrator.expect(_length(loader))
        for batch in loader:
            yield self.share(batch)

    def share(self, global_batch: Any) -> Any:
        """Take this rank's samples of a global batch (any pytree of tensors with samples along dim 0)."""
        return self._sharing.share(global_batch)

    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Run the whole schedule on this rank's share of a global batch, and reduce the gradients.

        Afterwards `.grad` of each of this rank's parameters is that of the loss over the global batch, added to what
        was there. Returns that loss, a float64 scalar, the same on every rank (nan when nothing was counted).
        """
        self._narrator.begin()
        part, share = self._sharing.recognise(batch)
        changed = self._owned_buffers if self.training else ()
        before = Before.of(self.module, changed) if changed else Before({})
        scale = 1.0 / self.plan.global_batch
        self._kept.refresh(training=True)
        self._kept.begin(len(self._orders.sizes(share, share.samples)))
        with torch.enable_grad(), self._seeding():
            step, told = self._walk(part, share, train=True, scale=scale)
        # totals were scaled by 1 / planned samples, known beforehand; what they should be divided by is known now
        self._kept.reducer.finish(
            self.plan.global_batch / told.count if told.count not in (0, self.plan.global_batch) else 1.0
        )
        agree(self.world, self._data_group, self.module, before)
        self._wires.flush()
        self.steps_done, self._evaluations = self.steps_done + 1, 0
        self._narrator.end(told, share, num_tokens(part, share.total))
        return self._result(told)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients down so that their norm, over the whole model, is at most `max_norm`; return the norm.

        As `torch.nn.utils.clip_grad_norm_`; a tied parameter counts once. The norm is the same on every rank.
        """
        norm = self._kept.clip(max_norm, {name for name in self._held if self._first[name] == self._line})
        self._narrator.note_norm(norm)
        return norm

    # evaluation

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Compute the loss over a global batch, of which this rank passes its share, in eval mode, without gradients.

        Returns a float64 scalar, the same on every rank; `metrics` are set too.
        """
        part, share = self._sharing.recognise(batch)
        with torch.no_grad(), self._evaluating():
            _, told = self._walk(part, share, train=False)
        self._wires.flush()
        if self._narrator.told is None:  # a script that only evaluates; else what it logs is the training's
            self._narrator.note(told, share, num_tokens(part, share.total))
        return self._result(told)

    def predict(self, batch: Any) -> Any:
        """Compute what `model(...)` returns for a batch, in eval mode, on every rank (all ranks call it).

        `batch` is a global batch or this rank's share of one, as `loss` takes it, or the model's own inputs: a tensor,
        a tuple of positional or a dict of keyword arguments. Rows come back for the whole global batch, in order.
        """
        part, share = self._sharing.recognise(batch)
        program = program_for(batch, self.plan, next(iter(self._stages.values())).loss)
        with torch.no_grad(), self._evaluating():
            step = self._begin(part, share, scale=1.0, program=program)
            self._run(step, train=False)
        self._wires.flush()
        return gather_outputs(self.world, self._pipeline_group, self._data_group, step.outputs, step.sizes)

    # state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return the full state of the undivided model, original names, on the CPU. Every rank calls it."""
        if args or kwargs:
            raise TypeError("ParallelModel.state_dict takes no arguments: it is the undivided model's, every rank's")
        self._kept.refresh(training=False)
        mine = [name for name, line in self._first.items() if line == self._line]
        return full_state(self.world, self._pipeline_group, self.module, mine, self._owned_buffers)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Load a full state (as `state_dict` gives it) into what this rank holds. Every rank calls it."""
        self._kept.refresh(training=False)
        load_state(self.module, state_dict)

    def reduction_state(self) -> dict[str, Any] | None:
        """Return what this rank's reducer needs to go on as it would have (`Reducer.state_dict`); None: nothing."""
        return self._kept.reduction_state()

    def load_reduction_state(self, state: Mapping[str, Any]) -> None:
        """Give this rank's reducer what it kept, or its part of what others did."""
        self._kept.load_reduction_state(state)

    @property
    def owned_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that this rank's stages change: they are right here, on others they may not be."""
        return self._owned_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; only where each rank has the whole of it."""
        if self.split.num_stages > 1:
            raise HeadwayError(
                f"the model is divided into {self.split.num_stages} stages, so it cannot be called directly",
                remedy="model.predict(batch) for its outputs, model.evaluate(batch) for the loss",
            )
        if self.plan.data > 1 and self.plan.shard != "none":
            raise HeadwayError(
                f"the copies share {self.plan.shard} out, so the model is not whole between steps",
                remedy="model.predict(batch) for its outputs, model.evaluate(batch) for the loss",
            )
        return self.module(*args, **kwargs)

    # what it says

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints."""
        return self.world.rank == 0

    def log(
        self, step: int, *, loss: Any = None, tokens: int | None = None, total: int | None = None, **metrics: Any
    ) -> None:
        """Report a step: a progress line on rank 0, an entry in each rank's journal.

        `tokens` of the global batch, `total` steps: found by themselves where batches are [samples, tokens] of
        integers and the loader has a length. Further numbers are kept as metrics.
        """
        self._narrator.log(step, loss, tokens, total, metrics)

    # inside

    def _begin(self, part: Any, share: Share, *, scale: float, program: Any = None) -> Step:
        self._renew()
        if self._kept.in_step and share.total < self.plan.data:
            raise BatchError(
                f'with shard="parameters" all copies run together, but of {count(share.total, "sample")} not each of '
                f"{self.plan.data} copies has one",
                remedy=f"pass a global batch of at least {self.plan.data} samples",
            )
        sizes = self._orders.sizes(share, share.samples)
        moved = part if self.world.device.type == "cpu" else to_device(part, self.world.device)
        pieces = [cut(moved, start, stop) for start, stop in offsets(sizes)]
        return Step(
            stages=self._stages, wires=self._wires, kept=self._kept, micro_batches=pieces, sizes=sizes,
            chances=self._chances(share, sizes), scale=scale, program=program,
            whole=share.total if self.plan.reduction == "sum" else None,
            apart=self._apart if torch.is_grad_enabled() else None,
        )  # fmt: skip

    def _renew(self) -> None:
        """Prepare the stages again when modules without parameters have changed; refuse what the plan is not for."""
        structure = self._structure.now()
        if structure is not self._structure:
            self._structure = structure
            self._stages = {
                index: Stage.of(self.split, index, self.module, stage.loss, self.world.device)
                for index, stage in self._stages.items()
            }
            self._narrator.progress.say("model    modules have changed; parameters are the same, so the plan stays")

    def _run(self, step: Step, *, train: bool) -> None:
        if step.sizes:
            order = self._orders.order(len(step.sizes), train)
            step.walk(order.schedule.ranks[self._line], order.last)

    def _walk(
        self,
        part: Any,
        share: Share,
        *,
        train: bool,
        scale: float = 1.0,
    ) -> tuple[Step, Told]:
        step = self._begin(part, share, scale=scale)
        self._run(step, train=train)
        if train:
            self._kept.reducer.launch()
        told = self._exchange.tell(step.losses, step.seen, self._orders.actions(share, train), self._meter.peak())
        return step, told

    def _result(self, told: Told) -> torch.Tensor:
        self.metrics, self.timeline = told.metrics, told.timeline
        return torch.tensor(float("nan") if told.loss is None else told.loss, dtype=torch.float64)

    def _chances(self, share: Share, sizes: Sequence[int]) -> list[Chance | None]:
        """Say what each micro-batch's random numbers follow from; an evaluation has its own, and no step less."""
        if not self.split.random:
            return [None] * len(sizes)
        step = self.steps_done if torch.is_grad_enabled() else f"{self.steps_done}, evaluation {self._evaluations}"
        return [Chance(self.seed, step, share.start + start, stop - start) for start, stop in offsets(sizes)]

    def _seeding(self) -> Any:
        """Keep the global generators as they are: stages draw different numbers, but loaders must not."""
        return seeded(self.seed + self.steps_done) if self.split.random else nullcontext()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.module.modules()]
        self._kept.refresh(training=False)
        self._evaluations += 1
        self.module.eval()
        try:
            with self._seeding():
                yield
        finally:
            self._kept.rest()
            for module, training in modes:
                module.training = training


def _length(loader: Iterable[Any]) -> int | None:
    """Count the batches of a loader; None where it does not know: a DataLoader of a stream has a length that raises."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def _move(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers that have values, keeping the Parameter objects."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
