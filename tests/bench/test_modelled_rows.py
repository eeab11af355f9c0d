"""`kdk bench --target` for chips that are not here: rows, their ratios, their tables, and the joint graph of a block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import kdk.ops  # noqa: F401
from kdk.backends import LANGUAGES
from kdk.errors import UsageError
from kdk.registry import OPERATORS
from kdk_bench import evidence
from kdk_bench.bench_command import bench_command
from kdk_bench.benchmarking import page
from kdk_bench.benchmarking.measuring import Heat
from kdk_bench.declared_cases import cases_of
from kdk_bench.modelled import block_program, blocks, inductor, nki, pallas, running, torchtpu
from kdk_bench.modelled.rows import FAILED, MODELLED, REFUSED, UNKNOWN, Row
from kdk_bench.modelled.tpu import Estimate

HEAT = Heat("rms_norm", "forward", "bfloat16", "v6e", "c", {"N": 8, "H": 8}, False)
ABSENT = {name: language.module("compile").missing() for name, language in LANGUAGES.items()}


def command(*arguments: str) -> Result:
    return CliRunner().invoke(bench_command, list(arguments), standalone_mode=False, catch_exceptions=False)


def said(done: Result) -> str:
    return " ".join(done.output.split())


def modelled(tmp_path: Path, *arguments: str) -> tuple[Result, list[dict[str, Any]]]:
    file = tmp_path / "report.json"
    done = command(*arguments, "--json", str(file))
    report = json.loads(file.read_text())
    assert report["schema"] == "kdk.bench/1"
    return done, report["results"]


# ---- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(ABSENT["pallas"]), reason=str(ABSENT["pallas"]))
def test_a_tpu_without_torchtpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtpu, "where", lambda: None)
    done, (own, plain) = modelled(tmp_path, "rms_norm", "--target", "v6e", "--direction", "forward")
    assert done.return_value == 3 and "v6e: modelled; roofline" in said(done)
    assert plain["outcome"] == "unknown" and "make .venv-tpu/.installed" in plain["reason"] and plain["evidence"] == ""
    assert own["evidence"] == own["outcome"] == "modelled" and own["implementation"] == "pallas" and own["samples"] == []
    sides = own["cycles"] / own["clock"], own["hbm_bytes"] / own["hbm_bandwidth"]
    assert own["modelled_seconds"] == pytest.approx(max(sides)) and own["bound"] == ("cycles" if sides[0] > sides[1] else "memory")
    assert own["ratios"] == {"roofline": pytest.approx(own["modelled_seconds"] / own["roofline_seconds"])}
    assert own["bytes"] == 2 * (2 * 4096 * 4096 + 4096)


@pytest.mark.skipif(bool(ABSENT["nki"]), reason=str(ABSENT["nki"]))
def test_engines_of_trainium(tmp_path: Path) -> None:
    done, (own,) = modelled(tmp_path, "rms_norm", "--target", "trn2", "--direction", "forward")
    assert done.return_value == 0 and "trn2: modelled" in said(done) and own["evidence"] == "modelled"
    engines, (low, high) = own["engine_seconds"], own["bounds_seconds"]
    assert engines[own["limiting"]] == max(engines.values()) == pytest.approx(low)
    assert low <= own["modelled_seconds"] <= high and own["hbm_bytes"] >= own["bytes"]


@pytest.mark.skipif(bool(ABSENT["nki"]), reason=str(ABSENT["nki"]))
@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul"])
def test_nki_kernels_stay_near_the_bound_of_their_bytes(op: str) -> None:
    """Their next tile is on its way while one is computed, and no engine has more to do than the data takes to arrive."""
    (row,) = running.run(running.heats([op], ["forward"], "", (), ["trn2"]), None)
    assert row.ratios["roofline"] <= 1.6


@pytest.mark.slow
@pytest.mark.skipif(bool(ABSENT["nki"]), reason=str(ABSENT["nki"]))
def test_a_row_that_does_not_end_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = running.heats(["rms_norm", "cumsum"], ["forward"], "", (), ["trn2"])
    assert [row.outcome for row in running.run(plan, None)] == [MODELLED, MODELLED]
    monkeypatch.setattr(nki, "APART", 1e-3)
    assert [(row.outcome, row.reason) for row in running.run(plan, None)] == 2 * [(UNKNOWN, "not traced and modelled within 0 s")]


@pytest.mark.skipif(bool(ABSENT["triton"]), reason=str(ABSENT["triton"]))
def test_a_gpu_has_bytes_and_resources_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "kernels", lambda *_: ({}, "not today"))
    done, (own, other) = modelled(tmp_path, "rms_norm", "--target", "sm_90", "--direction", "forward", "--case", "llama-3-8b")
    assert done.return_value == 3 and other["reason"] == "not today" and "sm_90: compiled, no times" in said(done)
    assert own["evidence"] == "compiled" and own["modelled_seconds"] is None and own["resources"]["spills"] == 0
    # x, weight and y; and rstd, which is kept for a backward
    assert own["array_bytes"] == own["bytes"] + 4 * 4096 and own["ratios"]["least bytes"] == pytest.approx(1, rel=1e-3)


MEMORY_BOUND = [name for name, o in OPERATORS.items() if o.op.kind != "algorithmic"]


@pytest.mark.skipif(bool(ABSENT["triton"]), reason=str(ABSENT["triton"]))
@pytest.mark.parametrize("name", MEMORY_BOUND)
def test_unique_bytes_of_what_waits_for_memory(name: str) -> None:
    """At most 1.05 times the least, at the first shape of a model that can be interpreted, with few rows or images."""
    from kdk_bench.modelled.triton import Model

    op = OPERATORS[name].op
    heats = ((Heat(op.name, "forward", "bfloat16", "sm_90", case.name, case.sizes, False), case) for case in cases_of(op).models)
    found = next(found for heat, case in heats if (found := Model(None).unique(heat, case))["unique_bytes"] is not None)
    assert 0.9 < found["unique_bytes"] / found["unique_least_bytes"] <= 1.05


def test_usage() -> None:
    for arguments in (["--target", "v6e", "--device", "cpu"], ["--target", "v9"], ["--target", "v6e", "--case", "no such"]):
        with pytest.raises(UsageError):
            command("rms_norm", *arguments)
    with pytest.raises(UsageError, match="KDK-BLOCK"):
        command("--block", "no-such-model", "--target", "v6e")


def estimated(us: float, cycles: int | None, hbm_bytes: int, at_least: bool) -> Row:
    return pallas.entry(HEAT, "someone", "", Estimate("v6e", us, cycles, hbm_bytes, at_least=at_least))


def test_what_takes_at_least_its_time_bounds_the_ratio() -> None:
    full, part, none = estimated(2.0, 1000, 100, False), estimated(8.0, 400, 50, True), estimated(1.0, None, 25, True)
    assert [row.ratios["without kdk"] for row in pallas.compared([full, full], full)] == [1.0, 1.0]
    (row, same) = pallas.compared([full, part], part)
    assert row.ratios == {"without kdk, at most": 0.25} and pallas.cells(row)[-1] == "≤ 0.25" and "at most that" in row.caveats[-1]
    assert same.ratios == {"without kdk": 1.0} and pallas.cells(same)[0].startswith("≥ 8.0 us") and not same.caveats
    (row,) = pallas.compared([part], full)
    assert row.ratios == {"without kdk, at least": 4.0} and pallas.cells(row)[-1] == "≥ 4.00" and "is at least that" in row.caveats[-1]
    (row,) = pallas.compared([none], part)  # the cycles of both are of parts: of other parts
    assert row.ratios == {"without kdk, HBM bytes": 0.5} and "that of the HBM bytes" in row.caveats[-1]
    assert "HBM alone" in pallas.cells(row)[0] and pallas.cells(row)[-1] == "bytes 0.50"
    unknown = pallas.entry(HEAT, "someone", "", Estimate("v6e", None, why_not="no"))
    assert pallas.compared([full], unknown) == [full] and unknown.outcome == UNKNOWN


def test_exit_codes() -> None:
    own = Row(HEAT, "kdk pallas", "pallas", MODELLED, us=1.0)
    refused = Row(HEAT, "kdk pallas", "pallas", REFUSED, "float16")
    assert running.exit_code([own, refused]) == 0 and running.exit_code([refused]) == 3
    assert running.exit_code([own, Row(HEAT, "torch", "", UNKNOWN)]) == 3
    assert running.exit_code([own, Row(HEAT, "torch", "", UNKNOWN), Row(HEAT, "kdk pallas", "pallas", FAILED)]) == 1


def test_evidence_and_the_page() -> None:
    def row(contender: str, implementation: str, ratio: float, **changes: Any) -> dict[str, Any]:
        values = {"heat": HEAT, "outcome": MODELLED, "us": 1.0, "ratios": {"roofline": ratio}, "caveats": ("as it were",), **changes}
        return Row(contender=contender, implementation=implementation, **values).as_json()

    results = [row("kdk pallas", "pallas", 1.5), row("kdk pallas", "pallas", 2.5), row("torch", "", 3.0), row("a block", "default", 4.0)]
    (record,) = evidence.from_report({"schema": "kdk.bench/1", "results": results})
    assert record["evidence"] == "modelled" and record["ratios"] == {"roofline": 2.5} and record["case"] == "c"
    bad = row("kdk pallas", "pallas", 1.0, outcome=FAILED)
    assert evidence.from_report({"schema": "kdk.bench/1", "results": [*results, bad]}) == []
    text = page.render([*results, bad], [])
    assert "2.50 x roofline" in text and "as it were" in text and "Modelled or compiled, not measured" in text and "failed:" in text


# ---- blocks ------------------------------------------------------------------------------------------------------------


def test_a_sequence_is_cut_and_other_chips_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_described", lambda model, name: (4096, 10**9, 0))
    plan = blocks.heats("llama-3-8b", 2048, ["forward", "backward"], ["bfloat16"], ["trn2"])
    assert [(heat.sizes["tokens"], heat.cut) for heat, _ in plan[:2]] == [(128, True), (32, True)]
    rows = blocks.run(plan)
    assert {(row.outcome, row.reason) for row in rows} == {(UNKNOWN, blocks.NOT_TPU)} and running.exit_code(rows) == 3


@pytest.mark.parametrize("name", list(blocks.BLOCKS))
def test_the_joint_graph_is_what_autograd_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kdk_bench.benchmarking.blocks import MODELS

    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    monkeypatch.setitem(MODELS, "tiny", ("Llama", tiny))
    program = block_program.Program("tiny", name, "backward", block_program.KERNELS)
    module, _ = program.module(torch.float32)
    torch.manual_seed(0)
    described = program.arguments(8, torch.float32)
    values = [torch.rand(t.shape) for t in described]
    names = list(block_program._tensors(module))

    def run(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, dict(zip(names, given, strict=True)), (x,))  # type: ignore[no-any-return]

    leaves = [v.clone().requires_grad_() for v in values]
    wanted = [leaf for leaf, n in zip(leaves, ["x", *names]) if not n.endswith("inv_freq")]
    y = run(*leaves)
    expected = [y, *torch.autograd.grad(y, wanted, torch.ones_like(y))]

    if name == "attention":  # in the graph it is the kernel of another back end, which no CPU has
        assert [t.shape for t in program(*described)] == [t.shape for t in expected]
        return
    for got, right in zip(program(*values), expected, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.slow
@pytest.mark.skipif(torchtpu.missing() is not None, reason="torch_tpu is not here: make test-tpu installs it beside the environment")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_block_with_and_without_kdk(direction: str) -> None:
    plan = [(h, name) for h, name in blocks.heats("llama-3-8b", 256, [direction], ["bfloat16"], ["v6e"]) if name == "norm + projection"]
    rows = {row.contender: row for row in blocks.run(plan)}
    assert {row.outcome for row in rows.values()} == {MODELLED}
    plain, kernels = rows[block_program.PLAIN], rows[block_program.KERNELS]
    assert plain.ratios == {"without kdk": 1.0} and kernels.ratios["without kdk"] == pytest.approx((kernels.us or 0) / (plain.us or 1))
    assert kernels.figures["hbm_bytes"] != plain.figures["hbm_bytes"], "the kernel is in the program"


@pytest.mark.slow
@pytest.mark.skipif(bool(ABSENT["triton"]), reason=str(ABSENT["triton"]))
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_inductors_kernel(tmp_path: Path, target: str) -> None:
    done, (_, other) = modelled(tmp_path, "rms_norm", "--target", target, "--direction", "forward")
    assert done.return_value == 0 and other["contender"] == "Inductor" and other["evidence"] == "compiled"
    assert other["array_bytes"] == other["bytes"], "one kernel, every array once"
    assert other["resources"]["registers"] > 0 and len(other["resources"]["launches"]) == 1
