"""Random numbers for operators that take randomness as an input: the same on every device. `kdk.random.uniform(seed, rows)`."""

from __future__ import annotations

import torch
from torch import Tensor

from kdk.errors import InputError

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def uniform(seed: int, rows: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Numbers in [0, 1), one per row, that depend on the seed and the row alone: not on the device, the number of rows or a state.

    Philox 4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose published test vectors it
    passes: the key is the seed, the counter the row, and the upper 24 bits of the first word become a multiple of 2^-24.
    Give every step of a generation a seed of its own: the same seed gives the same numbers.

    Args:
        seed: 0 to 2^64 - 1.
        rows: how many, 0 or more.
        device: where the numbers are made.

    Returns:
        (rows,), float32.

    Raises:
        kdk.errors.InputError: a seed or number of rows out of range.
    """
    for name, value in (("seed", seed), ("rows", rows)):
        if isinstance(value, float | str) or value is None:
            raise InputError(f"RANDOM-{name.upper()}", f"kdk.random.uniform: {name}", value=repr(value), limit="an int")
    if not 0 <= seed < 2**64:
        way_out = f"seed % 2**64, here {seed % 2**64}"
        raise InputError("RANDOM-SEED", "kdk.random.uniform: seed", value=seed, limit="0 to 2^64 - 1", way_out=way_out)
    if not 0 <= rows < 2**32:
        way_out = "several calls with seeds of their own"
        raise InputError("RANDOM-ROWS", "kdk.random.uniform: rows", value=rows, limit="0 to 2^32 - 1", way_out=way_out)
    key = seed & WORD, seed >> 32
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        return _in_a_graph(*key, rows, torch.device(device))  # type: ignore[no-any-return]
    return _numbers(*key, rows, device)


def _numbers(low: int, high: int, rows: int, device: torch.device | str) -> Tensor:
    row = torch.arange(rows, dtype=torch.int64, device=device)
    zero = torch.zeros_like(row)
    first = philox((row, zero, zero, zero), (low, high))[0]
    return (first >> 8).to(torch.float32) * 2.0**-24


# Every round reads each word several times. Inductor writes each read out, ten rounds deep: it never comes to an end.
@torch.library.custom_op("kdk_random::uniform", mutates_args=())
def _in_a_graph(low: int, high: int, rows: int, device: torch.device) -> Tensor:
    return _numbers(low, high, rows, device)


@_in_a_graph.register_fake
def _(low: int, high: int, rows: int, device: torch.device) -> Tensor:
    return torch.empty(rows, dtype=torch.float32, device=device)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10: four random words of 32 bits for every counter, words being int64 tensors with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of a * b. In two steps: the product of 32-bit words does not fit an int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)
