"""Who is timed: the reference as it is and compiled, torch's own function, kdk's implementations, installed packages of others."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

import kdk
from kdk.backends import LANGUAGES
from kdk.dispatch import kernel_file
from kdk.peers import Peer
from kdk.platforms import platform
from kdk.registry import OPERATORS

EAGER, COMPILED = "eager reference", "torch.compile"


@dataclass(frozen=True)
class Contender:
    """function: the operator's arguments -> its outputs. implementation: of kdk's, else empty. absent: why it cannot be tried here."""

    name: str
    function: Callable[..., Any]
    implementation: str = ""
    absent: str = ""


def peers_of(name: str) -> tuple[Peer, ...]:
    """`PEERS` of the operator's peers.py; none where it has no such file."""
    module = f"{OPERATORS[name].op.package}.peers"
    if importlib.util.find_spec(module) is None:
        return ()
    return tuple(importlib.import_module(module).PEERS)


def trimmed(name: str) -> Callable[..., Any]:
    """The reference without the tensors that it saves for backward."""
    op = OPERATORS[name].op

    def reference(*args: Any) -> Any:
        result = op.reference(*args)
        if not op.saved:
            return result
        return result[0] if len(op.outputs) == 1 else result[: len(op.outputs)]

    return reference


def contenders(name: str, device: torch.device, direction: str) -> Iterator[Contender]:
    """Everyone for an operator on a device; those that are not installed are named, too."""
    where, reference = platform(device.type), trimmed(name)
    yield Contender(EAGER, reference)
    yield Contender(COMPILED, torch.compile(trimmed(name), fullgraph=True, dynamic=False))
    for implementation in _implementations(name, where, direction):
        with kdk.use(implementation), kdk.strict():
            function = kdk.selection.bind(OPERATORS[name].call)
        yield Contender(f"kdk {implementation}", function, implementation)
    yield Contender("kdk, torch.compile", torch.compile(OPERATORS[name].call, fullgraph=True, dynamic=False), "default")
    for peer in peers_of(name):
        yield Contender(peer.name, _guarded(peer), absent=_absent(peer, where))


def _implementations(name: str, where: str, direction: str) -> list[str]:
    """kdk's own that run natively there, in the default order."""
    op = OPERATORS[name].op
    native = [language.name for language in LANGUAGES.values() if where in language.platforms]
    return [*(n for n in (*native, "torch") if kernel_file(op, n, "forward")), *([] if native else ["reference"])]


def _absent(peer: Peer, where: str) -> str:
    if peer.platforms and where not in peer.platforms:
        return f"runs on {', '.join(peer.platforms)}, this is {where}"
    try:
        version(peer.package)
    except PackageNotFoundError:
        return f"not installed: pip install {peer.package}"
    return ""


class NotTaken(Exception):
    """A peer does not take these arguments."""


def _guarded(peer: Peer) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        reason = peer.refuse(*args)
        if reason:
            raise NotTaken(reason)
        return peer.function(*args)

    return function


def gradient(function: Callable[..., Any], args: tuple[Any, ...], wanted: list[int], grads: list[Tensor | None]) -> Callable[[], Any]:
    """Backward alone, again and again: the forward ran once, its graph is kept. wanted: positions of the differentiable inputs."""
    inputs = [a.detach().requires_grad_(i in wanted) if isinstance(a, Tensor) and a.is_floating_point() else a for i, a in enumerate(args)]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    pairs = [(r, g) for r, g in zip(results, grads) if g is not None and r.requires_grad]

    def run() -> Any:
        return torch.autograd.grad(
            [r for r, _ in pairs], [inputs[i] for i in wanted], [g for _, g in pairs], retain_graph=True, allow_unused=True
        )

    return run
