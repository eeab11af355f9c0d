"""What the compiler's estimate does not see of a Pallas kernel, from the program that jax traced: blocks that are fetched again, and
shapes of control flow that the estimate is known to get wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_STEPS = 1 << 20  # of a grid that is gone through


@dataclass(frozen=True)
class Unseen:
    """reread_bytes: of HBM beyond each operand once. caveats: of the cycles, in words."""

    reread_bytes: int
    caveats: tuple[str, ...]


def unseen(jaxpr: Any) -> Unseen:
    """Of all kernels in a traced program (the jaxpr of `kdk.backends.pallas.compile.traced`)."""
    total, caveats = 0, []
    for eqn in _equations(jaxpr):
        if eqn.primitive.name == "pallas_call":
            more, said = _rereads(eqn.params["grid_mapping"])
            total += more
            caveats += said + _control_flow(eqn.params["jaxpr"])
    return Unseen(total, tuple(dict.fromkeys(caveats)))


def _inner(eqn: Any) -> Iterator[Any]:
    """The programs inside an equation: of loops, branches, calls."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in _inner(eqn):
                yield from _equations(inner)


# ---- blocks ------------------------------------------------------------------------------------------------------------


def _rereads(mapping: Any) -> tuple[int, list[str]]:
    """Bytes beyond each array once: a block is moved whenever its index differs from that of the step before."""
    steps = math.prod(mapping.grid) if all(isinstance(n, int) for n in mapping.grid) else None
    if steps is None or steps > MOST_STEPS:
        return 0, [f"a grid of {'unknown size' if steps is None else f'{steps} steps'}: every operand is counted once"]
    total, caveats = 0, []
    for block in mapping.block_mappings:
        moved = _moved(block, mapping.grid, steps)
        if isinstance(moved, str):
            caveats.append(moved)
        else:
            total += max(0, moved - block.array_aval.size * block.array_aval.dtype.itemsize)
    return total, caveats


def _moved(block: Any, grid: tuple[int, ...], steps: int) -> int | str:
    """Bytes that all steps together move of one array; or why that is not known."""
    space = str(getattr(block.transformed_block_aval, "memory_space", ""))
    if any(name in space for name in ("any", "hbm")):
        return f"{block.origin}: moved by the kernel itself, counted once"
    index_map = block.index_map_jaxpr
    if any(eqn.primitive.name == "get" for eqn in index_map.jaxpr.eqns):
        return f"{block.origin}: its blocks are chosen by prefetched scalars, counted once"
    sizes = [_size(d) for d in block.block_shape]
    if None in sizes:
        return f"{block.origin}: blocks that are not whole multiples, counted once"
    indices = _indices(index_map, grid, steps)
    changed = np.concatenate([[True], (indices[1:] != indices[:-1]).any(axis=1)]) if indices.shape[1] else np.arange(steps) == 0
    shape = np.array(block.array_aval.shape)
    size = np.array(sizes, dtype=np.int64)
    inside = np.clip(shape - indices[changed] * size, 0, size)
    return int(inside.prod(axis=1).sum()) * block.array_aval.dtype.itemsize


def _size(dim: Any) -> int | None:
    """Of a block along one dimension; 1 for a squeezed one; None for those that are addressed by element."""
    if isinstance(dim, int):
        return dim
    name = type(dim).__name__
    return int(dim.block_size) if name == "Blocked" else 1 if name == "Squeezed" else None


def _indices(index_map: Any, grid: tuple[int, ...], steps: int) -> Any:
    """(steps, dimensions): the block of every step, the last grid dimension innermost."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    rank = len(index_map.jaxpr.outvars)
    points = np.stack(np.unravel_index(np.arange(steps), grid), axis=-1).astype(np.int32) if grid else np.zeros((1, 0), np.int32)
    function = jaxpr_as_fun(index_map)
    with jax.default_device(jax.devices("cpu")[0]):
        # Prefetched scalars that the map does not read are arguments of it all the same.
        unused = [np.zeros(v.aval.shape, np.int32) for v in index_map.jaxpr.invars[len(grid) :]]
        found = jax.vmap(lambda point: [jax.numpy.asarray(v) for v in function(*point, *unused)])(points)
    return np.stack([np.asarray(f, dtype=np.int64) for f in found], axis=-1) if rank else np.zeros((steps, 0), np.int64)


# ---- control flow ------------------------------------------------------------------------------------------------------


def _control_flow(kernel: Any) -> list[str]:
    """What the estimate gets wrong: a loop in a loop (outer trips count at most twice), a while (once), a branch on data."""
    return list(dict.fromkeys(_walk(kernel, 0, set())))


def _walk(jaxpr: Any, loops: int, data: set[Any]) -> Iterator[str]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    data = set(data)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("get", "load", "masked_load", "dma_wait") or any(_hashable(v) in data for v in eqn.invars):
            data.update(map(_hashable, eqn.outvars))
        deeper = loops
        if name == "while":
            yield "a while loop in the kernel: its body counts once"
            deeper += 1
        elif name == "scan" and not _unrolled(eqn):
            deeper += 1
        elif name == "cond" and _hashable(eqn.invars[0]) in data:
            yield "a branch on data in the kernel: counted too low"
        if deeper > 1 and deeper > loops:
            yield "a loop in a loop in the kernel: the outer one counts at most twice"
        for inner in _inner(eqn):
            yield from _walk(inner, deeper, data | _passed(eqn, inner, data))


def _hashable(v: Any) -> int:
    return id(v)


def _unrolled(eqn: Any) -> bool:
    length, unroll = eqn.params.get("length", 0), eqn.params.get("unroll")
    return length <= 1 or unroll is True or unroll == length


def _passed(eqn: Any, inner: Any, data: set[Any]) -> set[Any]:
    """Variables of an inner program that are given data: its inputs are the last operands of the equation."""
    inner = getattr(inner, "jaxpr", inner)
    pairs = zip(reversed(eqn.invars), reversed(inner.invars))
    return {_hashable(v) for given, v in pairs if _hashable(given) in data}
