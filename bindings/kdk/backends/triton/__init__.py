"""Triton, for NVIDIA and AMD GPUs."""

from kdk.backends import Language

LANGUAGE = Language(
    name="triton",
    platforms=("cuda",),
    targets=("sm_90", "sm_80", "sm_100", "sm_120", "gfx942", "gfx950"),
    names_dtypes=False,
    dtypes=frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64", "bool"}),
    no_dtype={"float64": "kernels compute in float32"},
)
