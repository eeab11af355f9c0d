"""Running sums in the StableHLO that TorchTPU writes, in a form that this libtpu reads.

TorchTPU writes torch.cumsum as `chlo.scan`, which libtpu 0.0.52 does not know. An associative scan is expanded by XLA itself to the
tree that it makes of a reduce-window over all that came before (so says jax beside its own cumulative sums, which it lowers to that
reduce-window for a TPU): that is put in the scan's place here, in a function whose name says so.
"""

from __future__ import annotations

from typing import Any

EXPANDED = "expanded_chlo_scan"
IDENTITY = {"stablehlo.add": 0, "stablehlo.multiply": 1}


def expand(module: Any) -> None:
    """Put a reduce-window in the place of every running sum or product of a module; any other scan stays, and libtpu refuses it."""
    from jaxlib.mlir import ir

    scans: list[Any] = []

    def keep(operation: Any) -> Any:
        if operation.name == "chlo.scan":
            scans.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(keep)
    for number, scan in enumerate(scans):
        combine = _running(scan)
        if combine:
            _replace(module, scan, combine, f"{EXPANDED}_{number}")


def said(stablehlo: str) -> list[str]:
    """What a row says of a program with such functions."""
    return ["chlo.scan, which libtpu does not read, expanded to the reduce-window that XLA makes of it"] if EXPANDED in stablehlo else []


def _running(scan: Any) -> str:
    """The operation that a scan accumulates by, if it is a running sum or product of one tensor from its identity on; else ""."""
    from jaxlib.mlir import ir

    if len(scan.operands) != 2 or not scan.attributes["is_associative"].value:
        return ""
    body = list(scan.regions[0].blocks[0].operations)
    combine = body[0].operation.name
    if len(body) != 2 or combine not in IDENTITY or list(body[1].operands) != [body[0].result] * 2:
        return ""
    if {argument.arg_number for argument in map(ir.BlockArgument, body[0].operands)} != {0, 1}:
        return ""
    start = scan.operands[1].owner
    value = start.attributes["value"] if getattr(start, "name", "") == "stablehlo.constant" else None
    same = value is not None and value.is_splat and value.get_splat_value().value == IDENTITY[combine]
    return combine if same else ""


def _replace(module: Any, scan: Any, combine: str, name: str) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    x, carry = scan.operands[0], scan.results[1].type
    axis, reverse = scan.attributes["dimension"].value, scan.attributes["is_reverse"].value
    text = _function(name, x.type, carry, axis, reverse, combine)
    parsed = ir.Module.parse(text)  # held until its function has moved
    module.body.append(parsed.body.operations[0].detach_from_parent())
    with ir.InsertionPoint(scan):
        call = func.CallOp([x.type, carry], ir.FlatSymbolRefAttr.get(name), [x], loc=scan.location)
    for old, new in zip(scan.results, call.results):
        old.replace_all_uses_with(new)
    scan.erase()


def _function(name: str, x: Any, carry: Any, axis: int, reverse: bool, combine: str) -> str:
    """x: its type. The results are those of the scan: all states, and the last one."""
    from jaxlib.mlir import ir

    shape, element = list(x.shape), x.element_type
    size = shape[axis]
    one, window = f"tensor<{element}>", [size if i == axis else 1 for i in range(len(shape))]
    padding = [[0, 0] if i != axis else [0, size - 1] if reverse else [size - 1, 0] for i in range(len(shape))]
    first = [0 if i != axis or reverse else size - 1 for i in range(len(shape))]
    ranges = ", ".join(f"{begin}:{begin + 1 if i == axis else shape[i]}" for i, begin in enumerate(first))
    edge = f"tensor<{'x'.join([*(str(1 if i == axis else n) for i, n in enumerate(shape)), str(element)])}>"
    number = f"{IDENTITY[combine]}{'' if isinstance(element, ir.IntegerType) else '.0'}"
    return f"""
    func.func private @{name}(%x: {x}) -> ({x}, {carry}) {{
      %start = stablehlo.constant dense<{number}> : {one}
      %all = "stablehlo.reduce_window"(%x, %start) <{{padding = dense<{padding}> : tensor<{len(shape)}x2xi64>,
          window_dimensions = array<i64: {", ".join(map(str, window))}>}}> ({{
        ^bb0(%a: {one}, %b: {one}):
          %c = {combine} %a, %b : {one}
          stablehlo.return %c : {one}
      }}) : ({x}, {one}) -> {x}
      %edge = stablehlo.slice %all [{ranges}] : ({x}) -> {edge}
      %last = stablehlo.reshape %edge : ({edge}) -> {carry}
      return %all, %last : {x}, {carry}
    }}"""
