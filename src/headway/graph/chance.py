"""Chance: which torch calls draw random numbers, and whether Python or numpy did."""

from __future__ import annotations

import random
import sys
from typing import Any

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
"""Dropouts of which each sample draws its own mask, when dim 0 is a multiple of the samples (run/randomness.py)."""

DRAWN_BY_SAMPLE = DROPPED_BY_SAMPLE | {"scaled_dot_product_attention"}
"""All calls of which each sample draws its own numbers."""


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
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        floats = [item for item in args if isinstance(item, float)]
        switches = [item for item in args if isinstance(item, bool)]
        return bool(floats and floats[0] > 0 and len(switches) > 1 and switches[1])
    return False
