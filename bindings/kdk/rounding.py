"""Rounding that belongs to what an operator means: one result is computed from another one as that is stored.

The rounded sum that add_rms_norm normalises is an example. A reference that runs in float64 to be an oracle would not round
there, and so describe another operator: `storing` says which dtype the results would be stored in.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class _Local(threading.local):
    """Per thread. Set in __init__, because dynamo does not guard a class attribute."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None


LOCAL = _Local()


def as_stored(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` rounded to the dtype that it is stored in, in its own dtype. For references; traced by dynamo."""
    return t.to(LOCAL.dtype or dtype).to(t.dtype)


class storing:
    """Inside, references round intermediate results to `dtype`, whatever they compute in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = LOCAL.dtype
        LOCAL.dtype = self.dtype

    def __exit__(self, *exc: object) -> None:
        LOCAL.dtype = self.before
