"""nki.isa: one function per instruction. Each checks its operands, computes in float32 and rounds once."""

from __future__ import annotations

from typing import Any

from ..errors import NkiValidationError, refuse
from ..objects import VirtualRegister
from .activations import activate2, activation, activation_reduce
from .common import NkiInstruction
from .cores import core_barrier, sendrecv
from .dma import dma_compute, dma_copy, dma_transpose
from .elementwise import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from .enums import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .gpsimd import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    sequence_bounds,
    tensor_partition_reduce,
    topk,
)
from .mx import nc_matmul_mx, quantize_mx
from .random import dropout, rand2, rand_get_state, rand_set_state, rng, set_rng_seed
from .reductions import (
    bn_aggr,
    bn_stats,
    exponential,
    range_select,
    select_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from .registers import get_nc_sub_version, get_nc_version, register_alloc, register_load, register_move, register_store
from .search import max8, nc_find_index8, nc_match_replace8, nc_stream_shuffle
from .tensor_engine import nc_matmul, nc_transpose

# deprecated aliases of the members of `engine`
tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]

REMOVED = {
    "tensor_copy_dynamic_src": "use tensor_copy with src.ap(scalar_offset=)",
    "tensor_copy_dynamic_dst": "use tensor_copy with dst.ap(scalar_offset=)",
}


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        refuse("removed", f"nki.isa.{name}: {REMOVED[name]}")
    raise AttributeError(f"nki.isa has no {name!r}, or this emulator does not emulate it")
