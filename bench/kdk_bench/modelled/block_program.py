"""A model's block as one torch function, for TorchTPU to lower in its own process: forward, or forward and backward together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

PLAIN, KERNELS, COMPILED = "without kdk", "kdk, every kernel", "kdk, torch.compile"


@dataclass(frozen=True)
class Program:
    """Called with x, then the module's parameters and buffers. variant: without kdk; patched, every kernel kept as in eager; or
    patched and as torch.compile leaves it on `target`, where operators that lose become their reference and XLA fuses them.

    chosen: (operator, implementation) that goes before what torch.compile would do with that operator; with "" it decomposes."""

    model: str
    name: str
    direction: str
    variant: str
    target: str = ""
    chosen: tuple[str, str] | None = None

    @functools.cache  # noqa: B019  (a handful, of modules without data)
    def module(self, dtype: torch.dtype) -> tuple[nn.Module, int]:
        """The block on the meta device, and its hidden size. Built once: what a call asks of torch is the block's alone."""
        import kdk
        from kdk_bench.benchmarking.blocks import described

        module, hidden = described(self.model, self.name, dtype)
        if self.variant != PLAIN:
            kdk.patch(module)
        return module, hidden

    def arguments(self, tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """What it is called with, on the meta device."""
        module, hidden = self.module(dtype)
        x = torch.empty((1, tokens, hidden), dtype=dtype, device="meta")
        return [x, *[t.detach().to("meta") for t in _tensors(module).values()]]

    def __call__(self, x: Tensor, *values: Tensor) -> Any:
        module, _ = self.module(x.dtype)
        names = list(_tensors(module))
        wanted = [0, *[1 + i for i, name in enumerate(names) if name in dict(module.named_parameters())]]

        def run(x: Tensor, *values: Tensor) -> Tensor:
            return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))  # type: ignore[no-any-return]

        with self._selection():
            if self.direction == "forward":
                with torch.no_grad():
                    return run(x, *values)
            traced = joint(run, [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (x, *values)], wanted, x.device)
            return traced(x, *values)


    @contextlib.contextmanager
    def _selection(self) -> Iterator[None]:
        """The front door of the operators decides as under torch.compile, by what is recorded of the chip."""
        import kdk
        from kdk import decomposing, replacing, torch_library, tuning

        if self.variant != COMPILED:
            yield
            return
        name, implementation = self.chosen or ("", "")
        recorded = decomposing._rules

        def rules(op: str, *where: Any) -> Any:
            return (((), tuning.REFERENCE, "as asked"),) if op == name else recorded(op, *where)

        with contextlib.ExitStack() as stack:
            for module in (torch_library, replacing):
                stack.enter_context(mock.patch.object(module, "is_compiling", lambda: True))
            stack.enter_context(mock.patch.object(decomposing, "chip", lambda device, index: self.target))
            stack.enter_context(kdk.use(**{name: implementation}) if implementation else mock.patch.object(decomposing, "_rules", rules))
            yield


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def joint(run: Any, values: Sequence[Tensor], wanted: Sequence[int], device: torch.device) -> fx.GraphModule:
    """The graph of `run(*values)` and the gradients of the wanted values, to be called on a device.

    values: on the meta device. There, because torch's autograd engine asks a device for its queue and its streams, and this
    device is not here. Attention takes the path that it takes on a device of a back end outside torch.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention import SDPBackend

    def both(*values: Tensor) -> list[Tensor]:
        leaves = [v.detach().requires_grad_(i in wanted) for i, v in enumerate(values)]
        y = run(*leaves)
        found = torch.autograd.grad(y, [leaves[i] for i in wanted], torch.ones_like(y), allow_unused=True)
        return [y, *[g for g in found if g is not None]]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_sdp_choice", lambda *_, **__: int(SDPBackend.OVERRIDEABLE.value), "Meta")
    graph = make_fx(both)(*values)
    library._destroy()
    for node in graph.graph.nodes:
        if node.kwargs.get("device") == torch.device("meta"):
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    return graph
