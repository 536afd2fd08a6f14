"""Chance: which torch calls draw random numbers, and whether Python or numpy did."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from headway.graph.walk import short_name

DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial normal normal_ "
    "uniform_ random_ exponential_ geometric_ log_normal_ cauchy_ poisson gumbel_softmax".split()
)
DROPOUTS = frozenset(
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_alpha_dropout feature_dropout "
    "feature_dropout_ rrelu rrelu_".split()
)
DROPPED_BY_SAMPLE = frozenset("dropout dropout_ dropout1d dropout2d dropout3d feature_dropout".split())
"""Dropouts of which each sample draws its own mask (run/randomness.py)."""

DRAWN_WITH_ROWS = frozenset(
    "rand_like randn_like randint_like bernoulli poisson normal multinomial gumbel_softmax alpha_dropout "
    "feature_alpha_dropout rrelu".split()
)
"""Calls that draw for each row of what they are given."""

DRAWN_IN_PLACE = frozenset(
    "bernoulli_ normal_ uniform_ random_ exponential_ geometric_ log_normal_ cauchy_ alpha_dropout_ rrelu_ "
    "feature_dropout_".split()
)
"""Calls that draw the rows of what they are given anew."""

DRAWN_WITHOUT_ROWS = frozenset({"rand", "randn", "randint"})
"""Calls that make rows of numbers out of nothing."""

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Calls that compute several layers, and drop from what goes from one to the next."""

DRAWN_BY_SAMPLE = frozenset(
    {*DROPPED_BY_SAMPLE, *DRAWN_WITH_ROWS, *DRAWN_IN_PLACE, *DRAWN_WITHOUT_ROWS, *RECURRENT}
    | {"scaled_dot_product_attention", "multi_head_attention_forward"}
)
"""All calls of which each sample draws its own numbers, where it is known which are whose (`headway.graph.rows`)."""

DRAWING = frozenset({*DRAWS, *DROPOUTS, *DRAWN_BY_SAMPLE})
"""All functions that may draw; what is drawn inside a custom function is not among them."""


def sample_dim(shape: Sequence[int], samples: int) -> int | None:
    """Say along which dim of a tensor its samples lie, as far as the shape tells; None where it does not.

    [samples, ...], [length, samples, width] (but not [samples x heads, length, length]), or [samples x k, ...].
    """
    if not shape or not samples or not shape[0]:
        return None
    if shape[0] == samples:
        return 0
    if len(shape) == 3 and shape[1] == samples != shape[2]:
        return 1
    return 0 if shape[0] % samples == 0 else None


def host_state() -> tuple[Any, ...]:
    """Give a few numbers that change when Python's or numpy's global generator is drawn from."""
    words = random.getstate()[1]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (words[-1], words[0])
    state = numpy.random.get_state(legacy=False)["state"]
    return (words[-1], words[0], state["pos"], int(state["key"][0]))


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    """Read an argument given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def is_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether this call draws random numbers; dropout that is switched off does not."""
    name = short_name(func)
    if name in DRAWS:
        return True
    if name in DROPOUTS:
        training = name.startswith("rrelu") and argument(args, kwargs, 3, "training", False)
        if not name.startswith("rrelu"):
            training = argument(args, kwargs, 2, "training", True) and argument(args, kwargs, 1, "p", 0.5) > 0
        return bool(training)
    if name == "scaled_dot_product_attention":
        return bool(argument(args, kwargs, 4, "dropout_p", 0.0) > 0)
    if name == "multi_head_attention_forward":
        # (query, key, value, embed_dim, heads, in_weight, in_bias, bias_k, bias_v, zero_attn, dropout_p, out_w, out_b)
        return bool(argument(args, kwargs, 10, "dropout_p", 0.0) > 0 and argument(args, kwargs, 13, "training", True))
    if name in RECURRENT and len(args) == 9:
        # (..., weights, biases, layers, dropout, training, both directions), and batch_first where it is not packed
        layers, dropout, training = args[5:8] if isinstance(args[3], tuple | list) else args[4:7]
        return bool(layers > 1 and dropout > 0 and training)
    return False


def seed_torch(number: int) -> None:
    """Seed torch's own generators: the CPU's, and those of CUDA devices that are in use.

    `torch.manual_seed` notes a stack for each kind of device that is not: 350 us a call, where this takes 1.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
