"""Bytes and floating-point operations of a call, and the bytes alive at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from kdk_bench.audit.trace import Meta

# Return their argument's storage, though their schemas do not say so.
VIEWS = ("aten::_unsafe_view", "aten::detach", "aten::_reshape_alias", "aten::lift_fresh", "aten::alias")


def meta(tensor: torch.Tensor) -> Meta:
    """The dtype, shape and layout of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:  # rows of several lengths: no one shape
        return Meta(dtype, (tensor.numel(),), "nested")
    shape = tuple(int(n) for n in tensor.shape)
    if tensor.layout != torch.strided:
        return Meta(dtype, shape, str(tensor.layout).removeprefix("torch."))
    if tensor.is_contiguous():
        return Meta(dtype, shape, "contiguous")
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return Meta(dtype, shape, "channels_last" if last else "strided")


def is_view(func: Any) -> bool:
    """No data moves: an output is another look at an input."""
    return func._schema.name in VIEWS or bool(func.is_view)


def moved(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct tensors, by what they hold and not by the storage behind a view of it."""
    distinct = {id(t): t for t in tensors}
    return sum(t.numel() * t.element_size() for t in distinct.values())


def flops(func: Any, args: Any, kwargs: Any, out: Any, outputs: list[torch.Tensor]) -> int:
    """Multiplications and additions of a product by torch's own formulas; an operation per element elsewhere."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=out))
        except (TypeError, ValueError, AssertionError):
            pass  # a formula of another version of torch: counted by elements
    return sum(t.numel() for t in outputs)


class Live:
    """Bytes of the storages that are alive, swept at intervals, since storages die without saying so."""

    EVERY = 16

    def __init__(self, already: Iterable[torch.Tensor] = ()) -> None:
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.calls = 0
        self.without: set[int] = set()
        for tensor in already:
            if has_storage(tensor):
                self.without.add(tensor.untyped_storage()._cdata)

    def add(self, outputs: Iterable[torch.Tensor]) -> None:
        for tensor in outputs:
            if has_storage(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.without:
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.calls += 1
        if self.calls % self.EVERY == 0:
            self.sweep()

    def sweep(self) -> None:
        self.storages = {key: (ref, size) for key, (ref, size) in self.storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))


def has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided
