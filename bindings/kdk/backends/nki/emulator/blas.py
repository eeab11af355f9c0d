"""Matrix products of 128-row tiles are too small to share between BLAS threads: on busy cores that costs 20 times."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

_lock = threading.Lock()
_users = 0
_limiter: Any = None
_warned = False


def _threadpoolctl() -> Any:
    try:
        import threadpoolctl  # type: ignore[import-not-found]
    except ImportError:
        return None
    return threadpoolctl


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Hold BLAS to one thread while any simulation runs. Needs threadpoolctl; without it this does nothing."""
    global _users, _limiter
    library = _threadpoolctl()
    with _lock:
        _users += 1
        if _users == 1 and library is not None:
            _limiter = library.threadpool_limits(limits=1, user_api="blas")
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _limiter is not None:
                _limiter.unregister() if hasattr(_limiter, "unregister") else _limiter.restore_original_limits()
                _limiter = None


def warn_if_threaded() -> None:
    """Say once that nothing holds BLAS to one thread, and how to change it."""
    global _warned
    if _warned or _limiter is not None or os.cpu_count() == 1:
        return
    if any(os.environ.get(v) == "1" for v in VARIABLES):
        return
    _warned = True
    warnings.warn(
        "the NKI emulator multiplies small tiles, which several BLAS threads slow down: install threadpoolctl "
        "or set OPENBLAS_NUM_THREADS=1 before Python starts",
        RuntimeWarning,
        stacklevel=2,
    )
