"""NKI, for AWS Trainium2 and Trainium3."""

from kdk.backends import Language

LANGUAGE = Language(
    name="nki",
    platforms=("neuron", "xla:neuron"),
    targets=("trn2", "trn3"),
    dtypes=frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "bool"}),
    no_dtype={"float64": "Trainium has no 64-bit types", "int64": "Trainium has no 64-bit types"},
)
