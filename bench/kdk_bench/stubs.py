"""`python -m kdk_bench.stubs` writes kdk/ops.pyi: kdk's own operators for type checkers and editors, from their references."""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Any

import torch

import kdk
import kdk.ops
from kdk.op import Op
from kdk.registry import OPERATORS

STUB = Path(kdk.__file__).parent / "ops.pyi"
OWN = "kdk_kernels."
LINE = 140
HEAD = '''"""kdk's own operators. Written by `python -m kdk_bench.stubs` from their references: change those, not this."""

'''


def text() -> str:
    """The contents of ops.pyi. An operator of another package is not in it: what is installed differs from host to host."""
    own = sorted((operator.op for operator in OPERATORS.values() if operator.op.package.startswith(OWN)), key=lambda op: op.name)
    functions = "".join(_function(op) for op in own)
    imports = ("import torch\n" if "torch." in functions else "") + "from torch import Tensor\n"
    return HEAD + imports + functions


def _function(op: Op) -> str:
    summary = op.summary.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return f'\ndef {signature(op)}:\n    """{summary}"""\n'


def signature(op: Op) -> str:
    """What users call takes and returns, as it is written in a stub, on as many lines as it needs."""
    listed = [(p.kind is p.KEYWORD_ONLY, _parameter(p)) for p in op.signature.parameters.values()]
    by_name = [text for only, text in listed if only]
    written = [text for only, text in listed if not only] + (["*", *by_name] if by_name else [])
    parameters = ", ".join(written)
    returned = "Tensor" if len(op.outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(op.outputs))}]"
    if op.public is not None:
        returned = annotation(op.signature.return_annotation)
    if len(f"def {op.name}({parameters}) -> {returned}:") > LINE:
        parameters = "".join(f"\n    {text}," for text in written) + "\n"
    return f"{op.name}({parameters}) -> {returned}"


def _parameter(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {annotation(parameter.annotation)}{default}"


def annotation(kind: Any) -> str:
    """As it is written in a stub, with unions spelt by |."""
    if kind is torch.Tensor:
        return "Tensor"
    if kind is torch.dtype:
        return "torch.dtype"
    if kind in (None, type(None)):
        return "None"
    origin, of = typing.get_origin(kind), [annotation(a) for a in typing.get_args(kind)]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(of)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(of)}]"
    return str(kind.__name__)


def main() -> None:
    """Write the stub."""
    STUB.write_text(text())
    print(f"wrote {STUB}")


if __name__ == "__main__":
    main()
