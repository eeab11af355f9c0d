"""What the dispatcher of this process says about a device: `python -m kdk_bench.audit.tables.dispatcher PLUGIN`.

PLUGIN is "torch_tpu", "torch_neuronx" or another package that names torch's PrivateUse1, or "cuda" in a CUDA build of torch.
Prints a table as JSON. It runs in a process of its own: a plugin changes torch for good, and may end the process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kdk_bench.records import today

SCHEMA = "kdk.table/1"


def delegates() -> dict[str, str]:
    """Structured operators: "aten::add_.Tensor" -> "aten::add.out", from the list of operators in torch's wheel."""
    import torchgen

    found, name = {}, ""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    for line in path.read_text().splitlines():
        if line.startswith("- func: "):
            name = "aten::" + line.removeprefix("- func: ").partition("(")[0]
        elif line.strip().startswith("structured_delegate: "):
            found[name] = "aten::" + line.partition(": ")[2].strip()
    return found


def rows(name: str, keys: tuple[str, str]) -> dict[str, str]:
    """Dispatch key -> the kernel that the dispatcher computed for it."""
    import torch

    found = {}
    for line in torch._C._dispatch_dump_table(name).splitlines():
        key, _, text = line.partition(":")
        if key in keys:
            found[key] = text.strip()
    return found


def classify(name: str, key: str, structured: dict[str, str], own: str) -> tuple[str, str]:
    """(kind, the operator it delegates to) of one operator: native, structured, explicit, composite, refused.

    own: what the plugin's own registrations contain, to tell them from torch's at the Autograd key.
    """
    table = rows(name, (key, f"Autograd{key}"))
    backend, autograd = table.get(key, ""), table.get(f"Autograd{key}", "")
    if backend.endswith("[kernel]") and "fallthrough" not in backend:
        return "native", ""
    if own and own in autograd and autograd.endswith("[kernel]") and "fallthrough" not in autograd:
        return "native", ""
    if name in structured and "[default backend kernel]" in backend + "]":
        return "structured", structured[name]
    if "default backend kernel" in backend:
        return "explicit", ""
    if "math kernel" in backend or "math kernel" in autograd:
        return "composite", ""
    return "refused", ""


def load(plugin: str) -> tuple[str, str, str, str]:
    """(platform, dispatch key, what its registrations contain, versions) after the plugin was imported."""
    import torch

    if plugin == "cuda":
        if not torch.version.cuda:
            raise SystemExit("this torch is no CUDA build: run it where torch.version.cuda is not None")
        return "cuda", "CUDA", "", f"torch {torch.__version__}"
    try:
        importlib.import_module(plugin)
    except ImportError as error:
        raise SystemExit(f"{plugin} cannot be imported: {error}") from None
    with contextlib.suppress(ImportError, AttributeError):
        # Without its device TorchTPU registers nothing until this private function is called.
        importlib.import_module(f"{plugin}._loader")._init_device("tpu")
    platform = torch._C._get_privateuse1_backend_name()
    if platform == "privateuseone":
        raise SystemExit(f"{plugin} was imported and did not name its device")
    mine = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    text = rows(mine[0], ("PrivateUse1", ""))["PrivateUse1"] if mine else ""
    own = text.removeprefix("registered at ").partition(":")[0]
    return platform, "PrivateUse1", own, f"{plugin} {version(plugin)} with torch {torch.__version__.partition('+')[0]}"


def table(plugin: str) -> dict[str, Any]:
    """The table of a plugin: every operator of the aten library, by kind."""
    import torch

    platform, key, own, versions = load(plugin)
    structured = delegates()
    ops: dict[str, Any] = {"native": [], "structured": {}, "explicit": [], "composite": [], "refused": []}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::") or not torch._C._dispatch_has_kernel(name):
            continue
        kind, delegate = classify(name, key, structured, own)
        if kind == "structured":
            ops[kind][name] = delegate
        else:
            ops[kind].append(name)
    source = f"the dispatcher of {versions}"
    return {"schema": SCHEMA, "platform": platform, "version": versions, "source": source, "date": today(), "ops": ops}


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m kdk_bench.audit.tables.dispatcher torch_tpu | torch_neuronx | cuda")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise):
        result = table(sys.argv[1])
    print(json.dumps(result, indent=0))


if __name__ == "__main__":
    main()
