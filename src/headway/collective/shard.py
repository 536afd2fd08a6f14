"""ShardedReducer: gradients go to the one copy that keeps a parameter's optimizer states, and its new values come back.

    shard="optimizer"    backward of the last micro-batch    each gradient, summed over micro-batches, to its owner
    shard="gradients"    backward of every micro-batch       each gradient to its owner, and let go where it was made
    next forward         spread                              each parameter from its owner to all

With several groups of copies that each share out a model (across.py), owners sum with those of the others, once a step.
Each rank updates the parameters that it owns, whole tensors, with any optimizer: to the optimizer they are all there
are. Summing to the owner and spreading from it take the bytes of one all-reduce, together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from functools import partial

import torch
from torch.nn import Parameter

from headway.collective.across import Across, Sharers
from headway.collective.bucket import MEBIBYTE, Slot, alone_in_memory, flat, make_slot, watch
from headway.collective.codec import CODECS
from headway.collective.courier import Courier, Delivery
from headway.collective.parcel import Parcel, make_parcels
from headway.collective.same import check_same
from headway.collective.spread import Spread
from headway.collective.ties import sum_over_stages
from headway.collective.world import Group, World
from headway.errors import RankError
from headway.layout.ownership import in_flight_bytes


class ShardedReducer:
    """Sums the gradients of `parameters` (name -> Parameter) over the ranks of `group`, each on its owner alone.

    `owners` gives for each name the index in the group of the rank that owns it. A step is as with Reducer: `begin()`,
    backward any number of times, `arm()`, the last backward, `complete()`, `finish()`; afterwards owned parameters have
    the sum in `.grad`, others None. With `every_backward` each backward stands between `arm` and `complete`, and only
    owners keep gradients from one to the next; `begin(backwards=...)` says how many there are on the rank with most.
    `shared`, `parcel_bytes`, `direct_bytes` and `codec` as for Reducer (codecs without feedback); errors too.
    With `among`, whose `near` group is `group`, sums are over all its copies: exact in the group, by `codec` across.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stages 1 and 2.
    """

    def __init__(
        self,
        world: World,
        group: Group,
        parameters: Mapping[str, Parameter],
        owners: Mapping[str, int],
        *,
        every_backward: bool = False,
        parcel_bytes: int = 8 * MEBIBYTE,
        direct_bytes: int = MEBIBYTE,
        shared: Mapping[str, Group] | None = None,
        codec: str = "fp32",
        among: Sharers | None = None,
    ) -> None:
        assert group.index is not None
        self._everyone = group if among is None else among.copies
        several = among is not None and among.several
        self._world, self._group, self._me, self._owners = world, group, group.index, dict(owners)
        self._every_backward = every_backward
        self._parcel_bytes, self._direct_bytes = parcel_bytes, direct_bytes
        self.codec = codec
        self.unused: tuple[str, ...] = ()
        shared = {name: over for name, over in (shared or {}).items() if over.size > 1}
        self._slots: list[Slot] = []
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self._slots.append(make_slot(name, parameter, len(self._slots), shared.get(name)))
        self._own = [slot for slot in self._slots if owners[slot.name] == self._me]
        self._used: list[bool] = [False] * len(self._slots)
        self._armed: Container[str] = ()
        self._scale, self._rounds, self._round, self._next = 1.0, 1, 0, 0
        self._in_flight: deque[Parcel] = deque()
        self._most_in_flight = in_flight_bytes(sum(slot.bytes for slot in self._slots))
        self._flags: list[tuple[torch.Tensor, Delivery]] = []
        told = f"codec {codec}, gradients {'of every backward' if every_backward else 'of a step'}, owners {owners}"
        check_same(world, self._everyone, self._slots, told)
        self._courier = Courier(world, group, None if several else CODECS[codec])
        self._across = Across(world, among.across, codec) if among is not None and several else None
        self._parcels: list[Parcel] = []
        self._parcel_of: dict[int, Parcel] = {}
        self._spread = Spread(self._courier, self._slots, owners, self._me)
        self._assign(list(reversed(self._slots)))
        self._order: list[int] | None = []  # in which gradients became ready, noted once
        self._hooks = [watch(slot, lambda: self._armed, self._ready, group.ranks) for slot in self._slots]

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters in each parcel, in the order in which they are summed."""
        return tuple(tuple(slot.name for slot in parcel.slots) for parcel in self._parcels)

    @property
    def owned(self) -> tuple[str, ...]:
        """Return the names of the parameters that this rank updates."""
        return tuple(slot.name for slot in self._own)

    @property
    def used_first(self) -> tuple[str, ...]:
        """Return the names of the parameters that have been used since the last `spread`, in that order."""
        return tuple(self._slots[number].name for number in self._spread.used)

    # ---- one step

    def begin(self, scale: float = 1.0, backwards: int = 1) -> None:
        """Start a step: gradients that owned parameters have already are kept aside, and added by `finish`.

        This step's gradients are multiplied by `scale` (and by that of `finish`). `backwards` counts for
        `every_backward`, and is the same on all ranks.
        """
        self._scale, self._armed, self._round = scale, (), 0
        self._rounds = backwards if self._every_backward else 1
        self._used = [False] * len(self._slots)
        self._open_round()
        for slot in self._slots:
            grad, slot.earlier = slot.parameter.grad, None
            if grad is not None and self._owners[slot.name] == self._me:
                # An earlier gradient may live in the parcel that is about to be written.
                in_parcel = slot.view is not None and grad.data_ptr() == slot.view.data_ptr()
                slot.earlier = grad.clone() if in_parcel else grad
            slot.parameter.grad = None

    def arm(self, names: Container[str] | None = None) -> None:
        """Say that the next backward is one whose gradients go to their owners as they become ready.

        That is the last of the step for these parameters (by default for all), or with `every_backward` each.
        """
        if self._round < self._rounds:
            self._armed = frozenset(slot.name for slot in self._slots) if names is None else names

    def complete(self, names: Container[str] | None = None) -> None:
        """Say that the gradients of these parameters are complete, those too that came before `arm`; do not wait."""
        self._armed = ()
        if self._every_backward and self._round < self._rounds:
            self._close_round()
            return
        for slot in self._slots:
            grad = slot.parameter.grad
            if grad is not None and not slot.seen and (names is None or slot.name in names):
                self._ready(slot, grad)

    def launch(self) -> None:
        """Say that all backwards of this step are done: start the rest, without waiting."""
        while self._round < self._rounds:  # other copies may have more micro-batches
            self._close_round()

    def finish(self, scale: float = 1.0) -> None:
        """Wait for all sums; multiply owned ones by `scale` and add the earlier ones. Others' gradients are None then.

        A parameter that no rank used keeps its earlier gradient, or None. Raises PeerError when a rank is lost or late.
        """
        self.launch()
        self._spread.settle()
        for parcel in self._parcels:
            self._harvest(parcel)
        self._in_flight.clear()
        self._read_flags()
        self._settle(scale * self._scale)
        shared = sorted((slot for slot in self._own if slot.shared is not None), key=lambda slot: slot.name)
        sum_over_stages(self._world, shared, self._used)
        self._add_earlier()
        self.unused = tuple(slot.name for slot in self._own if not self._used[slot.number])
        if self._order is not None:
            self._order = self._learn(self._order)

    def spread(self, at_once: Container[str] | None = None) -> None:
        """Give all ranks the values of each parameter from its owner. Every rank calls it, between steps.

        Returns when all are here; or, given names, when theirs are: the others are awaited when they are first used, at
        the latest by `finish`.
        """
        self._spread.start(() if at_once is None else at_once)
        if at_once is None:
            self._spread.settle()

    def close(self) -> None:
        """Take the hooks off the parameters, and end the courier's thread."""
        self._courier.close()
        if self._across is not None:
            self._across.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- while backward runs

    def _ready(self, slot: Slot, grad: torch.Tensor) -> None:
        """Take a complete gradient, and start what waited for it alone."""
        self._take(slot, grad)
        if self._order is not None and self._round == 0:
            self._order.append(slot.number)
        while self._next < len(self._parcels) and not self._parcels[self._next].missing:
            self._start(self._parcels[self._next])

    def _open_round(self) -> None:
        self._next, self._armed = 0, ()
        for slot in self._slots:
            slot.seen = False
        for parcel in self._parcels:
            parcel.missing = len(parcel.slots)

    def _close_round(self) -> None:
        for parcel in self._parcels[self._next :]:
            for slot in parcel.slots:
                if not slot.seen and slot.parameter.grad is not None:
                    self._take(slot, slot.parameter.grad)
            self._start(parcel)
        self._open_round()
        self._round += 1
        if self._round == self._rounds:
            self._start_flags()

    def _take(self, slot: Slot, grad: torch.Tensor) -> None:
        """Put a complete gradient where it will be summed; the parameter lets go of it."""
        if grad.layout != torch.strided:
            raise RankError(
                f"the gradient of {slot.name} is sparse ({grad.layout}), and only dense ones are reduced",
                remedy="build the embedding with sparse=False",
            )
        grad = grad.detach()  # it may require a gradient itself: backward(create_graph=True)
        parcel = self._parcel_of[slot.number]
        if parcel.delivery is not None:
            self._harvest(parcel)  # of the micro-batch before
        slot.parameter.grad = None
        if slot.view is not None:
            slot.view.copy_(grad)
        else:
            written = parcel.owner == self._me
            if grad.stride() != slot.stride or (written and not alone_in_memory(grad)):
                grad = torch.empty_like(slot.parameter, requires_grad=False).copy_(grad)
            parcel.current = flat(grad)
        slot.seen = self._used[slot.number] = True
        parcel.missing -= 1

    def _start(self, parcel: Parcel) -> None:
        """Send a parcel to its owner; what is missing in it counts as zero."""
        self._next += 1
        if parcel.delivery is not None:
            self._harvest(parcel)
        if parcel.flat is not None:
            for slot in parcel.slots:
                if not slot.seen and slot.view is not None:
                    slot.view.zero_()
            parcel.current = parcel.flat
        elif parcel.current is None:
            parcel.current = torch.zeros_like(flat(parcel.slots[0].parameter))
        then = None
        if self._across is not None and parcel.owner == self._me and self._round == self._rounds - 1:
            if parcel.total is not None:
                parcel.current.add_(parcel.total)  # sums of earlier backwards cross with the last one's
                parcel.total = None
            then = partial(self._across.start, parcel.current, parcel.awaited)
        parcel.delivery = self._courier.collect(parcel.current, parcel.owner, parcel.awaited, then)
        if parcel.owner != self._me:
            parcel.current = None  # what is still to be sent is kept by the delivery alone
        if self._every_backward and parcel.flat is None and then is None:
            self._in_flight.append(parcel)
            while self._in_flight and (
                self._in_flight[0].arrived or sum(waiting.bytes for waiting in self._in_flight) > self._most_in_flight
            ):
                self._harvest(self._in_flight.popleft())

    def _harvest(self, parcel: Parcel) -> None:
        """Wait for a parcel; on its owner, add it to what has come in this step."""
        if parcel.delivery is None:
            return
        parcel.delivery.wait()
        parcel.delivery = None
        values, parcel.current = parcel.current, None
        if parcel.owner != self._me or values is None:
            return
        if parcel.total is not None:
            parcel.total.add_(values)
        else:
            more = parcel.flat is not None and self._rounds > 1
            parcel.total = values.clone() if more else values

    # ---- after it

    def _of(self, owner: int) -> list[Slot]:
        return [slot for slot in self._slots if self._owners[slot.name] == owner]

    def _start_flags(self) -> None:
        """Tell each owner which of its parameters had a gradient here."""
        for owner in range(self._group.size):
            slots = self._of(owner)
            if slots:
                here = [int(self._used[slot.number]) for slot in slots]
                flags = torch.tensor(here, dtype=torch.int32, device=slots[0].parameter.device)
                awaited = f"who had gradients of {slots[0].name}, ..."
                then = None
                if self._across is not None and owner == self._me:
                    then = partial(self._across.start, flags, awaited)
                self._flags.append((flags, self._courier.collect(flags, owner, awaited, then)))

    def _read_flags(self) -> None:
        owners = [owner for owner in range(self._group.size) if self._of(owner)]
        for owner, (flags, delivery) in zip(owners, self._flags, strict=True):
            delivery.wait()
            if owner == self._me:
                for slot, count in zip(self._own, flags.tolist(), strict=True):
                    # frozen between steps, perhaps by its owner alone: others have not the parameter to freeze
                    self._used[slot.number] = count > 0 and slot.parameter.requires_grad
        self._flags = []

    def _settle(self, scale: float) -> None:
        """Give each owned parameter that some rank used its sum, times `scale`."""
        for parcel in self._parcels:
            total, parcel.total = parcel.total, None
            if parcel.owner != self._me or total is None:
                continue
            if scale != 1.0:
                total.mul_(scale)
            for number, slot in enumerate(parcel.slots):
                if self._used[slot.number]:
                    slot.parameter.grad = parcel.view(number, total)

    def _add_earlier(self) -> None:
        for slot in self._own:
            grad, earlier, slot.earlier = slot.parameter.grad, slot.earlier, None
            if grad is None:
                slot.parameter.grad = earlier
            elif earlier is not None and earlier.requires_grad:
                slot.parameter.grad = earlier + grad
            elif earlier is not None:
                grad.add_(earlier)

    # ---- which parcels

    def _learn(self, order: list[int]) -> list[int] | None:
        """Take over the order in which the first rank's gradients became ready; the rest keep theirs, at the end.

        Where it had none, all ranks try again in the next step: an empty list says so.
        """
        told = (order, self._spread.used)
        order, used = self._world.broadcast_object(told, self._everyone.ranks[0], self._everyone)
        if used:
            self._spread.order(used)
        if not order:
            return []
        known = set(order)
        rest = [slot for slot in reversed(self._slots) if slot.number not in known]
        self._assign([self._slots[number] for number in order] + rest)
        return None

    def _assign(self, slots: Sequence[Slot]) -> None:
        block = CODECS[self.codec].block
        self._parcels = make_parcels(
            slots, self._owners, parcel_bytes=self._parcel_bytes, direct_bytes=self._direct_bytes, block=block
        )
        self._parcel_of = {slot.number: parcel for parcel in self._parcels for slot in parcel.slots}
