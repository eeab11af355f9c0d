"""`kdk compile`: real compilers for chips that are not here, and planted kernels that they refuse or that break a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kdk.backends import LANGUAGES, TARGETS
from kdk.registry import OPERATORS
from kdk_bench import cli, evidence
from kdk_bench.compiling import rows, sources
from kdk_bench.compiling.report import exit_code, github_lines
from kdk_bench.compiling.rows import Result
from kdk_bench.expectation import Row

FIELDS = {
    "op", "direction", "implementation", "target", "case", "dtype", "outcome", "resources", "reason", "evidence", "holds",
    "environment", "date",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "cache", lambda: tmp_path / "cache")


@pytest.fixture(autouse=True)
def _operators() -> Any:
    """Operators of a test's own folder leave with it."""
    before = dict(OPERATORS)
    yield
    for name in set(OPERATORS) - set(before):
        del OPERATORS[name]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", *arguments])
    return int(ended.value.code or 0)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code = run(*arguments, "--json", "-")
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kdk.compile/1"
    return code, found["results"]


def test_an_operator_through_every_language_then_from_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["silu_and_mul", "--direction", "forward", "--dtype", "bfloat16", "--jobs", "0"]
    options += [word for chip in ("sm_90", "gfx942", "v6e", "trn2") for word in ("--target", chip)]
    code, results = report(capsys, *options)
    assert code == cli.HOLDS
    assert all(set(r) == FIELDS and r["outcome"] == "compiled" and r["case"] == "llama-3-8b" and r["holds"] for r in results)
    by = {r["target"]: r for r in results}
    assert set(by) == {"sm_90", "gfx942", "v6e", "trn2"}
    for chip in ("sm_90", "gfx942"):
        used = by[chip]["resources"]
        assert used["widest_load_bits"] == 128 and used["spills"] == 0 and 0 < used["registers"] <= 255
        assert 0 < used["occupancy"] <= 1 and used["shared_bytes"] <= used["shared_limit"]
    assert 0 < by["v6e"]["resources"]["scoped_vmem_bytes"] <= by["v6e"]["resources"]["scoped_vmem_limit"]
    assert 0 < by["trn2"]["resources"]["sbuf_peak_bytes"] <= by["trn2"]["resources"]["sbuf_capacity_bytes"]
    assert by["trn2"]["resources"]["psum_banks"] == 8
    assert [by[chip]["evidence"] for chip in ("sm_90", "v6e", "trn2")] == ["compiled", "compiled", "simulated"]

    def again(*_: Any) -> Any:
        raise AssertionError("compiled although it is stored")

    monkeypatch.setattr(rows, "compile_task", again)
    assert report(capsys, *options) == (code, results)
    store = tmp_path / "evidence" / "evidence.json"
    assert evidence.add({"schema": "kdk.compile/1", "results": results}, store) == 4
    assert {r["evidence"] for r in evidence.load(store)} == {"compiled", "simulated"}


# ---- planted -----------------------------------------------------------------------------------------------------------

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def copy(x, y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < N)
    {body}
    tl.store(y + at, values, mask=at < N)


def forward(x):
    y = torch.empty_like(x)
    {host}
    copy[(triton.cdiv(len(x), {block}),)](x, y, len(x), BLOCK={block}, num_warps={warps})
    return y
