"""Backward in two parts: products with a weight give their input's gradient now, and leave the weight's for later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.errors import SplitError
from headway.graph.ledger import version_of

Gradients = tuple[torch.Tensor, torch.Tensor | None]
Plain = torch.autograd.Function.__dict__["apply"]
"""`apply` as torch has it, taken before a walk replaces it: what is done here is no event of the user's program."""


@dataclass(frozen=True)
class Product:
    """One kind of product y = f(x, w) + b: the gradient of x (when asked), and those of w and b (when asked)."""

    forward: Callable[..., torch.Tensor]
    of_input: Callable[..., torch.Tensor]  # (grad, x's shape and dtype as a meta tensor, weight, options)
    of_weight: Callable[..., Gradients]  # (grad, x, weight, has bias, options)


@dataclass
class Later:
    """The weight gradients of one backward that wait, each with what it is made from."""

    task: int | None = None  # autograd's number of this backward; others that run inside it keep to themselves
    left: list[tuple[Product, torch.Tensor, torch.Tensor, int, nn.Parameter, nn.Parameter | None, Any]] = field(
        default_factory=list
    )

    def finish(self) -> None:
        """Make the gradients and add them to `.grad`, each weight once; what they needed is freed one by one."""
        waiting: dict[int, list[Any]] = {}
        while self.left:
            waiting.setdefault(id(self.left[0][4]), []).append(self.left.pop(0))
        biases: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        for entries in waiting.values():
            weight, total = entries[0][4], None
            while entries:
                gradient, of_bias = self._make(*entries[0])
                total = gradient if total is None else total.add_(gradient)
                bias = entries.pop(0)[5]
                if bias is not None and of_bias is not None:
                    before = biases.get(id(bias))
                    biases[id(bias)] = (bias, of_bias if before is None else before[1].add_(of_bias))
            if total is not None:
                _accumulate(weight, total)
        for bias, total in biases.values():
            _accumulate(bias, total)

    @staticmethod
    def _make(
        product: Product, grad: torch.Tensor, x: torch.Tensor, version: int, weight: nn.Parameter,
        bias: nn.Parameter | None, options: Any,
    ) -> Gradients:  # fmt: skip
        if version_of(x) != version:
            raise SplitError(
                f"a tensor of shape {list(x.shape)} was changed in place after the backward that used it, and before "
                "the weight gradient that needs it was made",
                remedy='fixed={"schedule": "one_f_one_b"}, which makes both at once, or change a copy of it',
            )
        with torch.no_grad():
            return product.of_weight(grad, x, weight, bias is not None, options)


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Do what autograd does with a gradient that nobody else has; to start autograd for it takes 30 us.

    The hooks on the parameter are Headway's own, see `_is_hooked`.
    """
    if gradient.stride() != parameter.stride() or gradient.dtype != parameter.dtype:
        torch.autograd.backward(parameter, gradient)
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad.add_(gradient)
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


class Apart(TorchFunctionMode):
    """Lets products with a weight run so that their backward can be split; `later` says whether it is just now.

    A product is left as it is where its gradients could be asked for in another way (under autocast, in a checkpointed
    region, in a tensor subclass, in compiled code, under vmap, by a hook on the weight): its backward is then whole,
    and done before I ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.later: Later | None = None

    @contextmanager
    def collect(self, roots: Sequence[torch.Tensor]) -> Iterator[Later]:
        """Leave the weight gradients of one backward from these roots for later."""
        self.later = later = Later()

        def begun(grad: torch.Tensor) -> None:
            later.task = torch._C._current_graph_task_id()

        hooks = [root.register_hook(begun) for root in roots]
        try:
            yield later
        finally:
            self.later = None
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Route one torch call (torch's protocol for modes)."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # first: a compiler that follows this code cannot look functions up
            return func(*args, **kwargs)
        read = READ.get(func)
        if read is None or not torch.is_grad_enabled() or _is_watched():
            return func(*args, **kwargs)
        found = read(*args, **kwargs)
        if found is None:
            return func(*args, **kwargs)
        product, x, weight, bias, options = found
        if not (
            type(weight) is nn.Parameter
            and weight.requires_grad
            and not weight.is_meta
            and type(x) in (torch.Tensor, nn.Parameter)
            and (bias is None or type(bias) is nn.Parameter)
            and not torch.is_autocast_enabled(weight.device.type)
            and not _is_hooked(weight)
            and (bias is None or not _is_hooked(bias))
        ):
            return func(*args, **kwargs)
        return _Split.apply(self, product, x, weight, bias, options)


class _Split(torch.autograd.Function):
    """A product whose backward leaves the weight's gradient to the `Later` of its mode, if there is one just now."""

    apply = Plain

    @staticmethod
    def forward(
        ctx: Any, mode: Apart, product: Product, x: torch.Tensor, weight: torch.Tensor, bias: Any, options: Any
    ) -> torch.Tensor:
        ctx.mode, ctx.product, ctx.options, ctx.bias, ctx.weight = mode, product, options, bias, weight
        ctx.save_for_backward(x, weight)
        # A product of 3 dims is a view of one of 2, and a view that a Function gives may not be changed in place; with
        # .data it is none.
        return product.forward(x, weight, bias, options).data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        _, _, wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_x = ctx.product.of_input(grad, x, weight, ctx.options) if wants_x else None
        later = ctx.mode.later
        bias = ctx.bias if wants_bias else None
        if later is not None and later.task == torch._C._current_graph_task_id() and not torch.is_grad_enabled():
            later.left.append((ctx.product, grad, x, version_of(x), ctx.weight, bias, ctx.options))
            return None, None, of_x, None, None, None
        of_weight, of_bias = ctx.product.of_weight(grad, x, weight, bias is not None, ctx.options)
        return None, None, of_x, of_weight if wants_weight else None, of_bias, None


def _is_watched() -> bool:
    """Say whether somebody else handles what is saved for backward (a checkpointed region), or the tensors (vmap)."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Say whether the user has hooks on a parameter: autograd calls them in I, with no gradient yet."""
    after = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks) or (
        bool(after) and not all(str(hook.__module__).startswith("headway.") for hook in after.values())
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


LINEAR = Product(  # y[..., out] = x[..., in] @ w[out, in]^T + b[out]
    forward=lambda x, w, b, _: F.linear(x, w, b),
    of_input=lambda g, x, w, _: torch.matmul(g, w).reshape(x.shape),
    of_weight=lambda g, x, w, biased, _: (_rows(g).t() @ _rows(x), _rows(g).sum(0) if biased else None),
)

MATMUL = Product(  # y[..., out] = x[..., in] @ w[in, out]
    forward=lambda x, w, b, _: torch.matmul(x, w),
    of_input=lambda g, x, w, _: torch.matmul(g, w.t()).reshape(x.shape),
    of_weight=lambda g, x, w, biased, _: (_rows(x).t() @ _rows(g), None),
)

ADDMM = Product(  # y[n, out] = b[out] + x[n, in] @ w[in, out]
    forward=lambda x, w, b, _: torch.addmm(b, x, w),
    of_input=lambda g, x, w, _: g @ w.t(),
    of_weight=lambda g, x, w, biased, _: (x.t() @ g, g.sum(0) if biased else None),
)

EMBEDDING = Product(  # y[..., width] = w[x[...]]; options = (padding index, divide by frequency)
    forward=lambda x, w, b, o: F.embedding(x, w, o[0], scale_grad_by_freq=o[1]),
    of_input=lambda g, x, w, o: torch.zeros_like(x),
    of_weight=lambda g, x, w, biased, o: (
        torch.ops.aten.embedding_dense_backward(g, x, w.shape[0], -1 if o[0] is None else o[0], o[1]),
        None,
    ),
)


def _convolved(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, biased: bool, options: Any, first: bool) -> Any:
    stride, padding, dilation, groups = options
    zeros = [0] * len(stride)
    return torch.ops.aten.convolution_backward(
        g, x, w, [w.shape[0]], stride, padding, dilation, False, zeros, groups, [first, not first, biased and not first]
    )


CONVOLUTION = Product(  # options = (stride, padding, dilation, groups)
    forward=lambda x, w, b, o: torch.convolution(x, w, b, o[0], o[1], o[2], False, [0] * len(o[0]), o[3]),
    of_input=lambda g, x, w, o: _convolved(g, x, w, False, o, True)[0],
    of_weight=lambda g, x, w, biased, o: tuple(_convolved(g, x, w, biased, o, False)[1:]),
)

# How each function's arguments are read: (product, x, weight, bias, options), or None for what is left as it is.
Reading = tuple[Product, torch.Tensor, Any, Any, Any] | None


def _read_linear(input: Any, weight: Any, bias: Any = None) -> Reading:
    return LINEAR, input, weight, bias, None


def _read_matmul(input: Any, other: Any = None, *, mat2: Any = None, out: Any = None, **rest: Any) -> Reading:
    other = mat2 if other is None else other
    if out is not None or rest or not isinstance(input, torch.Tensor) or input.dim() < 2 or other.dim() != 2:
        return None
    return MATMUL, input, other, None, None


def _read_addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Reading:
    if out is not None or beta != 1 or alpha != 1 or input.dim() != 1 or input.shape[0] != mat2.shape[1]:
        return None
    return ADDMM, mat1, mat2, input, None


def _read_embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Reading:  # fmt: skip
    if max_norm is not None or sparse:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return EMBEDDING, input, weight, None, (padding_idx, scale_grad_by_freq)


def _reader(dims: int) -> Callable[..., Reading]:
    def each(value: Any) -> list[int]:
        numbers = [value] if isinstance(value, int) else list(value)
        return numbers * dims if len(numbers) == 1 else numbers

    def read(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Reading:
        if isinstance(padding, str) or input.dim() != dims + 2:
            return None
        return CONVOLUTION, input, weight, bias, (each(stride), each(padding), each(dilation), groups)

    return read


READ: Mapping[Any, Callable[..., Reading]] = MappingProxyType(
    {
        F.linear: _read_linear,
        F.embedding: _read_embedding,
        torch.addmm: _read_addmm,
        torch.Tensor.addmm: _read_addmm,
        **dict.fromkeys(
            (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm), _read_matmul
        ),
        **{function: _reader(dims) for dims, function in ((1, F.conv1d), (2, F.conv2d), (3, F.conv3d))},
    }
)
