"""Small graphs written by hand: chains of layers whose bytes and seconds can be worked out on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.cost.model import Times
from headway.graph.model import Call, Cut, ModelGraph, ParameterInfo, Value


def chain(
    samples: int = 2,
    widths: Sequence[int] = (4, 4, 4, 4),
    *,
    tied: bool = False,
    mask: bool = False,
    itemsize: int = 4,
) -> ModelGraph:
    """Make x -> linear -> ... -> linear -> mean, x of shape [samples, widths[0]], without biases.

    Layer i holds "layers.i.weight" of widths[i] * widths[i + 1] elements and keeps its input for backward; the loss
    keeps its own. Storage i is what layer i takes; a stage may begin at each call but the first. With `tied` the last
    layer uses the first one's weight; with `mask` the first call makes a mask from the batch alone.
    """
    layers = len(widths) - 1
    values = [Value(0, (samples, widths[0]), "float32", samples * widths[0] * itemsize, None, 0, False, False, 0, True)]
    calls: list[Call] = []
    offset = 0
    if mask:
        offset = 1
        size = samples * itemsize
        values.append(Value(layers + 2, (samples,), "float32", size, 0, 0, False, False, layers + 2))
        calls.append(_call(0, "torch.ones", (0,), (layers + 2,), (), derived=False, flops=0, size=size, saved=()))
    for layer in range(layers):
        index = layer + offset
        size = samples * widths[layer + 1] * itemsize
        values.append(Value(layer + 1, (samples, widths[layer + 1]), "float32", size, index, 0, True, True, layer + 1))
        name = "layers.0.weight" if tied and layer == layers - 1 else f"layers.{layer}.weight"
        flops = 2 * samples * widths[layer] * widths[layer + 1]
        calls.append(
            _call(
                index,
                "torch.nn.functional.linear",
                (layer,),
                (layer + 1,),
                (name,),
                flops=flops,
                size=size,
                saved=(layer,),
            )
        )
    index = layers + offset
    values.append(Value(layers + 1, (), "float32", itemsize, index, 0, True, True, layers + 1))
    calls.append(
        _call(index, "torch.Tensor.mean", (layers,), (layers + 1,), (), flops=0, size=itemsize, saved=(layers,))
    )
    values.sort(key=lambda value: value.id)
    cuts = tuple(
        Cut(f"cut.{at}", at, (at,), (at - offset,), values[at - offset].bytes) for at in range(1 + offset, index + 1)
    )
    names = [layer for layer in range(layers) if not (tied and layer == layers - 1)]
    parameters = tuple(
        ParameterInfo(
            f"layers.{i}.weight",
            (widths[i + 1], widths[i]),
            "float32",
            widths[i] * widths[i + 1] * itemsize,
            True,
            False,
        )
        for i in names
    )
    return ModelGraph(
        samples=samples,
        calls=tuple(calls),
        values=tuple(values),
        storages=tuple(value.bytes for value in values),
        modules=(),
        parameters=parameters,
        cuts=cuts,
        extra={"results": (layers + 1,)},
    )


def times(graph: ModelGraph, seconds: Sequence[float] | None = None, per_call: float = 0.0) -> Times:
    """Give times in proportion to samples: `seconds[i]` of call i for one sample, forward; backward takes twice that.

    Each call takes `per_call` seconds more, whatever the samples.
    """
    each = seconds or [1e-3] * len(graph.calls)
    forward = tuple(graph.samples * value + per_call for value in each)
    return Times(forward, tuple(2 * value for value in forward), 0.0, "by hand")


def _call(
    index: int,
    function: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    parameters: tuple[str, ...],
    *,
    flops: int,
    size: int,
    saved: tuple[int, ...],
    derived: bool = True,
) -> Call:
    return Call(
        index=index,
        position=(index, 0),  # landmark, and calls since it
        module="",
        function=function,
        arguments=None,
        inputs=inputs,
        outputs=outputs,
        writes=(),
        parameters=parameters,
        buffers=(),
        written_buffers=(),
        derived=derived,
        random=False,
        reads_value=False,
        flops=flops,
        bytes=2 * size,
        output_bytes=size,
        saved=saved,
        where=f"by_hand.py:{math.trunc(index)}",
    )
