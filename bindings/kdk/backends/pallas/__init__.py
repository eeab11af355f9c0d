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
)
