"""Pseudo random numbers. The bits differ from the hardware's; state sizes and distributions follow the documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import access
from ..cost.records import elementwise
from ..dtypes import ITEMSIZE, NUMPY, is_float, is_integer
from ..errors import need
from ..memory import ON_CHIP, SBUF
from ..tensor import NkiTensor
from . import enums
from .common import Instruction, choose, meet, need_generation
from .common import NkiInstruction as Handle

STATE_WORDS = {"gpsimd": 6, "vector": 24}


def rng(dst: NkiTensor, engine: Any = enums.engine.vector, name: str | None = None) -> Handle:
    """dst = random bits, the low ones of 32."""
    chosen = choose(engine, ("vector", "gpsimd"), "vector", "rng")
    if chosen == "gpsimd":
        need_generation(3, "rng on GpSimdE")
    ins = Instruction("rng", chosen, name)
    dst = ins.out(dst)
    need(is_integer(dst.dtype) and dst.dtype != "bool_", "dtype", f"rng into {dst.dtype}, must be an integer")
    x = None
    if ins.data:
        bits = ins.core.random.integers(0, 1 << 32, (dst.partitions, dst.per_partition), np.uint32)
        x = bits.astype(f"u{ITEMSIZE[dst.dtype]}").view(NUMPY[dst.dtype])
    ins.put(dst, x, True, raw=True)
    return ins.done(elementwise(dst.per_partition, ins.engine))


def rand2(dst: NkiTensor, min: Any, max: Any, name: str | None = None) -> Handle:
    """dst = uniform float32 values in [min, max], gen4."""
    need_generation(4, "rand2")
    ins = Instruction("rand2", "vector", name)
    dst = ins.out(dst)
    need(dst.dtype not in ("float8_e4m3fn", "float8_e8m0fnu", "bool_"), "dtype", f"rand2 into {dst.dtype}")
    (low, known0), (high, known1) = ins.vector(min, dst.partitions, "min"), ins.vector(max, dst.partitions, "max")
    x = None
    if ins.data:
        need((np.asarray(low) < np.asarray(high)).all(), "argument", f"rand2: min {min} must be less than max {max}")
        x = low + ins.core.random.random((dst.partitions, dst.per_partition), np.float32) * (high - low)
    ins.put(dst, x, meet(known0, known1))
    return ins.done(elementwise(dst.per_partition, factor=0.25))


def dropout(dst: NkiTensor, data: NkiTensor, prob: Any, name: str | None = None) -> Handle:
    """dst = data with elements zeroed with probability `prob`, without rescaling."""
    ins = Instruction("dropout", "vector", name)
    dst, data = ins.out(dst), ins.tile(data, "data")
    ins.same(dst, data)
    need(dst.dtype == data.dtype, "dtype", f"dropout {data.dtype} into {dst.dtype}")
    if isinstance(prob, NkiTensor):
        legal = is_float(prob.dtype) if is_float(data.dtype) else prob.dtype == "float32"
        need(legal, "dtype", f"dropout of {data.dtype} with prob in {prob.dtype}")
    threshold, known = ins.vector(prob, dst.partitions, "prob", float32=False)
    fine, x = ins.usable(data), None
    if ins.data:
        dropped = ins.core.random.random((dst.partitions, dst.per_partition), np.float32) < threshold
        x = np.where(dropped, np.zeros((), NUMPY[dst.dtype]), ins.raw(data))
    ins.put(dst, x, meet(fine, known), raw=True)
    return ins.done(elementwise(dst.per_partition))


def _reseed(ins: Instruction, words: Any) -> None:
    if ins.data:
        ins.core.random = np.random.default_rng([int(w) for w in np.asarray(words, np.uint64).reshape(-1)])


def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> Handle:
    """Seed VectorE with one 32-bit value."""
    ins = Instruction("set_rng_seed", "vector", name)
    seeds = ins.tile(src_seeds, "src_seeds", ON_CHIP)
    need(seeds.itemsize == 4, "dtype", f"set_rng_seed with {seeds.dtype}, must have 32 bits")
    ins.fits(seeds, 1, 1, "src_seeds")
    access.check_usable(seeds, "the seed")
    _reseed(ins, ins.raw(seeds).view(np.uint32) if ins.data else None)
    return ins.done(elementwise(1))


def _state_engine(engine: Any, op: str) -> str:
    need_generation(3, op)
    chosen = choose(engine, ("gpsimd", "vector"), "gpsimd", op)
    if chosen == "vector":
        need_generation(4, f"{op} on VectorE")
    return chosen


def rand_set_state(src_seeds: NkiTensor, engine: Any = enums.engine.gpsimd, name: str | None = None) -> Handle:
    """Seed every lane of an engine with 6 (GpSimdE) or 24 (VectorE) words."""
    ins = Instruction("rand_set_state", _state_engine(engine, "rand_set_state"), name)
    seeds = ins.tile(src_seeds, "src_seeds", (SBUF,))
    need(seeds.dtype == "uint32", "dtype", f"rand_set_state with {seeds.dtype}, must be uint32")
    ins.fits(seeds, seeds.partitions, STATE_WORDS[ins.engine], "src_seeds")
    access.check_usable(seeds, "the seed")
    if ins.data:
        ins.core.random_state[ins.engine] = ins.raw(seeds).copy()
        _reseed(ins, ins.raw(seeds))
    return ins.done(elementwise(seeds.per_partition, ins.engine))


def rand_get_state(dst: NkiTensor, engine: Any = enums.engine.gpsimd, name: str | None = None) -> Handle:
    """Store the state of every lane; the emulator returns the last seeds, or random words."""
    ins = Instruction("rand_get_state", _state_engine(engine, "rand_get_state"), name)
    memories = ON_CHIP if ins.core.generation >= 4 else (SBUF,)
    dst = ins.out(dst, "dst", memories)
    need(dst.dtype == "uint32", "dtype", f"rand_get_state into {dst.dtype}, must be uint32")
    ins.fits(dst, dst.partitions, STATE_WORDS[ins.engine], "dst")
    x = None
    if ins.data:
        state = ins.core.random_state.get(ins.engine)
        if state is None or len(state) != dst.partitions:
            state = ins.core.random.integers(0, 1 << 32, (dst.partitions, dst.per_partition), np.uint32)
        x = state
    ins.put(dst, x, True, raw=True)
    return ins.done(elementwise(dst.per_partition, ins.engine))
