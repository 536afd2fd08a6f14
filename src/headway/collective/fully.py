"""FullyShardedReducer: every rank keeps a slice of each parameter; a block's are whole only while the block runs.

    forward    gather block 0 | block 0, gather block 1 | block 1, gather block 2 | ...
    backward   ... | block 1, gather block 0, sum gradients of block 2 | block 0, sum gradients of block 1 | ...

torch's FSDP2 (`fully_shard`) does the slicing and the hooks. On the CPU the messages are a Courier's: gathers and sums
go on in threads beside the computation, where FSDP2's own gloo calls stop it, and no rank sends before another awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from headway.collective.across import Across, Sharers
from headway.collective.codec import CODECS
from headway.collective.courier import Courier, Delivery
from headway.collective.messages import Gather, Sums
from headway.collective.slices import local
from headway.collective.world import World
from headway.errors import PlanError
from headway.graph.interception import INTERCEPTION
from headway.graph.walk import Walk


class FullyShardedReducer:
    """Slices the parameters of `model` over a group of ranks, and sums their gradients into the slices.

    `blocks` are the paths of modules, in the order in which they run; each is gathered when it runs, what is in none of
    them for the whole of a forward and a backward. Everything that touches parameters goes through `run`. Every
    backward stands between `arm()` and `complete()`; afterwards each slice has the sum over ranks and backwards in
    `.grad`, times both scales. Every rank must run the same blocks equally often. With several groups `among` all
    copies, slices are summed with those of the others in the last of the `backwards` that `begin` tells of, by `codec`;
    with one group the codec writes gradients there. Raises PlanError for parameters of several dtypes, and for scalars.

    Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
    """

    def __init__(
        self, world: World, among: Sharers, model: nn.Module, blocks: Iterable[str], *, codec: str = "fp32"
    ) -> None:
        group = among.near
        self._world, self._group, self._copies, self.codec = world, group, among.copies, codec
        self._across = Across(world, among.across, codec) if among.several else None
        _check(dict(model.named_parameters()))
        modules = {path: model.get_submodule(path) for path in blocks}
        own = {path: block for path, block in modules.items() if _stands_alone(model, block)}
        self._root = root = _Root(model)
        mesh = DeviceMesh.from_group(group.handle, world.device.type, mesh=list(group.ranks))
        for block in own.values():
            fully_shard(block, mesh=mesh)
            _Unseen().surround(block)
        fully_shard(root, mesh=mesh)
        self._modules: dict[str, FSDPModule] = {
            p: m for p, m in (*own.items(), ("", root)) if isinstance(m, FSDPModule)
        }
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self._couriers: list[Courier] = []
        self._sums: list[Sums] = []
        self._connect(list(own))
        self._watched: dict[str, nn.Parameter] = {}
        self._hooks = [
            module.register_forward_pre_hook(self._watching(module))
            for module in self._modules.values()
            if isinstance(module, nn.Module)
        ]
        self._used: set[str] = set()
        self._earlier: dict[str, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._scale, self._left = 1.0, 1
        self.unused: tuple[str, ...] = ()

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters that are gathered together: those of each block, and the rest."""
        blocks = [path for path in self._modules if path]
        groups = [tuple(name for name in self.parameters if name.startswith(f"{path}.")) for path in blocks]
        inside = {name for group in groups for name in group}
        return (*groups, tuple(name for name in self.parameters if name not in inside))

    # ---- one step

    def begin(self, scale: float = 1.0, backwards: int = 1) -> None:
        """Start a step: gradients that are there already are kept aside, and added by `finish`."""
        self._scale, self._left = scale, backwards
        self._used.clear()
        self._totals.clear()
        self._earlier = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None

    def arm(self, names: Container[str] | None = None) -> None:
        """Say that a backward begins; what the one before it summed is taken."""
        self._take()
        self._left -= 1
        for sums in self._sums:
            sums.closing = self._left == 0

    def complete(self, names: Container[str] | None = None) -> None:
        """Say that a backward is done: FSDP2's own hooks have started all that it left to send."""

    def launch(self) -> None:
        """Say that all backwards are done."""

    def finish(self, scale: float = 1.0) -> None:
        """Wait for all sums, multiply them by `scale`, add the earlier gradients.

        A parameter that no rank used keeps its earlier gradient, or None. Raises PeerError when a rank is lost or late.
        """
        self._take()
        self._cross()
        flags = torch.tensor(
            [int(n in self._used) for n in self._trained], dtype=torch.int32, device=self._world.device
        )
        self._world.all_reduce(flags, self._copies)
        used = {name for name, count in zip(self._trained, flags.tolist(), strict=True) if count}
        for name in self._trained:
            total, earlier = self._totals.get(name), self._earlier.pop(name, None)
            if total is None or name not in used:
                self.parameters[name].grad = earlier
                continue
            if scale * self._scale != 1.0:
                local(total).mul_(scale * self._scale)
            if earlier is not None:
                local(total).add_(local(earlier))
            self.parameters[name].grad = total
        self._totals.clear()
        self.unused = tuple(name for name in self._trained if name not in used)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return forward(), which runs the model: a loss, or anything else."""
        return self._root(forward)

    def rest(self) -> None:
        """Let go of what is still whole after a forward without a backward, so that it is gathered anew."""
        for module in self._modules.values():
            module.reshard()

    def close(self) -> None:
        """End the couriers' threads. The slices stay."""
        for courier in self._couriers:
            courier.close()
        if self._across is not None:
            self._across.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- inside

    def _connect(self, order: Sequence[str]) -> None:
        """Give FSDP2 its messages: sums, not means; and on the CPU a courier's."""
        for module in self._modules.values():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._modules[""].set_reduce_scatter_unused_params(True)
        for path, following in pairwise(order):
            self._modules[path].set_modules_to_forward_prefetch([self._modules[following]])
        if self._world.device.type != "cpu" or self._group.size == 1:
            return
        assert self._group.index is not None
        gathering, summing = (
            Courier(self._world, self._group),
            Courier(self._world, self._group, CODECS[self.codec] if self._across is None else None),
        )
        self._couriers = [gathering, summing]
        under_way: list[Sequence[Delivery]] = []
        for path, module in self._modules.items():
            what = path or "all that is in no block"
            # what torch calls AllGather and ReduceScatter has no public name to inherit from
            module.set_custom_all_gather(cast(Any, Gather(gathering, self._group, f"the parameters of {what}")))
            sums = Sums(summing, self._group, f"the gradients of {what}", under_way, self._across)
            module.set_custom_reduce_scatter(cast(Any, sums))
            self._sums.append(sums)

    def _watching(self, module: nn.Module) -> Callable[..., None]:
        """Note which parameters get gradients: once whole, each is another tensor than its slice."""
        inner = [other for path, other in self._modules.items() if path and other is not module]
        covered = {id(p) for other in inner if isinstance(other, nn.Module) for p in other.parameters()}
        names = {id(p): name for name, p in self.parameters.items()}
        places = [
            (owner, leaf, names[id(parameter)])
            for owner in module.modules()
            for leaf, parameter in owner.named_parameters(recurse=False)
            if parameter.requires_grad and (module in inner or id(parameter) not in covered)
        ]

        def watch(module: nn.Module, args: Any) -> None:
            for owner, leaf, name in places:
                whole = owner.get_parameter(leaf)
                if self._watched.get(name) is not whole:
                    self._watched[name] = whole
                    whole.register_post_accumulate_grad_hook(partial(self._note, name))

        return watch

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        self._used.add(name)

    def _take(self) -> None:
        """Wait for the sums of a backward, and add them to this step's."""
        for sums in self._sums:
            sums.wait()
        crossed = self._across is not None and bool(self._sums) and self._left == 0
        for name in self._trained:
            grad, self.parameters[name].grad = self.parameters[name].grad, None
            if grad is not None and name in self._totals and not crossed:
                local(self._totals[name]).add_(local(grad))
            elif grad is not None:
                self._totals[name] = grad  # what has crossed has the earlier ones in it

    def _cross(self) -> None:
        """Sum over the groups what the last backward has not: blocks that it did not run, and all on CUDA."""
        if self._across is None:
            return
        rest = [sums.kept for sums in self._sums if sums.kept is not None]
        if not self._sums:
            rest = [local(total).reshape(-1) for total in self._totals.values() if local(total).numel()]
        for pending in [self._across.start(values, "gradients of other hosts") for values in rest]:
            pending.wait()
        for sums in self._sums:
            sums.kept = None


