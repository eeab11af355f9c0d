"""Tables from lists in source: `python -m kdk_bench.audit.tables.listing torch_xla FILE VERSION DATE` reads torch_xla's
codegen/xla_native_functions.yaml, `... cuda` the list of operators in torch's own wheel. Prints a table as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kdk_bench.audit.tables.dispatcher import SCHEMA, delegates
from kdk_bench.records import today


def xla_names(text: str) -> list[str]:
    """Every operator that the file lists in any of its sections, with aten's prefix."""
    return sorted({"aten::" + line.strip()[2:].strip() for line in text.splitlines() if line.startswith("  - ")})


def wheel() -> dict[str, set[str]]:
    """Operator -> the dispatch keys that torch's list of operators names for it; "structured" and "implicit" among them."""
    import torchgen

    found: dict[str, set[str]] = {}
    name, inside = "", False
    for line in (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text().splitlines():
        if line.startswith("- func: "):
            name, inside = "aten::" + line.removeprefix("- func: ").partition("(")[0], False
            found[name] = set()
        elif name and line.startswith("  dispatch:"):
            inside = True
        elif name and line.startswith("  ufunc_inner_loop:"):
            found[name] |= {"CPU", "CUDA"}  # kernels for both are generated
        elif inside and line.startswith("    ") and ":" in line:
            found[name] |= {key.strip() for key in line.partition("#")[0].rpartition(":")[0].split(",")}
        elif line.startswith("  ") and not line.startswith("    "):
            inside = False
    return found


def kinds(native: set[str]) -> dict[str, Any]:
    """Every aten operator by kind, given those that a platform has kernels for; structured and composite ones as torch says."""
    structured, keys = delegates(), wheel()
    ops: dict[str, Any] = {"native": sorted(native), "structured": {}, "explicit": [], "composite": [], "refused": []}
    for name, mine in keys.items():
        if name in native:
            continue
        if name in structured and structured[name] in native:
            ops["structured"][name] = structured[name]
        elif mine & {"CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}:
            ops["explicit"].append(name)
        elif (not mine and name not in structured) or "CompositeImplicitAutograd" in mine:
            ops["composite"].append(name)
        else:
            ops["refused"].append(name)
    return ops


def functional(native: set[str]) -> set[str]:
    """torch_xla's list names functional forms; functionalization brings in-place and out= forms of them there too."""
    forms = set(native)
    for name in wheel():
        base, _, overload = name.partition(".")
        if base.endswith("_") and not base.endswith("__") and (base[:-1] + (f".{overload}" if overload else "")) in native:
            forms.add(name)
    return forms


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m kdk_bench.audit.tables.listing")
    tables = parser.add_subparsers(dest="what", required=True)
    tables.add_parser("cuda", help="from the list of operators in torch's own wheel")
    of_xla = tables.add_parser("torch_xla", help="from a checkout of github.com/pytorch/xla at a release's tag")
    of_xla.add_argument("file", help="codegen/xla_native_functions.yaml")
    of_xla.add_argument("version", help="of the release: 2.9.0")
    of_xla.add_argument("date", help="of the release: 2025-11-17")
    options = parser.parse_args(arguments)
    if options.what == "cuda":
        number = version("torch").partition("+")[0]
        native = {name for name, keys in wheel().items() if "CUDA" in keys}
        source, date = f"native_functions.yaml in the wheel of torch {number}", today()
        return {"schema": SCHEMA, "platform": "cuda", "version": f"torch {number}", "source": source, "date": date, "ops": kinds(native)}
    try:
        names = set(xla_names(Path(options.file).read_text()))
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{options.file} could not be read: {error}")
    if not names:
        parser.error(f"{options.file} lists no operators: it is codegen/xla_native_functions.yaml that does")
    head = {"schema": SCHEMA, "platform": "xla", "version": f"torch_xla {options.version}"}
    source = f"codegen/xla_native_functions.yaml of torch_xla {options.version} (github.com/pytorch/xla)"
    return {**head, "source": source, "date": options.date, "ops": kinds(functional(names))}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=0))
