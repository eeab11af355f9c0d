"""Pallas, for TPUs."""

from kdk.backends import Language

LANGUAGE = Language(
    name="pallas",
    platforms=("tpu", "xla:tpu"),
    targets=("v6e", "v5e", "v5p", "tpu7x"),
    dtypes=frozenset({"float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "bool"}),
    no_dtype={
        "float16": "Mosaic, the TPU's kernel compiler, has no float16",
        "float64": "a TPU has no 64-bit types",
        "int64": "a TPU has no 64-bit types",
    },
    simulated=("cpu", "xla:cpu"),
    strided=False,
)

MIB = 1 << 20
SCOPED_VMEM = {"v6e": 32 * MIB, "v5e": 16 * MIB, "v5p": 16 * MIB, "tpu7x": 32 * MIB}
"""Bytes of VMEM that all blocks and values of a kernel share, unless it sets vmem_limit_bytes."""

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
"""What jax calls the chips."""
