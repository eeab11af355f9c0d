"""An operator's cases.py, held against its declaration."""

from __future__ import annotations

import importlib

from kdk.cases import Cases
from kdk.errors import DeclarationError
from kdk.op import Op


def cases_of(op: Op) -> Cases:
    """`CASES` of the operator's folder. Raises DeclarationError where they do not fit the declaration."""
    try:
        cases = importlib.import_module(f"{op.package}.cases").CASES
    except Exception as error:
        raise _no_cases(op, f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())}", "") from error
    letters = op.letters
    if not isinstance(cases, Cases) or set(cases.dims) != letters:
        got = sorted(cases.dims) if isinstance(cases, Cases) else type(cases).__name__
        raise _no_cases(op, f"has the letters {got}", f"the declared shapes have {sorted(letters)}")
    scalars = [name for name in op.arguments if name not in op.tensors and name not in op.sized.values()]
    for letter in op.indexes.values():
        if cases.dims[letter].minimum < 1:
            raise _no_cases(op, f"lets {letter} be 0", "an index tensor points into it: Dim(minimum=1)")
    if set(cases.scalars) != set(scalars):
        raise _no_cases(op, f"has values for {sorted(cases.scalars)}", f"the scalar arguments are {sorted(scalars)}")
    unknown = [name for name in cases.largest if name not in op.tensors]
    if unknown:
        raise _no_cases(op, f"limits the values of {unknown}", f"the tensor arguments are {', '.join(op.tensors)}")
    return cases


def _no_cases(op: Op, problem: str, limit: str) -> DeclarationError:
    way_out = "CASES = kdk.cases.Cases(dims=..., scalars=..., models=...) with every letter and every scalar argument"
    return DeclarationError("KDK-CASES", f"cases.py of {op.name} {problem}", limit=limit, way_out=way_out)
