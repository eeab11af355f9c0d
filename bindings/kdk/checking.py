"""What every operator asks of its arguments, from the declaration: one device, one dtype that it has. Then its own check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdk.errors import InputError
from kdk.indices import INTEGERS
from kdk.op import Op


class Row(NamedTuple):
    """A tensor argument. other: a dtype that it may have beside the working one. points: integers, whatever the working dtype.

    optional: None stands for it where it is left out.
    """

    place: int
    name: str
    other: torch.dtype | None
    points: bool
    optional: bool


def tensor_rows(op: Op) -> tuple[Row, ...]:
    """The tensor arguments; the first is the one whose dtype is the working dtype."""
    names = list(op.arguments)
    rows = []
    for name in op.tensors:
        other = getattr(torch, op.mixed[name]) if name in op.mixed else None
        rows.append(Row(names.index(name), name, other, name in op.indexes, name in op.optional))
    return tuple(sorted(rows, key=lambda row: (row.points, row.other is not None)))


def checking(op: Op) -> Callable[..., None]:
    """The function that checks a call's arguments; raises InputError. Traced by dynamo: plain loops only."""
    check, rows = op.check, tensor_rows(op)
    working = tuple([getattr(torch, name) for name in (*op.dtypes, "float64")])

    def run(*args: Any, **kwargs: Any) -> None:
        first, dtype = "", None
        for place, name, other, points, optional in rows:
            t = args[place] if place < len(args) else kwargs.get(name)
            if t is None and optional:
                continue
            if not isinstance(t, Tensor):
                raise no_tensor(op, name, t)
            if not first:
                first, device = name, t.device
            elif t.device != device:
                raise _wrong_device(op, name, t, first, device)
            if points:
                if t.dtype not in INTEGERS:
                    raise _no_integers(op, name, t)
                continue
            if dtype is None:
                if t.dtype not in working:
                    raise _unknown_dtype(op, name, t, working)
                dtype, whose = t.dtype, name
            elif t.dtype != dtype and t.dtype != other:
                raise _other_dtype(op, name, t, f"{whose} has {dtype}", other)
        check(*args, **kwargs)

    return run


def no_tensor(op: Op, name: str, value: Any) -> InputError:
    words = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in op.signature.parameters.values()]
    way_out = f"kdk.ops.{op.name}({', '.join(words)})"
    value = "None" if value is None else str(type(value))  # its repr may be long, and dynamo has none of most
    return InputError("KDK-TYPE", f"{op.name}: {name} is no tensor", value=value, limit="a torch.Tensor", way_out=way_out)


def _wrong_device(op: Op, name: str, t: Tensor, first: str, device: torch.device) -> InputError:
    problem, limit = f"{op.name}: {name} is on another device", f"{first} is on {device}"
    return InputError("KDK-DEVICE", problem, value=t.device, limit=limit, way_out=f"{name}.to('{device}')")


def _no_integers(op: Op, name: str, t: Tensor) -> InputError:
    limit, way_out = "it points into another tensor: int64 or int32", f"{name}.long()"
    return InputError("KDK-DTYPE", f"{op.name}: the dtype of {name}", value=t.dtype, limit=limit, way_out=way_out)


def _unknown_dtype(op: Op, name: str, t: Tensor, working: tuple[torch.dtype, ...]) -> InputError:
    there = ", ".join([str(dtype).removeprefix("torch.") for dtype in working])
    way_out = f"convert {name} to one of these first"
    return InputError("KDK-DTYPE", f"{op.name}: the dtype of {name}", value=t.dtype, limit=f"there are {there}", way_out=way_out)


def _other_dtype(op: Op, name: str, t: Tensor, usual: str, other: torch.dtype | None) -> InputError:
    limit = f"{usual}; {name} has the same" + (f" or {other}" if other else "")
    way_out = f"convert {name} to it first"
    return InputError("KDK-DTYPE", f"{op.name}: {name} has another dtype", value=t.dtype, limit=limit, way_out=way_out)
