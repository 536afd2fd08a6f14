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
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from headway.collective.codec import CODECS
from headway.collective.courier import Courier, Delivery
from headway.collective.slices import local
from headway.collective.world import Group, World
from headway.errors import PlanError
from headway.graph.interception import INTERCEPTION
from headway.graph.walk import Walk

SUMS_AT_A_TIME = 1
"""Blocks whose gradients are on the wire while those of the next one are computed: each takes its memory once more."""


class FullyShardedReducer:
    """Slices the parameters of `model` over the ranks of `group`, and sums their gradients into the slices.

    `blocks` are the paths of modules, in the order in which they run; each is gathered when it runs, what is in none of
    them for the whole of a forward and a backward. Everything that touches parameters goes through `run`. Every
    backward stands between `arm()` and `complete()`; afterwards each slice has the sum over ranks and backwards in
    `.grad`, times both scales. Every rank must run the same blocks equally often. Raises PlanError for parameters of
    several dtypes.

    Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
    """

    def __init__(
        self, world: World, group: Group, model: nn.Module, blocks: Iterable[str], *, codec: str = "fp32"
    ) -> None:
        self._world, self._group, self.codec = world, group, codec
        _check_dtypes(dict(model.named_parameters()))
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
        self._sums: list[_Sums] = []
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
        self._scale = 1.0
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
        self._scale = scale
        self._used.clear()
        self._totals.clear()
        self._earlier = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None

    def arm(self, names: Container[str] | None = None) -> None:
        """Say that a backward begins; what the one before it summed is taken."""
        self._take()

    def complete(self, names: Container[str] | None = None) -> None:
        """Say that a backward is done: FSDP2's own hooks have started all that it left to send."""

    def launch(self) -> None:
        """Say that all backwards are done."""

    def finish(self, scale: float = 1.0) -> None:
        """Wait for all sums, multiply them by `scale`, add the earlier gradients.

        A parameter that no rank used keeps its earlier gradient, or None. Raises PeerError when a rank is lost or late.
        """
        self._take()
        flags = torch.tensor(
            [int(n in self._used) for n in self._trained], dtype=torch.int32, device=self._world.device
        )
        self._world.all_reduce(flags, self._group)
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
            Courier(self._world, self._group, CODECS[self.codec]),
        )
        self._couriers = [gathering, summing]
        under_way: list[Sequence[Delivery]] = []
        for path, module in self._modules.items():
            what = path or "all that is in no block"
            # what torch calls AllGather and ReduceScatter has no public name to inherit from
            module.set_custom_all_gather(cast(Any, _Gather(gathering, self._group, f"the parameters of {what}")))
            sums = _Sums(summing, self._group, f"the gradients of {what}", under_way)
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
        for name in self._trained:
            grad, self.parameters[name].grad = self.parameters[name].grad, None
            if grad is not None and name in self._totals:
                local(self._totals[name]).add_(local(grad))
            elif grad is not None:
                self._totals[name] = grad


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


class _Arrival(dist.Work):
    """A gather under way, as FSDP2 waits for one."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        super().__init__()
        self.deliveries = deliveries

    def wait(self, timeout: Any = None) -> bool:
        """Wait until all slices have come. Raises PeerError when a rank is lost or late."""
        for delivery in self.deliveries:
            delivery.wait()
        return True


class _Gather:
    """Gathers the slices of one module, beside what is being computed."""

    def __init__(self, courier: Courier, group: Group, awaited: str) -> None:
        self.courier, self.group, self.awaited = courier, group, awaited

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the memory that FSDP2 copies its slices into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work:
        """Begin: this rank's slice lies in its part of `output_tensor` already."""
        parts = output_tensor.view(self.group.size, -1)
        return _Arrival([self.courier.spread(parts[rank], rank, self.awaited) for rank in range(self.group.size)])


class _Sums:
    """Sums the gradients of one module into slices, beside what is being computed."""

    def __init__(self, courier: Courier, group: Group, awaited: str, under_way: list[Sequence[Delivery]]) -> None:
        self.courier, self.group, self.awaited, self.under_way = courier, group, awaited, under_way
        self.started: list[Sequence[Delivery]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the memory that FSDP2 copies gradients into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Begin to sum; `output_tensor` is complete after `wait`, and no one reads it before."""
        again = bool(self.started)
        self.wait_for(self.started)  # FSDP2 adds a second sum of one backward to the first, there and then
        me = self.group.index
        parts = input_tensor.view(self.group.size, -1)
        assert me is not None
        output_tensor.copy_(parts[me])
        deliveries = [
            self.courier.collect(output_tensor if rank == me else parts[rank], rank, self.awaited)
            for rank in range(self.group.size)
        ]
        self.started.append(deliveries)
        self.under_way.append(deliveries)
        if again:
            self.wait_for([deliveries])
        while len(self.under_way) > SUMS_AT_A_TIME:
            self.wait_for([self.under_way.pop(0)])

    def wait(self) -> None:
        """Wait for all that was started."""
        self.wait_for(self.started)
        self.started.clear()

    @staticmethod
    def wait_for(sums: Iterable[Sequence[Delivery]]) -> None:
        """Wait for these deliveries."""
        for deliveries in sums:
            for delivery in deliveries:
                delivery.wait()


def _stands_alone(root: nn.Module, block: nn.Module) -> bool:
    """Tell whether no module outside of a block has a parameter of it: FSDP2 replaces those inside only."""
    inside = {id(module) for module in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    others = (m for m in root.modules() if id(m) not in inside)
    return bool(own) and not any(id(p) in own for m in others for p in m.parameters(recurse=False))


def _check_dtypes(parameters: Mapping[str, nn.Parameter]) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        texts = [f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items()]
        raise PlanError(
            f'shard="parameters" takes parameters of one dtype: {", ".join(texts[:3])}',
            remedy='fixed={"shard": "gradients"}, or a model of one dtype',
        )
