"""nki.collectives: the names, so that files which import it load. No collective is emulated (nor in the vendor's simulator)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from .objects import NKIObject

NAMES = (
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce",
    "rank_id",
    "reduce_scatter",
)


class ReplicaGroup(NKIObject):
    """Groups of ranks, kept as given."""

    def __init__(self, *groups: Any, **settings: Any) -> None:
        super().__init__(groups=groups, **settings)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def collective(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"nki.collectives.{name} is not emulated: simulate the kernel's work on one rank")

    collective.__name__ = name
    return collective


globals().update({name: _refusing(name) for name in NAMES})
