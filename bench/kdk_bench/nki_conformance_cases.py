"""The cases of nki_conformance: for each public kernel, arguments and what it should compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Built = tuple[tuple[Any, ...], dict[str, Any], Any]


@dataclass(frozen=True)
class Case:
    """`build(module)` gives arguments, keyword arguments and the expected result.

    None means that it only has to run; a function makes (result to compare, expected) of the result.
    `refused` is the code of the check, or the name of the exception, that has to refuse it; after ": ", a part of its text.
    `around` is a context that repairs the kernel's file for this case; the case's name in the table says "repaired".
    `entry` makes a kernel of ours that calls the public one, where that takes more than arrays.
    """

    repository: str
    name: str
    file: str
    function: str
    build: Callable[[Any], Built]
    package: str = ""
    grid: int = 0
    target: str = "trn2"
    tolerance: float = 1e-5
    refused: str = ""
    frontend: str = "tracer"
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    entry: Callable[[Any], Callable[..., Any]] | None = None


CASES: list[Case] = []


def case(repository: str, name: str, file: str, function: str, **settings: Any) -> Callable:
    """Register a builder as a case."""

    def register(build: Callable[[Any], Built]) -> Callable[[Any], Built]:
        CASES.append(Case(repository, name, file, function, build, **settings))
        return build

    return register


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


EXAMPLES = "nki/examples/"


@case("sdk", "add_kernel", EXAMPLES + "simulate/nki_simulate_example.py", "add_kernel")
@case("sdk", "nki_tensor_add_kernel", EXAMPLES + "getting_started_baremetal.py", "nki_tensor_add_kernel")
def _add(_: Any) -> Built:
    a, b = normal(128, 512), normal(128, 512, seed=1)
    return (a, b), {}, a + b


@case("sdk", "nki_tensor_add", EXAMPLES + "tensor_addition/tensor_addition_nki_kernels.py", "nki_tensor_add")
def _tiled_add(_: Any) -> Built:
    a, b = normal(256, 1024), normal(256, 1024, seed=1)
    return (a, b), {}, a + b


@case("sdk", "layout-pass tensor_exp_kernel_", EXAMPLES + "layout-pass.py", "tensor_exp_kernel_")
def _exp(_: Any) -> Built:
    x = normal(128, 512)
    return (x,), {}, np.exp(x.astype(np.float64))


@case("sdk", "layout-violation tensor_exp_kernel_", EXAMPLES + "layout-violation.py", "tensor_exp_kernel_", refused="C1")
def _violation(_: Any) -> Built:
    """The example of a tile with 256 partitions, where there are 128."""
    return (normal(256, 512),), {}, None


@case("sdk", "tensor_split_kernel_", EXAMPLES + "index-case-1.py", "tensor_split_kernel_")
def _split(_: Any) -> Built:
    x = normal(64, 77)
    return (x,), {}, (x[:, ::2], x[:, 1::2])


@case("sdk", "tensor_maxpool_kernel_", EXAMPLES + "index-case-3.py", "tensor_maxpool_kernel_")
def _maxpool(_: Any) -> Built:
    x = normal(16, 12, 8)
    return (x, 2), {}, x.reshape(16, 6, 2, 4, 2).max((2, 4))


@case("sdk", "tensor_avgpool_kernel", EXAMPLES + "average_pool2d/average_pool2d_nki_kernels.py", "tensor_avgpool_kernel")
def _avgpool(_: Any) -> Built:
    x = normal(16, 12, 8)
    return (x, 2), {}, x.reshape(16, 6, 2, 4, 2).mean((2, 4))


@case("sdk", "tensor_transpose2D_kernel_", EXAMPLES + "transpose2d/transpose2d_nki_kernels.py", "tensor_transpose2D_kernel_")
def _transpose(_: Any) -> Built:
    x = np.arange(5 * 12, dtype=np.int8).reshape(5, 12)
    return (x, (3, 4)), {}, x.reshape(5, 3, 4).transpose(0, 2, 1).reshape(5, 12)


MATMUL = EXAMPLES + "matrix_multiplication/matrix_multiplication_nki_kernels.py"
MATMUL_SAMPLE = "src/nki_samples/tutorials/matrix_multiplication/matrix_multiplication_nki_kernels.py"
MATMUL_SHAPES = {
    "nki_matmul_basic_": (128, 64, 512),
    "nki_matmul_tiled_": (256, 256, 1024),
    "nki_matmul_hoist_load_": (256, 256, 1024),
    "nki_matmul_block_free_dimension_": (256, 512, 1024),
    "nki_matmul_fully_optimized_": (1024, 2048, 1024),
}
for _function, (_k, _m, _n) in MATMUL_SHAPES.items():
    for _repository, _file in (("sdk", MATMUL), ("nki-samples", MATMUL_SAMPLE)):
        _old = "TypeError: 'dtype'" if _repository == "nki-samples" and _m < 512 else ""

        @case(_repository, _function, _file, _function, tolerance=2**-7, refused=_old)
        def _matmul(_: Any, k: int = _k, m: int = _m, n: int = _n) -> Built:
            """The first three of nki-samples call tensor_copy(src, dtype=), which NKI 0.3 removed."""
            a, b = normal(k, m, dtype=ml_dtypes.bfloat16), normal(k, n, seed=1, dtype=ml_dtypes.bfloat16)
            return (a, b), {}, a.astype(np.float64).T @ b.astype(np.float64)


for _version, _length in (("mamba_v1", 256), ("mamba_v2", 256), ("mamba_v3", 512)):

    @case("sdk", _version, EXAMPLES + "fused_mamba/mamba_nki_kernels.py", _version, tolerance=1e-4)
    def _mamba(_: Any, length: int = _length) -> Built:
        channels, states = 256, 4
        delta, u = np.abs(normal(1, channels, length)) * 0.1, normal(1, channels, length, seed=1)
        a, b, c = -np.abs(normal(channels, states)), normal(1, states, length, seed=2), normal(1, states, length, seed=3)
        decay = np.exp(delta[:, :, None] * a[None, :, :, None].astype(np.float64))
        drive = delta[:, :, None] * b[:, None] * u[:, :, None].astype(np.float64)
        state, out = np.zeros((1, channels, states)), np.zeros((1, channels, length))
        for i in range(length):
            state = decay[..., i] * state + drive[..., i]
            out[..., i] = (c[:, None, :, i] * state).sum(-1)
        return (delta, u, a, b, c), {}, out


@case("nkipy", "nki_rmsnorm_kernel", "examples/models/gpt_oss/kernels/nki/rmsnorm.py", "nki_rmsnorm_kernel")
def _rmsnorm(_: Any) -> Built:
    x, w = normal(200, 256), normal(256, seed=1)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * w
    return (x, w, 1e-6), {}, want


MX = "nki/deep-dives/src/mxfp-matmul/mx_kernels.py"
for _function, _copy in (
    ("kernel_copy_strided_quantize_matmul_mx", True),
    ("kernel_copy_strided_quantize_matmul_mx", False),
    ("kernel_copy_strided_quantize_matmul_mx_packed_scale", True),
):

    @case("sdk", f"{_function}[{_copy}]", MX, _function, target="trn3", tolerance=0.05)
    def _mx_matmul(_: Any, copy: bool = _copy) -> Built:
        """float8 operands: the tolerance is their rounding, summed over 512 products."""
        a, b = normal(512, 128, dtype=ml_dtypes.bfloat16), normal(512, 512, seed=1, dtype=ml_dtypes.bfloat16)
        want = a.astype(np.float64).T @ b.astype(np.float64)
        return (a, b, "float8_e4m3fn_x4", copy), {}, want


@case("sdk", "kernel_offline_quantized_mx_matmul", MX, "kernel_offline_quantized_mx_matmul", target="trn3", tolerance=2**-7)
def _mx_offline(_: Any) -> Built:
    """Packed float8 operands with scales of 1."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((128, 4 * n), np.float32).astype(ml_dtypes.float8_e5m2) for n in (128, 512))
    scales = [np.full((16, n), 127, np.uint8) for n in (128, 512)]
    left, right = (x.astype(np.float64).reshape(128, -1, 4) for x in (a, b))
    want = np.einsum("kiq,kjq->ij", left, right)
    return (a.view(np.uint32), scales[0], b.view(np.uint32), scales[1], "float8_e5m2_x4"), {}, want