"""


def planted(folder: Path, name: str, *, body: str = "", host: str = "", block: int = 1024, warps: int = 4) -> Path:
    """An operator that copies, with a Triton kernel."""
    folder = folder / "operators" / name
    folder.mkdir(parents=True)
    (folder / "reference.py").write_text(
        f'from torch import Tensor\n\n\ndef {name}(x: Tensor) -> Tensor:\n    """A copy."""\n    return x.clone()\n\n\n'
        "def check(x: Tensor) -> None: ...\n"
    )
    (folder / "__init__.py").write_text(
        f"from kdk import Op\nfrom . import reference\n\nop = Op(reference=reference.{name}, check=reference.check,"
        " kind='elementwise', outputs=('y',), shapes={'x': 'N', 'y': 'N'}, dtypes=('float32',))\n"
    )
    (folder / "cases.py").write_text(
        "from kdk.cases import Case, Cases, Dim\nCASES = Cases(dims={'N': Dim()}, models=(Case('a', {'N': 65536}),))\n"
    )
    (folder / "triton.py").write_text(KERNEL.format(body=body, host=host, block=block, warps=warps))
    return folder.parent


TRITON = ("--implementation", "triton", "--target", "sm_90", "--jobs", "0")
PLANTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "spilling": (
        {"block": 32768, "warps": 4, "body": "values = values / tl.sum(values)"},
        "failed",
        r"over budget: copy: \d+ spills, limit 0 \(255 registers, 4 warps\)",
    ),
    "unknown_name": (
        {"body": "values = tl.no_such_function(values)"},
        "refused",
        r"supports\(\) takes it, the compiler does not: copy, line \d+: .*no_such_function",
    ),
    "raising": ({"host": "raise RuntimeError('no')"}, "failed", "RuntimeError: no"),
    "launching_nothing": ({"host": "return y"}, "failed", "nothing was launched"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_does_not_hold_exits_1_with_the_reason(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import re

    how, outcome, reason = PLANTED[name]
    code, results = report(capsys, "--ops", str(planted(tmp_path, f"{name}_op", **how)), *TRITON)
    assert (code, [r["outcome"] for r in results]) == (cli.DOES_NOT_HOLD, [outcome])
    assert re.fullmatch(reason + ".*", results[0]["reason"]), results[0]["reason"]
    assert not results[0]["holds"] and evidence.from_report({"schema": "kdk.compile/1", "results": results}) == []


def test_a_compiler_that_dies_is_one_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    planted(tmp_path, "deadly_op", host="import os; os._exit(7)")
    folder = planted(tmp_path, "living_op")
    code, results = report(capsys, "--ops", str(folder), *TRITON[:-1], "1", "--github")
    assert code == cli.UNDETERMINED
    assert {r["op"]: r["outcome"] for r in results} == {"deadly_op": "unknown", "living_op": "compiled"}
    assert "the compiler's process died" in next(r["reason"] for r in results if r["outcome"] == "unknown")


def test_a_changed_source_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "behind_a_key"
    (package / "op").mkdir(parents=True)
    for file, text in (("__init__", ""), ("op/__init__", ""), ("op/triton", "from behind_a_key import shared"), ("shared", "A = 1")):
        (package / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def key(case: str = "") -> str:
        for cached in (sources._spec, sources.files_behind, sources._digest):
            cached.cache_clear()
        return sources.key("behind_a_key.op.triton", "behind_a_key.op", "triton", {"case": case})

    first = key()
    assert key() == first != key("other")
    (package / "shared.py").write_text("A = 2")
    assert key() != first


# ---- what is compiled is what the launcher launches --------------------------------------------------------------------


def _launch(folder: Path, **how: Any) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"planted_{folder.name}", planted(folder, "launched", **how) / "launched" / "triton.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.forward


def test_the_launchers_grid_warps_and_alignment(tmp_path: Path) -> None:
    from kdk.backends.triton.compile import compile_for

    forward = _launch(tmp_path, block=2048, warps=8)
    x = torch.empty(1 << 16, dtype=torch.float32, device="meta")
    (launch,) = compile_for(forward, (x,), "sm_90").resources["launches"]
    assert (launch["kernel"], launch["grid"], launch["warps"], launch["widest_load_bits"]) == ("copy", [32, 1, 1], 8, 128)
    (shifted,) = compile_for(forward, (x[1:],), "sm_90").resources["launches"]
    assert shifted["widest_load_bits"] == 32, "a tensor that begins in between is not loaded in wide words"


def test_a_repeated_call_of_a_kernel_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same shapes, dtypes and constants: one simulation. 0, 0.0 and False are three constants; a written argument comes back."""
    LANGUAGES["nki"].module("launch").prepare()
    import nki.isa as nisa
    import nki.language as nl

    from kdk.backends.nki import compile as compiler
    from kdk.backends.nki.launch import run as call

    traced, got = [], []

    def fill(x: Any, constant: Any) -> Any:
        traced.append(constant)
        tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=float(constant))
        nisa.dma_copy(dst=x, src=tile)
        return x

    def function(x: torch.Tensor) -> None:
        for constant in (0, 0, 0.0, False, 0):
            got.append((x, *call(fill, x, constant)))
        got.append((x[:1], *call(fill, x[:1], 0)))

    resources = compiler.compile_for(function, (torch.empty(2, 4, device="meta"),), "trn2").resources
    assert list(map(repr, traced)) == ["0", "0.0", "False", "0"]
    assert [launch["calls"] for launch in resources["launches"]] == [3, 1, 1, 1] and resources["instructions"] == 12
    assert all(given is returned for given, returned in got[:-1])


