"""Two processes on this machine that speak gloo: `run` starts them once, each works through all cases, `run` says what failed."""

from __future__ import annotations

import datetime
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Case = tuple[str, Callable[[], None]]


def run(make_cases: Callable[[Any], Iterable[Case]], folder: Path) -> dict[str, str]:
    """Case -> what it raised on either of the processes, empty for nothing. `make_cases(mesh)` is called in both."""
    torch.multiprocessing.spawn(_work, (make_cases, str(folder)), 2)
    first, second = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    assert list(first) == list(second)
    return {name: "\n".join(filter(None, (first[name], second[name]))) for name in first}


def _work(rank: int, make_cases: Callable[[Any], Iterable[Case]], folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    found = dict(_results(make_cases(init_device_mesh("cpu", (2,)))))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _results(cases: Iterable[Case]) -> Iterator[tuple[str, str]]:
    for name, case in cases:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                case()
        except Exception:
            yield name, traceback.format_exc()
        else:
            yield name, ""
