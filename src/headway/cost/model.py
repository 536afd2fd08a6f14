"""Cost model: seconds of calls, messages, reductions and updates from FLOPs and bytes against a device's rates."""

from __future__ import annotations

from dataclasses import dataclass

from headway.cost.cluster import Device, Link
from headway.graph.model import Call, ModelGraph

BUCKET_BYTES = 25 << 20
"""Gradients are reduced in buckets of this many bytes, as torch's DDP does by default."""

BACKWARD_RATIO = 2.0
"""A backward computes a gradient for each of two factors where the forward computed one product."""


WAITING = frozenset(
    [f"torch.nn.functional.{name}" for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d")]
    + [f"torch.{name}" for name in ("conv1d", "conv2d", "conv3d", "matmul", "mm", "spmm", "addmm")]
    + [f"torch.Tensor.{name}" for name in ("matmul", "__matmul__", "mm", "addmm")]
)
"""Functions of a value and a weight whose weight gradient can wait for a W action; run/apart.py carries them out."""


@dataclass(frozen=True)
class Times:
    """Seconds of each call of a graph, `forward[call.index]` and `backward[call.index]`.

    `estimated` is the part of the total, 0 to 1, that comes from rates because the call was not timed itself.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    estimated: float = 0.0
    origin: str = "rates"

    @property
    def total(self) -> float:
        """Seconds of one forward and backward of everything."""
        return sum(self.forward) + sum(self.backward)


def has_backward(graph: ModelGraph, call: Call) -> bool:
    """Say whether autograd has anything to do for a call."""
    return any(graph.values[value].requires_grad for value in (*call.outputs, *call.writes))


def weight_part(graph: ModelGraph, call: Call) -> float:
    """Return the part of a call's backward that can wait: half of two equal products, all without an input gradient."""
    if call.function not in WAITING or not any(graph.parameter[name].trainable for name in call.parameters):
        return 0.0
    return 0.5 if any(graph.values[value].requires_grad for value in call.inputs) else 1.0


def dtype_of(graph: ModelGraph, call: Call) -> str:
    """Return the dtype that a call computes in: that of its first output or input, float32 for neither."""
    for value in (*call.outputs, *call.inputs):
        return graph.values[value].dtype
    return "float32"


def roofline_seconds(flops: float, num_bytes: float, dtype: str, device: Device) -> float:
    """Return max(FLOPs / rate, bytes / bandwidth) + the gap of one call, in seconds.

    Rates are peaks times efficiencies. Williams et al. 2009, "Roofline".
    """
    compute = flops / (device.rate(dtype) * device.efficiency)
    memory = num_bytes / (device.bandwidth * device.bandwidth_efficiency)
    return max(compute, memory) + device.gap


def call_seconds(graph: ModelGraph, call: Call, device: Device) -> tuple[float, float]:
    """Return the seconds of a call's forward and backward; a backward is two forwards' work, none without gradients."""
    dtype = dtype_of(graph, call)
    forward = roofline_seconds(call.flops, call.bytes, dtype, device)
    if not has_backward(graph, call):
        return forward, 0.0
    return forward, roofline_seconds(BACKWARD_RATIO * call.flops, BACKWARD_RATIO * call.bytes, dtype, device)


def estimate_times(graph: ModelGraph, device: Device) -> Times:
    """Return the times of every call from rates alone: for a machine that is not at hand."""
    pairs = [call_seconds(graph, call, device) for call in graph.calls]
    return Times(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), 1.0, f"rates of {device.kind}")


def all_reduce_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: 2(n-1) latencies and 2(n-1)/n of the bytes over each link.

    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".
    """
    if num_ranks < 2:
        return 0.0
    steps = 2 * (num_ranks - 1)
    return steps * link.latency + steps / num_ranks * num_bytes / link.bandwidth


def exposed_reduce_seconds(
    num_bytes: int, num_ranks: int, link: Link, backward: float, bucket_bytes: int = BUCKET_BYTES
) -> float:
    """Return the seconds by which reducing `num_bytes` of gradients outlasts the last backward of `backward` seconds.

    The b buckets of r seconds each become ready evenly over the backward, one at a time on the link. Bucket j of b is
    ready at backward * j/b; the reduction ends at the latest of ready_j + (b-j+1) r, which is linear in j, so the first
    or the last bucket decides: max(b r - backward (1 - 1/b), r).
    """
    if num_ranks < 2 or num_bytes == 0:
        return 0.0
    buckets = max(1, -(-num_bytes // bucket_bytes))
    each = all_reduce_seconds(num_bytes / buckets, num_ranks, link)
    return max(buckets * each - backward * (1 - 1 / buckets), each)


def accumulate_seconds(parameter_bytes: int, num_micro_batches: int, device: Device) -> float:
    """Return the seconds of adding up gradients, for each of a step's micro-batches on average.

    All but the first read the sum and the new gradient and write the sum: 3 * bytes * (m - 1) / m.
    """
    passes = 3 * (num_micro_batches - 1) / num_micro_batches
    return passes * parameter_bytes / (device.bandwidth * device.bandwidth_efficiency)


def update_seconds(parameter_bytes: int, optimizer_states: int, device: Device) -> float:
    """Return the seconds of clearing gradients and of an optimizer's step, limited by the device's memory.

    Each update reads the gradient, reads and writes the parameter and each state, and torch's unfused optimizers pass
    over them about twice; clearing writes the gradient once: bytes * (2 (3 + 2 states) + 1).
    """
    passes = 2 * (3 + 2 * optimizer_states) + 1
    return passes * parameter_bytes / (device.bandwidth * device.bandwidth_efficiency)