@pytest.mark.parametrize("chip, processors", [("sm_80", 108), ("sm_90", 132), ("gfx942", 304)])
def test_a_launcher_sees_the_chip_that_it_is_compiled_for(chip: str, processors: int) -> None:
    from kdk.backends.triton import absent

    x = torch.empty(4, 8, device="meta")
    with absent.device(chip):
        assert x.device == torch.device("cuda", 0) and x.is_cuda and torch.cuda.current_device() == 0
        assert torch.empty(3, device=x.device).device.type == "cuda" and x.to("cuda") is not None
        assert torch.cuda.get_device_properties(x.device).multi_processor_count == processors
        assert (x[1:].data_ptr() - x.data_ptr(), x.data_ptr() % 16) == (32, 0)
        assert bool(torch.version.hip) == chip.startswith("gfx")
        with torch.cuda.device(0):
            pass
    assert x.device.type == "meta" and not torch.cuda.is_available() and not torch.version.hip


def test_budgets_of_a_gpu() -> None:
    from kdk.backends.triton.resources import exceeded

    fits = {"kernel": "k", "spills": 0, "registers": 128, "warps": 4, "shared_bytes": 1024, "shared_limit": 232448, "occupancy": 0.5}
    assert exceeded(fits, "sm_90") == []
    assert "bytes of shared memory, limit 232448" in exceeded({**fits, "shared_bytes": 300000}, "sm_90")[0]
    assert "no block fits" in exceeded({**fits, "occupancy": 0.0, "occupancy_limit": "registers"}, "sm_90")[0]
    assert "tensor memory, limit 512" in exceeded({**fits, "tensor_memory_columns": 600}, "sm_100")[0]


# ---- the command -------------------------------------------------------------------------------------------------------


def test_a_timeline_opens_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    row = ["silu_and_mul", "--direction", "forward", "--dtype", "bfloat16", "--case", "llama-3-8b decode", "--jobs", "0"]
    assert run(*row, "--target", "neuron", "--timeline", str(file)) == cli.HOLDS
    content = json.loads(file.read_text())
    assert content["otherData"] == {"evidence": "modelled"}
    names = {e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 2 and all(
        any(n.startswith(f"silu_and_mul.forward nki {chip} bfloat16:") for n in names) for chip in ("trn2", "trn3")
    )
    spans = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert len({e["pid"] for e in spans}) == 2
    assert run(*row, "--target", "sm_90", "--timeline", str(file)) == cli.USAGE
    assert "NKI kernels have one" in capsys.readouterr().err
    assert run(*row, "--target", "trn2", "--timeline", str(tmp_path / "nowhere" / "trace.json")) == cli.USAGE
    assert "the timeline cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rms_nrom"], "there are"),
        (["--implementation", "reference"], "there are"),
        (["--target", "h100"], "chips are"),
        (["--dtype", "int4"], "nothing to compile"),
        (["rms_norm", "--case", "no such model"], "llama-3-8b"),
    ],
)
def test_usage_errors(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == cli.USAGE
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and not captured.out


def test_refused_by_the_declaration_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, results = report(capsys, "rms_norm", "--target", "v6e", "--dtype", "float16", "--jobs", "0")
    assert (code, {r["outcome"] for r in results}) == (cli.HOLDS, {"refused"})
    assert all(r["holds"] and "no float16" in r["reason"] for r in results)


def test_exit_codes_and_annotations() -> None:
    row = Row("a", "forward", "triton", "sm_90", "float32")
    holds, refused = Result(row, "c", "compiled"), Result(row, "c", "refused", "supports() says so")
    broken, unknown = Result(row, "c", "refused", "the compiler", holds=False), Result(row, "c", "unknown")
    assert exit_code([holds, refused]) == 0 and exit_code([]) == 3
    assert exit_code([holds, unknown]) == 3 and exit_code([unknown, broken]) == 1
    assert [line.partition(" ")[0] for line in github_lines([holds, refused, broken, unknown])] == ["::error", "::warning"]


@pytest.mark.slow
def test_every_kernel_holds_on_every_chip(capsys: pytest.CaptureFixture[str]) -> None:
    code, results = report(capsys, "--jobs", "2")
    assert {r["target"] for r in results} == set(TARGETS) and {r["implementation"] for r in results} == set(LANGUAGES)
    assert code == cli.HOLDS, [r for r in results if not r["holds"]]


def test_linear_recurrence_whose_time_is_cut_into_segments() -> None:
    """A chip with many processors gets segments, and a branch that sets where the walk ends."""
    result = rows.compile_task(rows.Task(Row("linear_recurrence", "forward", "triton", "sm_120", "bfloat16")))
    assert result.outcome == "compiled", result.reason


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rms_norm_backward_of_the_longest_rows_spills_nothing(dtype: str, target: str) -> None:
    for op in ("rms_norm", "add_rms_norm"):
        result = rows.compile_task(rows.Task(Row(op, "backward", "triton", target, dtype), "llama-3-405b"))
        assert (result.outcome, result.resources["spills"]) == ("compiled", 0), result.reason
