"""nki.language: dtypes, memories, operators, creation, functions on tiles, loops."""

from __future__ import annotations

from typing import Any

from ..dtypes import NUMPY
from ..errors import refuse
from ..memory import HBM as hbm
from ..memory import HBM as private_hbm
from ..memory import PSUM as psum
from ..memory import SBUF as sbuf
from ..memory import SHARED as shared_hbm
from ..memory import MemoryRegion
from ..objects import NKIObject
from ..operators import OPERATORS
from ..tensor import NkiTensor, is_hbm
from .control import (
    affine_range,
    device_print,
    dynamic_range,
    fori_loop,
    is_on_chip,
    is_psum,
    is_sbuf,
    no_reorder,
    num_programs,
    program_id,
    program_ndim,
    sequential_range,
    static_range,
    tile_size,
    while_loop,
)
from .creation import (
    broadcast_to,
    ds,
    empty_like,
    expand_dims,
    full,
    gather_flattened,
    load,
    load_transpose2d,
    matmul,
    ndarray,
    ones,
    shared_constant,
    shared_identity_matrix,
    store,
    transpose,
    zeros,
    zeros_like,
)
from .functions import ceil, cos, dropout, floor, logical_not, negative, rand, random_seed, tan, trunc, where
from .reductions import all, max, mean, min, prod, rms_norm, softmax, sum, var

DType = str

# every dtype is its name; every operator is a token for instructions and a function on tiles
globals().update({name: name for name in NUMPY})
globals().update(OPERATORS)

REMOVED = {
    "arange": "slice tensors instead",
    "mgrid": "slice tensors instead",
    "par_dim": "dimension 0 of a tile on chip is the partition",
    "spmd_dim": "launch with kernel[2]",
    "nc": "launch with kernel[2]",
    "load_transpose": "use load_transpose2d",
    "atomic_rmw": "use nki.isa.dma_compute",
}


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        refuse("removed", f"nki.language.{name}: {REMOVED[name]}")
    raise AttributeError(f"nki.language has no {name!r}, or this emulator does not emulate it")


__all__ = [
    "DType",
    "MemoryRegion",
    "NKIObject",
    "NkiTensor",
    "affine_range",
    "all",
    "broadcast_to",
    "ceil",
    "cos",
    "device_print",
    "dropout",
    "ds",
    "dynamic_range",
    "empty_like",
    "expand_dims",
    "floor",
    "fori_loop",
    "full",
    "gather_flattened",
    "hbm",
    "is_hbm",
    "is_on_chip",
    "is_psum",
    "is_sbuf",
    "load",
    "load_transpose2d",
    "logical_not",
    "matmul",
    "max",
    "mean",
    "min",
    "ndarray",
    "negative",
    "no_reorder",
    "num_programs",
    "ones",
    "private_hbm",
    "prod",
    "program_id",
    "program_ndim",
    "psum",
    "rand",
    "random_seed",
    "rms_norm",
    "sbuf",
    "sequential_range",
    "shared_constant",
    "shared_hbm",
    "shared_identity_matrix",
    "softmax",
    "static_range",
    "store",
    "sum",
    "tan",
    "tile_size",
    "transpose",
    "trunc",
    "var",
    "where",
    "while_loop",
    "zeros",
    "zeros_like",
    *NUMPY,
    *OPERATORS,
]
