"""Reducer: sums gradients over the copies of a model while backward still runs, in an order all copies share.

    backward     ..., block 5, block 4, block 3, block 2, ...
    buckets      [5.mlp.up] [5.attn.qkv] [4.mlp.up] ...  and, last, [all small ones | who was used]
                  all-reduced as soon as they and all before them are ready

A large gradient is a bucket by itself and is reduced where autograd left it, without a copy. Small ones are copied into
one flat buffer, and their `.grad` become views of it. The last buffer also carries, per parameter, how many ranks had a
gradient at all, so that one that nobody used stays None, as in one process.

With a codec, gradients of float32 go the way of two_shot.py, by a thread beside backward; others stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from headway.collective.bucket import MEBIBYTE, Bucket, Slot, flat, make_buckets, make_slot, watch
from headway.collective.exact_check import EVERY, ExactCheck
from headway.collective.feedback import lay, lost_by_name
from headway.collective.same import check_same, not_coded
from headway.collective.settle import settle, take
from headway.collective.sums import LowRank, Sums, is_exact, make_sums
from headway.collective.ties import sum_over_stages
from headway.collective.world import Group, World
from headway.journal import CodecChecked


class Reducer:
    """Reduces the gradients of `parameters` (name -> Parameter) over the ranks of `group`: the sum, times `scale`.

    `shared` names parameters that other stages hold too, with the group of ranks (one a stage) that hold them: their
    gradients are then summed over that group as well. Frozen parameters are left alone. A parameter of `direct_bytes`
    or more is reduced by itself, smaller ones in buckets of up to `bucket_bytes`. `codec` says how float32 crosses the
    wire ("fp32", "fp16", "bf16", "int8", "int4", "powersgd:RANK"; all but the first lose something); all ranks end with
    the same bits. The last two keep what they lose and add it to the next gradient: `state_dict` has it, by name.
    With `neighbours` the ranks of the group come host by host, so many of each, and sum within their host first.
    Every `check_every` steps one bucket is also summed exactly: `observe` gets the codec's error, and above a bound the
    codec gives way to the next better one. Raises RankError when ranks of the group hold other parameters, ValueError
    when no codec has that name.

    One step: `begin()`, backward any number of times, `arm()`, the last backward, `finish()`.
    Buckets after Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """

    def __init__(
        self,
        world: World,
        group: Group,
        parameters: Mapping[str, Parameter],
        *,
        bucket_bytes: int = 8 * MEBIBYTE,
        direct_bytes: int = MEBIBYTE,
        shared: Mapping[str, Group] | None = None,
        codec: str = "fp32",
        neighbours: int = 1,
        check_every: int = EVERY,
        observe: Callable[[CodecChecked], None] | None = None,
    ) -> None:
        self._world = world
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._direct_bytes = direct_bytes
        self._armed: Container[str] = ()
        self._next = 0
        self._scale = 1.0
        self.unused: tuple[str, ...] = ()
        shared = {name: over for name, over in (shared or {}).items() if over.size > 1}
        self._slots: list[Slot] = []
        taken: set[int] = set()
        for name, parameter in parameters.items():
            if parameter.requires_grad and id(parameter) not in taken:
                taken.add(id(parameter))
                self._slots.append(make_slot(name, parameter, len(self._slots), shared.get(name)))
        self._names = frozenset(slot.name for slot in self._slots)
        self._shared = sorted((slot for slot in self._slots if slot.shared is not None), key=lambda slot: slot.name)
        self._buckets: list[Bucket] = []
        self._order: list[int] | None = None  # in which gradients became ready, noted once
        self._hooks: list[Any] = []
        self.codec = self._asked = codec
        self._check = ExactCheck(world, group, check_every)
        self.observe = observe
        self._neighbours = neighbours
        self._sums: Sums | None = None
        self._exact_sums: Sums | None = None  # None: a plain all-reduce
        is_exact(codec)
        if group.size > 1:
            check_same(world, group, self._slots, f"codec {codec}, {neighbours} neighbours")
            self._exact_sums = make_sums(world, group, "fp32", neighbours)
            self._choose(codec)
        if group.size > 1 and self._slots:
            self._assign(list(reversed(self._slots)))
            self._order = []
            self._hooks = [watch(slot, lambda: self._armed, self._ready, group.ranks) for slot in self._slots]

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters in each bucket, in the order in which they are reduced."""
        return tuple(tuple(slot.name for slot in bucket.slots) for bucket in self._buckets)

    @property
    def _feedback(self) -> bool:
        return self._sums is not None and self._sums.feedback

    @property
    def exact(self) -> tuple[str, ...]:
        """Say which gradients are reduced exactly although a codec was asked for, and why: a sentence each dtype."""
        if is_exact(self.codec) or self._group.size == 1:
            return ()
        return not_coded(self._slots, self.codec)

    def begin(self, scale: float = 1.0) -> None:
        """Start a step: gradients that are there already are kept aside, and added by `finish`.

        This step's gradients are multiplied by `scale` (and by that of `finish`); known here it costs nothing.
        """
        self._scale = scale
        self._armed = ()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
            bucket.pending.clear()
        for slot in self._slots:
            slot.seen = False
            grad = slot.parameter.grad
            slot.earlier = None
            if grad is not None:
                # An earlier gradient may live in the bucket that is about to be written.
                in_bucket = slot.view is not None and grad.data_ptr() == slot.view.data_ptr()
                slot.earlier = grad.clone() if in_bucket else grad
                slot.parameter.grad = None

    def arm(self, names: Container[str] | None = None) -> None:
        """Say that the next backward is the last of this step for these parameters, by default for all.

        Their gradients are reduced as they become ready, in the order that all ranks agreed on.
        """
        self._armed = self._names if names is None else names

    def complete(self, names: Container[str]) -> None:
        """Say that the gradients of these parameters are complete, those too that came before `arm`; do not wait."""
        self._armed = ()
        for slot in self._slots:
            if slot.bucket is not None and not slot.seen and slot.name in names and slot.parameter.grad is not None:
                self._ready(slot, slot.parameter.grad)

    def launch(self) -> None:
        """Start reducing all that has not been started (also gradients that will stay absent), without waiting."""
        self._armed = ()
        for bucket in self._buckets[self._next :]:
            for slot in bucket.slots:
                if not slot.seen and slot.parameter.grad is not None:
                    take(slot, slot.parameter.grad, self._scale)
            self._start(bucket)

    def finish(self, scale: float = 1.0) -> None:
        """Reduce what is left, wait for all, multiply this step's gradients by `scale`, add the earlier ones.

        A parameter that no rank used keeps its earlier gradient, or None. Raises PeerError when a rank is lost or late.
        """
        self.launch()
        if not self._buckets:
            scale *= self._scale
        checking, event = self._check.checking, None
        for bucket in self._buckets:
            assert bucket.pending
            for pending in bucket.pending:
                pending.wait()
            bucket.pending.clear()
            if bucket is checking:
                event = self._check.finish(self.codec, self._values(bucket))
            if scale != 1.0 and bucket.values is not None:
                bucket.values.mul_(scale)
        used = self._used()
        some = any(used)  # the same on all ranks
        sum_over_stages(self._world, self._shared, used)
        for slot in self._slots:
            settle(slot, used[slot.number], scale, self._group.size)
        self.unused = tuple(slot.name for slot in self._slots if not used[slot.number])
        if self._order is not None and some:  # a rank without samples has no gradients, and takes part
            self._order = self._learn(self._order)
        self._check.steps += 1
        if event is not None and event.now != self.codec:
            self._use(event.now)
        if event is not None and self.observe is not None:
            self.observe(event)

    def close(self) -> None:
        """Take the hooks off the parameters, and end the thread that sums, if there is one."""
        for sums in (self._sums, self._exact_sums):
            if sums is not None:
                sums.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- while backward runs

    def _ready(self, slot: Slot, grad: torch.Tensor) -> None:
        """Take a complete gradient, and start what waited for it alone."""
        take(slot, grad, self._scale)
        if self._order is not None:
            self._order.append(slot.number)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._start(self._buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        """All-reduce a bucket; what is missing in it counts as zero."""
        self._next = bucket.number + 1
        if bucket.missing:
            for slot in bucket.slots:
                if not slot.seen and slot.view is not None:
                    slot.view.zero_()
                elif not slot.seen:
                    slot.parameter.grad = torch.zeros_like(slot.parameter, requires_grad=False)
        tensor = self._values(bucket) if bucket.flat is None else bucket.flat
        if bucket.flags is not None:
            bucket.flags.fill_(1.0)
            absent = [slot.number for slot in self._slots if not slot.seen]
            if absent:
                bucket.flags[absent] = 0.0
        values = tensor if bucket.values is None else bucket.values
        if bucket.residual is not None and not self._feedback:
            values.add_(bucket.residual)  # what an earlier codec, before a checkpoint, still owed
            bucket.residual = None
        if self._sums is not None and values.numel() and _encodes(values):
            self._check.start(bucket, values, self._buckets)
            bucket.pending.append(
                self._sums.start(values, bucket.awaited, residual=bucket.residual, slots=bucket.slots)
            )
            if bucket.flags is None:
                return
            tensor = bucket.flags  # counts must be exact
        elif self._exact_sums is not None and values.numel():
            bucket.pending.append(self._exact_sums.start(tensor, bucket.awaited, residual=None, slots=()))
            return
        bucket.pending.append(self._world.start_all_reduce(tensor, self._group, awaited=bucket.awaited))

    def _values(self, bucket: Bucket) -> torch.Tensor:
        """Return the gradients of a bucket as they lie in memory, [n]."""
        if bucket.values is not None:
            return bucket.values
        grad = bucket.slots[0].parameter.grad
        assert grad is not None
        return flat(grad)

    # ---- after it

    def _choose(self, codec: str) -> None:
        if self._sums is not None:
            self._sums.close()
        coded = not is_exact(codec) and any(_encodes(slot.parameter) for slot in self._slots)
        self.codec = codec
        self._sums = make_sums(self._world, self._group, codec, self._neighbours) if coded else None

    def _use(self, codec: str) -> None:
        """Go over to another codec; what the old one still owes is added once."""
        self._choose(codec)
        self._assign([slot for bucket in self._buckets for slot in bucket.slots])

    def _used(self) -> list[bool]:
        """Tell for each parameter whether any rank of the group had a gradient; read from the wire only if need be."""
        if not self._buckets:
            return [slot.parameter.grad is not None for slot in self._slots]
        if all(slot.seen for slot in self._slots):
            return [True] * len(self._slots)
        flags = self._buckets[-1].flags
        assert flags is not None
        return [count > 0 for count in flags.tolist()]

    # ---- state, and which buckets

    def state_dict(self) -> dict[str, Any]:
        """Return what the next gradients follow from, besides parameters and batches: this rank's own, copied.

        "asked" for and "codec" in use, "copies", "steps", "names"; "order", the names in the order of the buckets,
        once it has been learned; "residuals", what this rank's messages lost, by name (what matters is the sum of these
        over the ranks: `load_state_dict`); "bases", what powersgd begins its next step with.
        """
        order = [slot.name for bucket in self._buckets for slot in bucket.slots] if self._order is None else []
        residuals = {name: residual.clone() for name, residual in lost_by_name(self._buckets).items()}
        bases = dict(self._sums.bases) if isinstance(self._sums, LowRank) else {}
        return {
            "asked": self._asked,
            "codec": self.codec,
            "steps": self._check.steps,
            "copies": self._group.size,
            "names": [slot.name for slot in self._slots],
            "order": order,
            "residuals": residuals,
            "bases": bases,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; the same on every rank but for the residuals.

        Continues bit for bit what the rank that wrote it would have done, with the codec that was in use. Under another
        number of copies give each rank an equal part of the sum of all residuals. A codec that keeps none adds them to
        the next gradients.
        """
        slots = {slot.name: slot for slot in self._slots}
        if not self._buckets:
            return
        kept = {name: residual for name, residual in state["residuals"].items() if name in slots}
        for name, residual in kept.items():
            if residual.shape != slots[name].parameter.shape:
                raise ValueError(f"{name} is {list(slots[name].parameter.shape)}, what it lost {list(residual.shape)}")
        self._check.steps = state["steps"]
        if state["asked"] == self._asked and state["codec"] != self.codec:
            self._use(state["codec"])
        order = list(state["order"])
        if set(order) == self._names and len(order) == len(slots):
            self._order = None
            self._assign([slots[name] for name in order])
        if isinstance(self._sums, LowRank):
            self._sums.bases.update(state.get("bases", {}))
        lay(self._buckets, kept, everywhere=self._feedback)

    def _learn(self, order: list[int]) -> list[int] | None:
        """Take over the order in which the first rank's gradients became ready; the rest keep theirs, at the end.

        Returns what is still to be learned: nothing, or all, in a later step, where that rank had no gradients.
        """
        order = self._world.broadcast_object(order, source=self._group.ranks[0], group=self._group)
        if not order:
            return []
        known = set(order)
        rest = [slot for slot in reversed(self._slots) if slot.number not in known]
        slots = [self._slots[number] for number in order] + rest
        if slots != [slot for bucket in self._buckets for slot in bucket.slots]:
            self._assign(slots)
        return None

    def _assign(self, slots: Sequence[Slot]) -> None:
        kept = lost_by_name(self._buckets)
        block = self._sums.block if self._sums is not None else 1
        self._buckets = make_buckets(
            slots, bucket_bytes=self._bucket_bytes, direct_bytes=self._direct_bytes, block=block
        )
        lay(self._buckets, kept, everywhere=self._feedback)


def _encodes(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32
