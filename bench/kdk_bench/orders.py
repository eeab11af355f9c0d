"""Sums, and the sums in matrix products, in another order than torch's: what a kernel may do, and so part of what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Order = Callable[[np.ndarray], np.ndarray]  # float32 (n, ...) -> its sum over n, with every addition rounded to float32


def sequential(x: np.ndarray) -> np.ndarray:
    return np.add.accumulate(x, axis=0, dtype=x.dtype)[-1]


def backwards(x: np.ndarray) -> np.ndarray:
    return sequential(x[::-1])


def from_the_middle(x: np.ndarray) -> np.ndarray:
    return sequential(np.roll(x, len(x) // 2, axis=0))


def in_lanes(x: np.ndarray, lanes: int = 64) -> np.ndarray:
    """Partial sums that walk over the rows, as the lanes of a kernel do, then their sum."""
    x = np.concatenate([x, np.zeros((-len(x) % lanes, *x.shape[1:]), x.dtype)])
    return sequential(sequential(x.reshape(-1, lanes, *x.shape[1:])))


ORDERS = (sequential, backwards, from_the_middle, in_lanes)  # as different as sums of a few kinds can be
PRODUCTS = {"linear", "matmul", "__matmul__", "mm"}
PIECE = 2**22  # terms of a product that are held at once


class Reordered(TorchFunctionMode):
    """Sums, means and matrix products of float32 tensors, their terms added in an order of one's own."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order
        self.summed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_sum = name in ("sum", "mean") and "dtype" not in kwargs
        if not (is_sum or name in PRODUCTS) or args[0].dtype != torch.float32 or not args[0].numel():
            return func(*args, **kwargs)
        self.summed += 1
        with torch._C.DisableTorchFunction(), np.errstate(all="ignore"):
            if is_sum:
                return self._sum(name, *args, **kwargs)
            return self._linear(*args, **kwargs) if name == "linear" else self._product(*args)

    def _sum(self, name: str, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = range(x.dim()) if dim is None else [d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim)]
        rest = [d for d in range(x.dim()) if d not in dims]
        moved = x.permute(*dims, *rest)
        left = moved.shape[len(dims) :]
        count = x.numel() // left.numel()
        total = self._added(moved.reshape(count, *left).numpy()).reshape(left)
        total = total / count if name == "mean" else total
        if keepdim:
            for d in sorted(dims):
                total = total.unsqueeze(d)
        return total

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self._product(x, weight.t())
        return product if bias is None else product + bias

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """(..., K) and (K, N); of other shapes as torch has it."""
        if a.dim() < 2 or b.dim() != 2 or not b.numel():
            return a @ b
        (K, N), rows = b.shape, a.reshape(-1, a.shape[-1])
        step = max(1, PIECE // max(1, K * N))
        pieces = [self._added((piece.t()[:, :, None] * b[:, None, :]).numpy()) for piece in rows.split(step)]
        return torch.cat(pieces).reshape(*a.shape[:-1], N)

    def _added(self, terms: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.order(terms)))
