"""What only gen4 has: MX quantisation and products, tensor indirection, wide matmuls."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from tests.nki.kit import loaded, psum, refused, run, sbuf, simulate, stored, values

ELEMENT = {"float8_e4m3fn_x4": (ml_dtypes.float8_e4m3fn, 8), "float8_e5m2_x4": (ml_dtypes.float8_e5m2, 15)}


def reference_scales(x, largest_exponent):
    """The formula of the documentation, one group of 8 partitions by 4 elements at a time."""
    partitions, elements = x.shape
    codes = np.zeros((partitions // 8, elements // 4), np.uint8)
    for g in range(partitions // 8):
        for i in range(elements // 4):
            amax = np.abs(x[8 * g : 8 * g + 8, 4 * i : 4 * i + 4].astype(np.float64)).max()
            codes[g, i] = 0 if amax == 0 else int(np.floor(np.log2(amax))) - (largest_exponent - 1) + 127
    return codes


def spread(codes):
    """Scales as they lie in SBUF: four rows at the start of each quadrant."""
    out = np.zeros((8 * len(codes), codes.shape[1]), np.uint8)
    for g in range(len(codes)):
        out[g // 4 * 32 + g % 4] = codes[g]
    return out


def quantize(x, dtype, scale_dtype="uint8"):
    def kernel(x):
        tile = loaded(x)
        data, scale = sbuf((x.shape[0], x.shape[1] // 4), dtype), sbuf((x.shape[0], x.shape[1] // 4), scale_dtype)
        nisa.memset(scale, 0 if scale_dtype == "uint8" else 1.0)
        nisa.quantize_mx(data, tile, scale)
        return stored(data.view("uint32")), stored(scale.view("uint8"))

    return simulate(kernel, x, target="trn3")


@pytest.mark.parametrize("dtype", ELEMENT)
@pytest.mark.parametrize("partitions", [32, 96, 128])
def test_quantize_mx(dtype, partitions):
    element, largest = ELEMENT[dtype]
    x = values(np.random.default_rng(0), (partitions, 24), "bfloat16")
    x *= np.exp2(np.random.default_rng(1).integers(-20, 20, (partitions, 24))).astype(x.dtype)
    x[0:8, 0:4] = 0
    data, scale = quantize(x, dtype)
    codes = reference_scales(x, largest)
    used = spread(np.ones_like(codes)) != 0
    np.testing.assert_array_equal(scale[used], spread(codes)[used])
    factor = np.exp2(codes.astype(np.float64) - 127).repeat(8, 0).repeat(4, 1)
    want = (x.astype(np.float64) / factor).astype(np.float32).astype(element)
    np.testing.assert_array_equal(data.view(np.uint8).reshape(partitions, 24), want.view(np.uint8))


@pytest.mark.parametrize("dtype", ELEMENT)
def test_matmul_mx_dequantises(dtype):
    element, largest = ELEMENT[dtype]
    rng = np.random.default_rng(0)
    a, b = values(rng, (128, 4 * 64), "bfloat16"), values(rng, (128, 4 * 96), "bfloat16")

    def kernel(a, b):
        out, parts = psum((64, 96)), []
        for x, n in ((a, 64), (b, 96)):
            data, scale = sbuf((128, n), dtype), sbuf((128, n), "float8_e8m0fnu")
            nisa.quantize_mx(data, loaded(x), scale)
            parts.append((data, scale))
        nisa.nc_matmul_mx(out, parts[0][0], parts[1][0], parts[0][1], parts[1][1])
        return stored(out)

    def dequantised(x):
        codes = reference_scales(x, largest).astype(np.float64)
        factor = np.exp2(codes - 127).repeat(8, 0).repeat(4, 1)
        return (x.astype(np.float64) / factor).astype(np.float32).astype(element).astype(np.float64) * factor

    left, right = (dequantised(x).reshape(128, -1, 4) for x in (a, b))
    want = np.einsum("kiq,kjq->ij", left, right)
    np.testing.assert_allclose(simulate(kernel, a, b, target="trn3"), want, rtol=1e-4, atol=1e-4)


def test_scales_of_two_tensors_share_a_tile():
    x = values(np.random.default_rng(0), (64, 16), "bfloat16")

    def kernel(x):
        scale = sbuf((64, 4), "uint8")
        nisa.memset(scale, 0)
        for first in (0, 4):
            nisa.quantize_mx(sbuf((64, 4), "float8_e4m3fn_x4"), loaded(x), scale[first:, :])
        return stored(scale)

    got, want = simulate(kernel, x, target="trn3"), spread(reference_scales(x, 8))
    want[4:8], want[36:40] = want[0:4], want[32:36]
    np.testing.assert_array_equal(got, want)


def test_float4_products():
    """Packed float4 comes from the host; the first element is in the lowest bits."""
    rng = np.random.default_rng(0)
    nibbles = rng.integers(0, 16, (32, 8, 4)).astype(np.uint8)
    packed = (nibbles.astype(np.uint16) << np.array([0, 4, 8, 12], np.uint16)).sum(-1).astype(np.uint16)
    one = np.full((4, 8), 127, np.uint8)

    def kernel(x, scale):
        out, data, factors = psum((8, 8)), loaded(x.view("float4_e2m1fn_x4")), loaded(scale)
        nisa.nc_matmul_mx(out, data, data, factors, factors)
        return stored(out)

    exact = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    got = simulate(kernel, packed, one, target="trn3")
    np.testing.assert_allclose(got, np.einsum("kiq,kjq->ij", exact, exact))


def test_wide_moving_and_bfloat16_destination():
    rng = np.random.default_rng(0)
    a, b = values(rng, (64, 16), "bfloat16"), values(rng, (64, 1500), "bfloat16")

    def kernel(a, b):
        out = psum((16, 1500), "bfloat16")
        nisa.nc_matmul(out, loaded(a), loaded(b))
        return stored(out)

    want = a.astype(np.float64).T @ b.astype(np.float64)
    np.testing.assert_allclose(simulate(kernel, a, b, target="trn3").astype(np.float64), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_double_row(target):
    rng = np.random.default_rng(0)
    a, b = values(rng, (128, 2, 16), "float8_e5m2"), values(rng, (128, 2, 24), "float8_e4m3")

    def kernel(a, b):
        out = psum((16, 24))
        nisa.nc_matmul(out, loaded(a), loaded(b), perf_mode=nisa.matmul_perf_mode.double_row)
        return stored(out)

    want = np.einsum("kqm,kqn->mn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(simulate(kernel, a, b, target=target), want, rtol=1e-5, atol=1e-4)


def snake(index, group):
    """Offsets of each group of partitions: offset i comes from index[i % G, i // G]."""
    return [index[p : p + group].T.reshape(-1) for p in range(0, len(index), group)]


def test_indirect_gather_and_scatter():
    rng = np.random.default_rng(0)
    x, index = values(rng, (32, 40)), rng.permuted(np.arange(40)[None].repeat(32, 0), axis=1)[:, :1].astype(np.int32)
    index = np.concatenate([rng.permutation(40)[:16], rng.permutation(40)[:16]])[:, None].astype(np.int32)

    def kernel(x, index):
        gathered, scattered = sbuf((32, 16)), loaded(x)
        nisa.tensor_copy(gathered, loaded(x).indirect(loaded(index)[:, 0:1], 16))
        nisa.tensor_scalar(scattered.indirect(loaded(index), 16), gathered, nl.multiply, -1.0)
        return stored(gathered), stored(scattered)

    gathered, scattered = simulate(kernel, x, index, target="trn3")
    want = x.copy()
    for g, offsets in enumerate(snake(index, 16)):
        rows = slice(16 * g, 16 * g + 16)
        np.testing.assert_array_equal(gathered[rows], x[rows][:, offsets])
        want[rows, offsets] *= -1
    np.testing.assert_array_equal(scattered, want)


def test_indirect_matmul_reads_groups_of_32_partitions():
    rng = np.random.default_rng(0)
    a, b = values(rng, (64, 8), "bfloat16"), values(rng, (64, 50), "bfloat16")
    index = rng.integers(0, 50, (64, 1)).astype(np.int32)

    def kernel(a, b, index):
        out = psum((8, 32))
        nisa.nc_matmul(out, loaded(a), loaded(b).indirect(loaded(index), 32))
        return stored(out)

    picked = np.concatenate([b[32 * g : 32 * g + 32][:, o] for g, o in enumerate(snake(index, 32))])
    want = a.astype(np.float64).T @ picked.astype(np.float64)
    np.testing.assert_allclose(simulate(kernel, a, b, index, target="trn3"), want, rtol=1e-4, atol=1e-4)


def test_indirect_offsets_are_checked():
    def kernel(x, index):
        dst = sbuf((32, 16))
        nisa.tensor_copy(dst, loaded(x).indirect(loaded(index), 16))
        return stored(dst)

    with refused("C14"):
        simulate(kernel, np.zeros((32, 8), np.float32), np.full((32, 1), 8, np.int32), target="trn3")


def test_abs_max_keeps_the_sign_and_prefers_the_second():
    x, y = np.array([[-5, 1, 2]], np.float32), np.array([[3, -1, -2.5]], np.float32)
    got = run(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.abs_max), x, y, out=((1, 3), "float32"), target="trn3")
    np.testing.assert_array_equal(got, [[-5, -1, -2.5]])
    got = run(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.abs_min), x, y, out=((1, 3), "float32"), target="trn3")
    np.testing.assert_array_equal(got, [[3, -1, 2]])


