"""Logits that are not made: what a patched language model has in their place while it is trained.

A model's own forward runs as it is written, but its head returns `Logits`. What a forward does on the way to its loss (a cast, a
scale, a softcap, a view) is noted; `F.cross_entropy` of it is kdk.ops.linear_cross_entropy. Anything else makes the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdk.ops
from kdk.errors import UsageError


class Product(NamedTuple):
    """A head's input, weight and bias, in the dtype that the logits have, and the versions that their values are of."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    sources: tuple[tuple[Tensor, int], ...]


@dataclass(frozen=True, eq=False)
class Logits:
    """(..., V): x weight^T + bias, then `steps`, as a tensor that is computed when it is used.

    shape, dtype, device and ndim are known; every other attribute, operator or function of torch computes the tensor, once, with
    its gradients. Raises UsageError where x or the weights were changed in the meantime (an optimizer's step).
    """

    product: Product
    dtype: torch.dtype
    shape: torch.Size
    steps: tuple[tuple[str, Any], ...] = ()
    made: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, x: Tensor, head: nn.Linear) -> Logits:
        """What `head(x)` would return."""
        kind, parameters = x.device.type, [t for t in (x, head.weight, head.bias) if t is not None]
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if cast else x.dtype
        sources = tuple((t, _version(t)) for t in parameters)
        bias = None if head.bias is None else head.bias.to(dtype)
        product = Product(x.to(dtype), head.weight.to(dtype), bias, sources)
        return cls(product, dtype, torch.Size((*x.shape[:-1], head.weight.shape[0])))

    @property
    def device(self) -> torch.device:
        return self.product.x.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def tensor(self) -> Tensor:
        """The logits."""
        if not self.made:
            if any(_version(t) != version for t, version in self.product.sources):
                problem = "the logits of a patched model in training are computed when they are used"
                limit = "before the weights or the hidden states are changed"
                raise UsageError("LCE-LOGITS", problem, value="changed since", limit=limit, way_out="use them before optimizer.step()")
            z = F.linear(self.product.x, self.product.weight, self.product.bias)
            for name, argument in self.steps:
                z = STEPS[name](z, argument)
            self.made.append(z)
        return self.made[0]

    def _then(self, name: str, argument: Any, **changes: Any) -> Logits:
        return replace(self, steps=(*self.steps, (name, argument)), made=[], **changes)

    # ---- what leads to a loss
    def float(self) -> Logits:
        return self._then("to", torch.float32, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and (args[0] == self.device or isinstance(args[0], torch.dtype)):
            return self if args[0] == self.device else self._then("to", args[0], dtype=args[0])
        return self.tensor().to(*args, **kwargs)

    def contiguous(self) -> Logits:
        return self

    def view(self, *shape: Any) -> Any:
        if tuple(shape) == (-1, self.shape[-1]):
            return self._then("view", shape, shape=torch.Size((self.shape[:-1].numel(), self.shape[-1])))
        return self.tensor().view(*shape)

    reshape = view

    def __mul__(self, other: Any) -> Any:
        return self._then("mul", other) if isinstance(other, (int, float)) else self.tensor() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then("div", other) if isinstance(other, (int, float)) else self.tensor() / other

    def tanh(self) -> Logits:
        return self._then("tanh", None)

    # ---- everything else is the tensor's
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols (copy, pickle): what is not defined here is not there
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tanh and not kwargs:
            return args[0].tanh()
        if function is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        args, kwargs = torch.utils._pytree.tree_map(lambda a: a.tensor() if isinstance(a, Logits) else a, (args, kwargs))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, computed when they are used)"


def _version(t: Tensor) -> int:
    """Rises with every change in place; an inference tensor, which nothing trains, has none."""
    return 0 if t.is_inference() else t._version


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Logits, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*[a.tensor() if isinstance(a, Logits) else a for a in args])

    return call


OPERATORS = (
    "add", "radd", "sub", "rsub", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "floordiv", "mod", "neg", "abs", "eq", "ne", "lt", "le",
    "gt", "ge", "getitem", "setitem", "len", "iter", "bool", "float", "int", "contains", "array",
)  # fmt: skip
for _name in OPERATORS:
    setattr(Logits, f"__{_name}__", _operator(f"__{_name}__"))

STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "to": lambda z, dtype: z.to(dtype),
    "view": lambda z, shape: z.reshape(shape),
    "mul": lambda z, factor: z * factor,
    "div": lambda z, divisor: z / divisor,
    "tanh": lambda z, _: z.tanh(),
}


def _scale_and_softcap(steps: tuple[tuple[str, Any], ...]) -> tuple[float, float | None] | None:
    """(s, c) with which the steps are c * tanh(s * z / c), or s * z without a c; None where they are something else."""
    over, under, cap, capped = 1.0, 1.0, 1.0, False
    for name, argument in steps:
        if name == "tanh":
            if capped:
                return None
            capped = True
        elif name in ("mul", "div") and capped:
            cap = cap * argument if name == "mul" else cap / argument
        elif name == "mul":
            over *= argument
        elif name == "div":
            under *= argument
    if not capped:
        return over / under, None
    return (over * cap / under, cap) if cap > 0 else None


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """F.cross_entropy of logits that are not made; None where it is not what linear_cross_entropy computes: classes that weigh
    differently, targets that are probabilities, another layout than (rows, classes), logits that somebody has made already."""
    found = _scale_and_softcap(input.steps) if isinstance(input, Logits) else None
    plain = weight is None and size_average is None and reduce is None and isinstance(target, Tensor)
    if found is None or not plain or input.ndim != 2 or target.shape != input.shape[:1] or target.dtype.is_floating_point:
        return None
    (scale, softcap), product = found, input.product
    x, bias = product.x.reshape(-1, product.x.shape[-1]), product.bias
    if scale != 1.0:
        x, bias = x * scale, None if bias is None else bias * scale
    loss = kdk.ops.linear_cross_entropy(
        x, product.weight, target, bias,
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, reduction=reduction,
    )  # fmt: skip
    return loss.to(input.dtype)


class Deferring:
    """Stands for a head: called, it returns `Logits`; all else is the head's."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    def __call__(self, x: Tensor) -> Logits:
        return Logits.of(x, self.head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)


@functools.cache
def _class(cls: Any, head: str) -> Any:
    """A class of a model whose head defers."""

    def deferring(self: Any) -> Deferring:
        return Deferring(self._modules[head])

    return type(cls.__name__, (cls,), {head: property(deferring), "__module__": cls.__module__})


def with_deferred_head(model: nn.Module, head: str) -> Any:
    """The same model, sharing its whole state, whose head returns `Logits`. Nothing of the model itself changes, so other threads
    may run it meanwhile."""
    own: Any = type(model)
    cls = _class(own, head)
    seen: Any = object.__new__(cls)  # not through a __new__ of FSDP, which counts its place among the classes
    object.__setattr__(seen, "__dict__", model.__dict__)
    return seen
