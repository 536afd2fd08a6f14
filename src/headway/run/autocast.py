"""Autocast: what of a step runs in the lower precision that the script has switched on around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Give a block for a backward: its calls take the dtypes that forward took, as outside of torch.autocast.

    Under it they would be lowered once more, those of calls too that autocast does in float32.
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def forget_casts(device: str) -> None:
    """Forget the lowered copies of parameters that an autocast around several forwards keeps.

    They belong to the graph of the forward that made them: one without gradients, or of a parameter that is gathered
    anew for each.
    """
    if torch.is_autocast_enabled(device):
        torch.clear_autocast_cache()
