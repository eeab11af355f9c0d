"""Which argument a pointer came from, and whether its offset wrapped around: carried from handle to handle for the
sanitizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdk.errors import SimulationError

from .formats import Array

_Builder: Any = object  # the class is mixed into Triton's InterpreterBuilder


class Tracking(_Builder):
    """The builder's methods that make pointers of pointers, offsets of offsets, and those that touch memory."""

    sanitizer: Any

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        result = super().create_addptr(ptr, offset)
        _carry(result, ptr, lambda a: np.broadcast_to(a, result.data.shape))
        if "wrapped" in offset.attr:
            wrapped = np.broadcast_to(offset.attr["wrapped"], result.data.shape)
            result.attr["wrapped"] = wrapped | result.attr.get("wrapped", False)
        return result

    def create_splat(self, kind: Any, arg: Any) -> Any:
        result = super().create_splat(kind, arg)
        return _carry(result, arg, lambda a: np.broadcast_to(a, result.data.shape))

    def create_unsplat(self, arg: Any) -> Any:
        return _carry(super().create_unsplat(arg), arg, lambda a: a.reshape(-1)[:1])

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        return _carry(super().create_broadcast(arg, shape), arg, lambda a: np.broadcast_to(a, shape))

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        return _carry(super().create_expand_dims(arg, axis), arg, lambda a: np.expand_dims(a, axis))

    def create_reshape(self, arg: Any, shape: Any, allow_reorder: bool) -> Any:
        return _carry(super().create_reshape(arg, shape, allow_reorder), arg, lambda a: a.reshape(shape))

    def create_trans(self, arg: Any, order: Any) -> Any:
        return _carry(super().create_trans(arg, order), arg, lambda a: np.transpose(a, order))

    def create_bitcast(self, src: Any, kind: Any) -> Any:
        return _carry(super().create_bitcast(src, kind), src, lambda a: a)

    def create_int_cast(self, src: Any, kind: Any, is_signed: bool) -> Any:
        return _carry(super().create_int_cast(src, kind, is_signed), src, lambda a: a)

    def create_add(self, lhs: Any, rhs: Any) -> Any:
        return self._watched(super().create_add(lhs, rhs), lhs, rhs, np.add)

    def create_sub(self, lhs: Any, rhs: Any) -> Any:
        return self._watched(super().create_sub(lhs, rhs), lhs, rhs, np.subtract)

    def create_mul(self, lhs: Any, rhs: Any) -> Any:
        return self._watched(super().create_mul(lhs, rhs), lhs, rhs, np.multiply)

    def _watched(self, result: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        """Mark the lanes of a 32-bit signed result that wrapped. Harmless in a hash or a dead lane; a fault where an
        access uses them."""
        if self.sanitizer is None:
            return result
        wrapped = None
        if result.data.dtype == np.int32:
            lost = op(lhs.data, rhs.data, dtype=np.int64, casting="unsafe") != result.data
            wrapped = lost if lost.any() else None
        for source in (lhs, rhs):
            if "wrapped" in source.attr:
                known = np.broadcast_to(source.attr["wrapped"], result.data.shape)
                wrapped = known if wrapped is None else wrapped | known
        if wrapped is not None:
            result.attr["wrapped"] = wrapped
        return result

    def create_make_tensor_descriptor(self, base: Any, *rest: Any) -> Any:
        made = super().create_make_tensor_descriptor(base, *rest)
        plain = made.materialize_pointers

        def materialize_pointers(offsets: Any) -> Any:
            pointers, masks = plain(offsets)
            return _carry(pointers, base, lambda a: np.broadcast_to(a, pointers.data.shape)), masks

        made.materialize_pointers = materialize_pointers
        return made

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *policy: Any, **named: Any) -> Any:
        if self.sanitizer is not None:
            active = lanes(mask, ptrs.data.shape)
            self.sanitizer.load(ptrs, active)
            if other is None and not active.all():
                other = self.sanitizer.undefined(ptrs)
        return super().create_masked_load(ptrs, mask, other, *policy, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *policy: Any, **named: Any) -> Any:
        if self.sanitizer is not None:
            self.sanitizer.store(ptrs, lanes(mask, ptrs.data.shape))
        return super().create_masked_store(ptrs, value, mask, *policy, **named)

    def create_atomic_rmw(self, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if self.sanitizer is not None:
            self.sanitizer.atomic(ptr, lanes(mask, ptr.data.shape), sem)
        return super().create_atomic_rmw(operation, ptr, val, mask, sem, scope)

    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if self.sanitizer is not None:
            self.sanitizer.atomic(ptr, lanes(mask, ptr.data.shape), sem)
        return super().create_masked_load(ptr, mask, None)

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if self.sanitizer is not None:
            self.sanitizer.atomic(ptr, lanes(mask, ptr.data.shape), sem)
        return super().create_masked_store(ptr, val, mask)

    def create_atomic_poll(self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
        """Programs run one after the other, so waiting changes nothing: ask once, and fail where it would be for ever."""
        everywhere = np.ones(ptr.data.shape, np.bool_)
        found = self.create_atomic_load(ptr, everywhere, sem, scope).data == expected.data
        if not found.all() and not hasattr(timeout_ns, "data"):
            raise SimulationError(
                "KDK-TRITON-DEADLOCK",
                "tl.atomic_poll waits for what no earlier program did",
                limit="the simulator runs programs in the order of their ids",
            )
        return type(ptr)(found, expected.dtype)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        if self.sanitizer is not None:
            self.sanitizer.atomic(ptr, np.ones(ptr.data.shape, np.bool_), sem)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)


def _carry(result: Any, source: Any, reshape: Any) -> Any:
    if source.attr:
        if "argument" in source.attr:
            result.attr["argument"] = source.attr["argument"]
        if "wrapped" in source.attr:
            result.attr["wrapped"] = reshape(source.attr["wrapped"])
    return result


def lanes(mask: Any, shape: tuple[int, ...]) -> Array:
    data = mask if isinstance(mask, np.ndarray) else mask.data
    return data if data.shape == shape else np.broadcast_to(data, shape)
