"""The memory model against numbers worked out by hand, and against tensors counted while real models run."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.cost.cluster import Cluster
from headway.cost.memory import (
    RUNTIME_BYTES_CPU,
    Storages,
    activation_bytes,
    batch_bytes,
    names_of,
    stage_memory,
    static_bytes,
    temporary_bytes,
)
from headway.graph.record import record
from tests.cost.graphs import chain

# chain(): batch 0 [2, 4] -> storages 1, 2, 3 of 32 bytes each -> the loss, storage 4, 4 bytes; weights of 64 bytes


def test_what_is_kept_from_forward_to_backward() -> None:
    graph = chain()
    assert Storages.of(graph).held(0, 4) == {1, 2, 3}  # the batch is there anyway, the loss is not saved
    assert activation_bytes(graph, 0, 4) == 96
    assert Storages.of(graph).held(0, 2) == {1, 2}  # 2 is sent
    assert Storages.of(graph).held(2, 4) == {2, 3}  # 2 is received


def test_temporaries_of_the_whole_model() -> None:
    # Backward of layer 2: gradients of storages 3 and 2 and of its weight, the loss's saved input is free again:
    # 32 + 32 + 64 - 32. Of the loss: 32 + 4. Of layer 1: 32 + 32 + 64 - 64. Of layer 0: 32 + 64 - 96.
    assert temporary_bytes(chain(), 0, 4) == 96


def test_temporaries_of_stages() -> None:
    assert temporary_bytes(chain(), 0, 2) == 32 + 32 + 64  # layer 1: what it sent and took, its weight
    assert temporary_bytes(chain(), 2, 4) == 32 + 32 + 64 - 32  # layer 2, after the loss
    assert temporary_bytes(chain(), 2, 2) == 0


def test_static_bytes() -> None:
    graph = chain()
    # parameter, gradient, two states
    assert static_bytes(graph, names_of(graph, 0, 4), 2) == 3 * 64 * 4
    assert static_bytes(graph, names_of(graph, 0, 1), 0) == 64 * 2


def test_a_tied_parameter_counts_once_in_a_stage_and_once_on_each() -> None:
    graph = chain(tied=True)
    assert names_of(graph, 0, 4) == ("layers.0.weight", "layers.1.weight")
    assert names_of(graph, 0, 1) == names_of(graph, 2, 4) == ("layers.0.weight",)


def test_batch_grows_with_samples() -> None:
    assert batch_bytes(chain(samples=2), 10) == 10 * 4 * 4


def test_stage_memory_adds_up() -> None:
    device = Cluster("1xcpu:1GiB").device
    memory = stage_memory(chain(), 0, 2, device, optimizer_states=1, global_batch=4)
    assert memory.parameters == 2 * 64
    assert memory.static == 2 * 64 * 3 + 4 * 4 * 4 + RUNTIME_BYTES_CPU
    assert memory.build == 3 * 64 + 4 * 4 * 4 + RUNTIME_BYTES_CPU
    assert memory.update == 2 * 64


class Counter(TorchDispatchMode):
    """Counts the bytes of storages that operators make, while they live, beside those that are there before."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.there = [tensor.untyped_storage() for tensor in there]
        self.seen = {id(storage) for storage in self.there}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self.seen:
            self.seen.add(id(storage))
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, id(storage), storage.nbytes())

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, w // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(x)))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)), (512, 64)),
        (nn.Sequential(*(Attention(64) for _ in range(3)), nn.Linear(64, 500)), (8, 32, 64)),
        (residual(), (16, 8, 12, 12)),
    ],
    ids=["mlp", "transformer", "convolutions"],
)
def test_peak_of_a_real_step(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Predicted activations + temporaries of a micro-batch against storages counted in a real forward and backward."""

    def loss(net, batch):
        return F.cross_entropy(net(batch).flatten(0, -2), torch.zeros(batch.shape[:-1].numel(), dtype=torch.long))

    if len(shape) == 4:

        def loss(net, batch):
            return F.cross_entropy(net(batch), torch.zeros(len(batch), dtype=torch.long))

    batch = torch.randn(shape)
    graph = record(model, loss, batch)
    predicted = activation_bytes(graph, 0, len(graph.calls)) + temporary_bytes(graph, 0, len(graph.calls))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Counter([batch, *model.buffers(), *model.parameters(), *(p.grad for p in model.parameters())]) as counter:
        loss(model, batch).backward()
    assert predicted == pytest.approx(counter.peak, rel=0.15)
