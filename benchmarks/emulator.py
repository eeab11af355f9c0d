"""How long the NKI emulator takes for RMSNorm of 4096 x 4096 and a product of 1024^3, bfloat16; seconds, best and first of five."""

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kdk.backends.nki import emulator

emulator.install()
import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

from kdk_kernels.rms_norm.nki import rms_norm_kernel  # noqa: E402

ROWS, COLUMNS = 128, 512  # of a product's tile


@nki.jit
def product_kernel(left, right):  # type: ignore[no-untyped-def]
    """left (K, M), right (K, N) -> left^T right (M, N); K and M multiples of 128, N of 512."""
    (K, M), N = left.shape, right.shape[1]
    out = nl.ndarray((M, N), dtype=left.dtype, buffer=nl.shared_hbm)
    depths, moving = range(0, K, ROWS), []
    for k in depths:
        moving.append(nl.ndarray((ROWS, N), dtype=right.dtype, buffer=nl.sbuf))
        nisa.dma_copy(dst=moving[-1], src=right[k : k + ROWS])
    for m in range(0, M, ROWS):
        stationary = []
        for k in depths:
            stationary.append(nl.ndarray((ROWS, ROWS), dtype=left.dtype, buffer=nl.sbuf))
            nisa.dma_copy(dst=stationary[-1], src=left[k : k + ROWS, m : m + ROWS])
        for n in range(0, N, COLUMNS):
            total = nl.ndarray((ROWS, COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for i in range(len(stationary)):
                nisa.nc_matmul(dst=total, stationary=stationary[i], moving=moving[i][:, n : n + COLUMNS], accumulate=i > 0)
            tile = nl.ndarray((ROWS, COLUMNS), dtype=left.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=total)
            nisa.dma_copy(dst=out[m : m + ROWS, n : n + COLUMNS], src=tile)
    return out


def seconds(run: Callable[[], Any]) -> str:
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return f"{min(found):.2f}, the first {found[0]:.2f}"


def main() -> None:
    random = np.random.default_rng(0)
    x, a, b = (random.standard_normal((n, n)).astype(ml_dtypes.bfloat16) for n in (4096, 1024, 1024))
    weight = np.ones((1, 4096), ml_dtypes.bfloat16)
    print("rms_norm 4096 x 4096:", seconds(lambda: nki.simulate(rms_norm_kernel)(x, weight, 1e-5, 0.0)))
    print("product 1024^3:", seconds(lambda: nki.simulate(product_kernel)(a, b)))


if __name__ == "__main__":
    main()
