"""What a compiled kernel uses of a GPU, read from the machine code, and what it uses too much of."""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from typing import Any

from .chips import CHIPS, MOST_REGISTERS, REGISTER_UNIT, SHARED_OF_BLOCK, SHARED_UNIT, SIMDS, TENSOR_MEMORY, Chip

_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)")
_AMD = re.compile(r"^\t([vsdb][a-z]*_\w+|(?:global|buffer|flat|ds|scratch)_\w+)", re.MULTILINE)
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_AMD_BITS = {"ubyte": 8, "sbyte": 8, "u8": 8, "i8": 8, "ushort": 16, "sshort": 16, "short": 16, "u16": 16, "i16": 16}
_AMD_BITS |= {"dword": 32, "b32": 32, "dwordx2": 64, "b64": 64, "dwordx3": 96, "b96": 96, "dwordx4": 128, "b128": 128}


def resources(kernel: Any, target: str, grid: tuple[int, int, int]) -> dict[str, Any]:
    """Of one launch. kernel: what Triton compiled. Bits of the widest load from global memory; spills: instructions that move
    registers to or from memory (NVIDIA) or registers moved there (AMD), per thread; occupancy: share of the warps that a processor
    can hold, and what limits it."""
    metadata = kernel.metadata
    chip = CHIPS[target]
    found: dict[str, Any] = {"kernel": metadata.name, "grid": list(grid), "warps": metadata.num_warps, "stages": metadata.num_stages}
    found |= _nvidia(kernel.asm["cubin"]) if target.startswith("sm_") else _amd(kernel.asm["amdgcn"])
    found |= {"shared_bytes": metadata.shared, "shared_limit": chip.shared}
    found |= _occupancy(found, chip)
    if getattr(metadata, "tmem_size", None):
        found["tensor_memory_columns"] = metadata.tmem_size
    return found


def _nvidia(cubin: bytes) -> dict[str, Any]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        code = _run(knobs.nvidia.nvdisasm.path, "-c", file.name)
    instructions = collections.Counter(_SASS.findall(code))
    by_name: collections.Counter[str] = collections.Counter()
    for instruction, count in instructions.items():
        by_name[instruction.partition(".")[0]] += count
    loads = [_bits(i) for i in instructions if i.partition(".")[0] in ("LDG", "LDGSTS")]
    bulk = any(name in by_name for name in ("UTMALDG", "UBLKCP"))
    return {
        "registers": _number(r"REG:(\d+)", usage),
        "spills": by_name["STL"] + by_name["LDL"],
        "widest_load_bits": max(loads, default=0),
        "bulk_loads": bulk,
        "tensor_core_instructions": sum(count for name, count in by_name.items() if name.endswith("MMA")),
    }


def _bits(instruction: str) -> int:
    return next((_BITS[part] for part in instruction.split(".") if part in _BITS), 32)


def _amd(code: str) -> dict[str, Any]:
    instructions = collections.Counter(_AMD.findall(code))
    loads = [_AMD_BITS.get(i.rpartition("_")[2], 32) for i in instructions if re.match(r"(global|buffer|flat)_load", i)]
    return {
        "registers": _number(r"\.vgpr_count:\s*(\d+)", code),
        "accumulator_registers": _number(r"\.agpr_count:\s*(\d+)", code),
        "spills": _number(r"\.vgpr_spill_count:\s*(\d+)", code),
        "widest_load_bits": max(loads, default=0),
        "tensor_core_instructions": sum(count for i, count in instructions.items() if i.startswith(("v_mfma", "v_smfmac", "v_wmma"))),
        "waves_of_simd": _number(r"; Occupancy:\s*(\d+)", code),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise ValueError(f"the toolchain's report has no {pattern}")
    return int(found[1])


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _occupancy(found: dict[str, Any], chip: Chip) -> dict[str, Any]:
    warps, shared = found["warps"], found["shared_bytes"]
    if chip.name.startswith("sm_"):
        of_warp = -(-found["registers"] * 32 // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = chip.registers // of_warp // warps if of_warp else chip.blocks
        taken = -(-shared // SHARED_UNIT) * SHARED_UNIT + SHARED_OF_BLOCK
    else:
        by_registers = found.pop("waves_of_simd") * SIMDS // warps
        taken = shared
    by = {"registers": by_registers, "shared memory": chip.shared_total // taken if taken else chip.blocks}
    by |= {"warps": chip.warps // warps, "blocks": chip.blocks}
    limit = min(by, key=lambda name: by[name])
    return {"occupancy": round(by[limit] * warps / chip.warps, 3), "occupancy_limit": limit}


def exceeded(found: dict[str, Any], target: str) -> list[str]:
    """Budgets that a kernel breaks, each in a few words."""
    name, over = found["kernel"], []
    if found["spills"]:
        over.append(f"{name}: {found['spills']} spills, limit 0 ({found['registers']} registers, {found['warps']} warps)")
    if found["shared_bytes"] > found["shared_limit"]:
        over.append(f"{name}: {found['shared_bytes']} bytes of shared memory, limit {found['shared_limit']}")
    elif not found["occupancy"]:
        over.append(f"{name}: no block fits a processor, for its {found['occupancy_limit']}")
    if target.startswith("sm_") and found["registers"] > MOST_REGISTERS:
        over.append(f"{name}: {found['registers']} registers, limit {MOST_REGISTERS}")
    if found.get("tensor_memory_columns", 0) > TENSOR_MEMORY:
        over.append(f"{name}: {found['tensor_memory_columns']} columns of tensor memory, limit {TENSOR_MEMORY}")
    return over