MX_REFUSED = {
    "float32 source": (
        "C7",
        lambda: nisa.quantize_mx(sbuf((32, 4), "float8_e4m3fn_x4"), nl.zeros((32, 16), nl.float32), sbuf((32, 4), "uint8")),
    ),
    "odd partitions": (
        "C11",
        lambda: nisa.quantize_mx(sbuf((16, 4), "float8_e4m3fn_x4"), nl.zeros((16, 16), nl.bfloat16), sbuf((16, 4), "uint8")),
    ),
    "few scale rows": (
        "C2",
        lambda: nisa.quantize_mx(sbuf((64, 4), "float8_e4m3fn_x4"), nl.zeros((64, 16), nl.bfloat16), sbuf((8, 4), "uint8")),
    ),
    "packed elsewhere": ("C7", lambda: nisa.tensor_scalar(sbuf((32, 4)), nl.zeros((32, 4), "float8_e4m3fn_x4"), nl.add, 1.0)),
    "memset of packed": ("C7", lambda: nisa.memset(sbuf((32, 4), "float8_e4m3fn_x4"), 1)),
}


@pytest.mark.parametrize("name", MX_REFUSED)
def test_mx_refused(name):
    code, call = MX_REFUSED[name]
    with refused(code):
        simulate(lambda x: call(), np.zeros((1, 1), np.float32), target="trn3")