class _Root(nn.Module):
    """All that runs at once: a function that calls the model; it may use parameters outside of the model too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, forward: Callable[[], Any]) -> Any:
        """Return forward()."""
        return forward()


class _Unseen:
    """Hides what FSDP2's hooks do from whoever follows the program call by call: it is no part of it."""

    def __init__(self) -> None:
        self.open: list[AbstractContextManager[None]] = []

    def surround(self, module: nn.Module) -> None:
        """Put hooks before and after those that are there."""
        module.register_forward_pre_hook(self.enter, prepend=True)
        module.register_forward_pre_hook(self.leave)
        module.register_forward_hook(self.enter, prepend=True)
        module.register_forward_hook(self.leave, always_call=True)  # also when one of those between has failed

    def enter(self, *_: Any) -> None:
        """Begin to hide."""
        walk = INTERCEPTION.now.walk
        self.open.append(walk.pause() if isinstance(walk, Walk) else nullcontext())
        self.open[-1].__enter__()

    def leave(self, *_: Any) -> None:
        """End it."""
        while self.open:
            self.open.pop().__exit__(None, None, None)


def _stands_alone(root: nn.Module, block: nn.Module) -> bool:
    """Tell whether no module outside of a block has a parameter of it: FSDP2 replaces those inside only."""
    inside = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    others = (m for m in root.modules() if id(m) not in inside)
    return bool(own) and not any(id(p) in own for m in others for p in m.parameters(recurse=False))


def _check(parameters: Mapping[str, nn.Parameter]) -> None:
    scalar = next((name for name, parameter in parameters.items() if not parameter.dim()), None)
    if scalar is not None:
        raise PlanError(
            f'shard="parameters" cuts parameters along dim 0, and {scalar} is a scalar',
            remedy=f'fixed={{"shard": "gradients"}}, or {scalar} of shape [1]',
        )
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        texts = [f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items()]
        raise PlanError(
            f'shard="parameters" takes parameters of one dtype: {", ".join(texts[:3])}',
            remedy='fixed={"shard": "gradients"}, or a model of one dtype',
        )
