"""World: this process among the others, its groups and its deadlines; a value that is passed in, never global."""

from __future__ import annotations

import atexit
import gc
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from headway.collective.pending import PeerError, Pending, peer_error
from headway.collective.roll_call import Board, FileBoard, RollCall, StoreBoard
from headway.errors import RankError

__all__ = ["DEADLINE", "Group", "Identity", "PeerError", "Pending", "World", "pick_device"]

DEADLINE = 300.0
"""Seconds that a wait for another rank may take, unless a run says otherwise."""

MEETING_TAG = (1 << 31) - 1
"""Of the messages that agree on how many groups there are; no channel sends so many kinds in its last one."""

OPS = MappingProxyType(
    {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
)


class Identity(Protocol):
    """What World needs to know of `launch.identity.Identity`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def launcher(self) -> str: ...
    @property
    def master_address(self) -> str | None: ...
    @property
    def master_port(self) -> int | None: ...
    @property
    def run_directory(self) -> Path | None: ...


class Group:
    """Some ranks that talk with each other: `ranks` in order, `index` of this rank among them (None: not a member)."""

    __slots__ = ("handle", "index", "numbers", "ranks")

    def __init__(self, ranks: tuple[int, ...], index: int | None, handle: Any) -> None:
        self.ranks = ranks
        self.index = index
        self.handle = handle
        self.numbers = itertools.count()  # for what the members make in the same order; their messages carry it

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group{self.ranks}"


class World:
    """This process (`rank` of `size`), the device it computes on, and how it talks with the others.

    Every wait ends after `deadline` seconds. With one process no group exists and every operation is a no-op.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        launcher: str = "alone",
        device: torch.device | None = None,
        deadline: float = DEADLINE,
        owns_default_group: bool = False,
        open_board: Callable[[], Board] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.launcher = launcher
        self.device = torch.device("cpu") if device is None else device
        self.deadline = deadline
        self._owns_default_group = owns_default_group
        self.roll_call = None if open_board is None or size == 1 else RollCall(rank, size, open_board)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._own_groups: list[Group] = []
        everyone = tuple(range(size))
        self.everyone = Group(everyone, rank, dist.group.WORLD if size > 1 else None)
        self._groups[everyone] = self.everyone

    @classmethod
    def start(cls, identity: Identity, *, deadline: float = DEADLINE, device: torch.device | None = None) -> World:
        """Join the other ranks that `identity` tells of, and return this rank's World.

        An initialised default group is used as it is (the user's own script made it). Raises PeerError when the
        others do not come within `deadline` seconds.
        """
        device = pick_device(identity.local_rank) if device is None else device
        if dist.is_available() and dist.is_initialized():
            rank, size, owns = dist.get_rank(), dist.get_world_size(), False
        else:
            rank, size, owns = identity.rank, identity.size, identity.size > 1
            if owns:
                _join(identity, device, deadline)
        world = cls(
            rank=rank, size=size, local_rank=identity.local_rank, launcher=identity.launcher, device=device,
            deadline=deadline, owns_default_group=owns, open_board=_board_of(identity) if owns else None,
        )  # fmt: skip
        # gloo's threads let go of Python objects late: they must be joined while Python still stands, or it aborts
        atexit.register(world.close)
        return world

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of these ranks, made once per set. Every rank of the world asks, in the same order."""
        key = tuple(sorted(set(ranks)))
        if not key or key[0] < 0 or key[-1] >= self.size:
            raise RankError(
                f"no group of ranks {tuple(ranks)} in a world of {self.size}", remedy=f"ranks are 0..{self.size - 1}"
            )
        found = self._groups.get(key)
        if found is None:
            handle = None
            if len(key) > 1:
                handle = self.guard(
                    f"the group {key}", key, lambda: dist.new_group(list(key), timeout=timedelta(seconds=self.deadline))
                )
            found = Group(key, key.index(self.rank) if self.rank in key else None, handle)
            self._groups[key] = found
        return found

    def own_group(self, ranks: Sequence[int]) -> Group:
        """Return a new group of these ranks, for one thread's own use: its messages are apart from all others.

        Only its members call it, for the groups that two of them share in the same order.
        """
        key = tuple(sorted(set(ranks)))
        handle = self.guard(f"the group {key}", key, lambda: self._meet(key))
        group = Group(key, key.index(self.rank), handle)
        self._own_groups.append(group)
        return group

    def _meet(self, ranks: tuple[int, ...]) -> Any:
        """Make a group that only its members know of.

        torch takes the name under which they meet from their ranks and from how many groups a process has: they must
        have equally many, whatever other groups some of them are in.
        """
        timeout = timedelta(seconds=self.deadline)
        first, count = ranks[0], torch.tensor([len(_world.pg_names)])
        talk = self.everyone.handle
        if self.rank == first:
            for other in ranks[1:]:
                theirs = torch.zeros_like(count)
                talk.recv([theirs], other, MEETING_TAG).wait(timeout)
                count = torch.maximum(count, theirs)
            for other in ranks[1:]:
                talk.send([count], other, MEETING_TAG).wait(timeout)
        else:
            talk.send([count], first, MEETING_TAG).wait(timeout)
            talk.recv([count], first, MEETING_TAG).wait(timeout)
        while len(_world.pg_names) < int(count):
            dist.new_group([self.rank], timeout=timeout, use_local_synchronization=True)
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)

    # ---- collectives. All members call them in the same order; group=None means everyone.

    def all_reduce(self, tensor: torch.Tensor, group: Group | None = None, op: str = "sum") -> torch.Tensor:
        """Reduce `tensor` in place over the group ("sum", "max", "min", "product") and return it."""
        self.start_all_reduce(tensor, group, op).wait()
        return tensor

    def start_all_reduce(
        self, tensor: torch.Tensor, group: Group | None = None, op: str = "sum", awaited: str = "an all-reduce"
    ) -> Pending:
        """Begin to reduce `tensor` in place over the group; it may be read after `wait` of what is returned."""
        group = self._member(group)
        if group.size == 1:
            return Pending(None, awaited, (), self.deadline)
        call = lambda: dist.all_reduce(tensor, op=OPS[op], group=group.handle, async_op=True)  # noqa: E731
        return self.begin(call, awaited, self.others(group), tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: Group | None = None) -> torch.Tensor:
        """Overwrite `tensor` with that of rank `source` (a rank of the world) and return it."""
        group = self._member(group)
        if group.size > 1:
            peers = self.others(group) if source == self.rank else (source,)
            call = lambda: dist.broadcast(tensor, src=source, group=group.handle, async_op=True)  # noqa: E731
            self.begin(call, f"a broadcast from rank {source}", peers, tensor).wait()
        return tensor

    def broadcast_object(self, value: Any, source: int = 0, group: Group | None = None) -> Any:
        """Return rank `source`'s `value` (pickled) on every member."""
        group = self._member(group)
        if group.size == 1:
            return value
        payload = pickle.dumps(value) if self.rank == source else b""
        size = torch.tensor([len(payload)], device=self.device)
        self.broadcast(size, source, group)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(buffer, source, group)
        return value if self.rank == source else pickle.loads(buffer.cpu().numpy().tobytes())

    def gather_objects(self, value: Any, group: Group | None = None) -> list[Any]:
        """Return the `value` of each member (pickled), in the order of the group's ranks, on every member."""
        group = self._member(group)
        if group.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in group.ranks]
        self._all_gather(sizes, torch.tensor([payload.numel()], device=self.device), group)
        longest = max(int(size.item()) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        mine[: payload.numel()] = payload
        parts = [torch.empty_like(mine) for _ in group.ranks]
        self._all_gather(parts, mine, group)
        return [
            pickle.loads(part[: int(size.item())].cpu().numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def barrier(self, group: Group | None = None) -> None:
        """Wait until every member has come here."""
        self.start_all_reduce(torch.zeros(1, device=self.device), group, awaited="a barrier").wait()

    def close(self) -> None:
        """Let go of all groups, and leave the others if this World joined them. Messages under way are lost."""
        if self.roll_call is not None:
            self.roll_call.close()
        for group in (*self._groups.values(), *self._own_groups):
            group.handle = None
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_default_group = False
        gc.collect()  # a group's threads are joined when nothing holds it any more

    def others(self, group: Group) -> tuple[int, ...]:
        """Return the ranks of the group other than this one."""
        return tuple(rank for rank in group.ranks if rank != self.rank)

    def _all_gather(self, parts: list[torch.Tensor], mine: torch.Tensor, group: Group) -> None:
        call = lambda: dist.all_gather(parts, mine, group=group.handle, async_op=True)  # noqa: E731
        self.begin(call, "a gather", self.others(group), (parts, mine)).wait()

    def _member(self, group: Group | None) -> Group:
        group = self.everyone if group is None else group
        if group.index is None:
            raise RankError(f"rank {self.rank} is not in the group of ranks {group.ranks}")
        return group

    def begin(
        self, call: Callable[[], Any], awaited: str, peers: tuple[int, ...], keep: object, *, message: bool = False
    ) -> Pending:
        """Call torch to begin what `awaited` says with `peers`; `keep` are its tensors. `message`: from one to one."""
        work = self.guard(awaited, peers, call)
        # A wait that times out ends a message of gloo's, and everything of NCCL's; a gloo collective goes on.
        in_slices = not message and self.device.type == "cpu"
        return Pending(work, awaited, peers, self.deadline, keep, self.roll_call, in_slices=in_slices)

    def guard(self, awaited: str, peers: tuple[int, ...], call: Callable[[], Any]) -> Any:
        """Call torch; a connection that is already broken raises there and then, as a PeerError."""
        started = time.monotonic()
        try:
            return call()
        except RuntimeError as cause:
            spent = time.monotonic() - started
            raise peer_error(cause, awaited, peers, spent, self.deadline, self.roll_call) from cause


def pick_device(local_rank: int) -> torch.device:
    """Return this process's device: its own accelerator when there is one for it, else the CPU."""
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _board_of(identity: Identity) -> Callable[[], Board] | None:
    """Return what opens the place where ranks leave word for each other; None where theirs is not ours to use."""
    if identity.launcher == "torchrun":
        return None
    address, port, directory = identity.master_address, identity.master_port, identity.run_directory
    if address is not None and port is not None:
        return lambda: StoreBoard(address, port)
    return None if directory is None else lambda: FileBoard(Path(directory))


def _join(identity: Identity, device: torch.device, deadline: float) -> None:
    """Initialise torch's default group: by address and port, or through a file in the run's directory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settings: dict[str, Any] = {
        "backend": "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        "timeout": timedelta(seconds=deadline),
        "device_id": device if device.type == "cuda" else None,
    }
    if identity.launcher == "torchrun":
        # torchrun's agent may hold the store already; only torch's own reader of its variables knows.
        settings["init_method"] = "env://"
    else:
        settings |= {"rank": identity.rank, "world_size": identity.size}
        if identity.master_address is not None and identity.master_port is not None:
            settings["init_method"] = f"tcp://{identity.master_address}:{identity.master_port}"
        elif identity.run_directory is not None:
            settings["store"] = dist.FileStore(str(Path(identity.run_directory) / "rendezvous"), identity.size)
        else:
            raise RankError(
                f"rank {identity.rank} of {identity.size} does not know where the others are",
                remedy="start the script with `headway run -n N script.py`, torchrun or srun",
            )
    started = time.monotonic()
    peers = tuple(rank for rank in range(identity.size) if rank != identity.rank)
    try:
        dist.init_process_group(**settings)
    except RuntimeError as cause:
        raise peer_error(cause, "all ranks to start", peers, time.monotonic() - started, deadline) from cause
