"""`kdk tune`: what it searches, what it records, what it prints, and its exit codes. Costs are made up, so that the search is what
is tested; what a cost is worth is tested with the models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import kdk.ops
from kdk import tuning
from kdk.backends import LANGUAGES, TARGETS
from kdk.errors import UsageError
from kdk.registry import OPERATORS
from kdk_bench import listing
from kdk_bench.benchmarking.measuring import Heat, Race, case_named
from kdk_bench.modelled import pallas, running
from kdk_bench.modelled.rows import MODELLED, Cost, Row
from kdk_bench.tune import in_blocks, search
from kdk_bench.tune.command import tune_command
from kdk_bench.tune.in_blocks import KNOWN, InBlock

OP = OPERATORS["rms_norm"].op
CASE = case_named("rms_norm", "llama-3-8b")[0]
ABSENT = {name: language.module("compile").missing() for name, language in LANGUAGES.items()}
needs_pallas = pytest.mark.skipif(bool(ABSENT["pallas"]), reason=str(ABSENT["pallas"]))


def command(*arguments: str) -> Result:
    return CliRunner().invoke(tune_command, list(arguments), standalone_mode=False, catch_exceptions=False)


class Fake:
    """A model whose costs are a function of the launch parameters, by the name of the bound function."""

    costs: Mapping[str, float] = {}
    reference: Cost = Cost((2.0,), 2.0, "2 s", "modelled")

    def __init__(self, directory: str | None) -> None: ...

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def cost(self, function: Any, args: tuple[Any, ...], target: str) -> Cost:
        seconds = self.costs.get(function.__name__)
        return Cost((seconds,), seconds, f"{seconds} s", "modelled") if seconds else Cost(why_not="the compiler refuses it")

    def plain(self, heat: Heat, args: tuple[Any, ...]) -> Cost:
        return self.reference


def with_costs(monkeypatch: pytest.MonkeyPatch, **costs: float) -> None:
    monkeypatch.setattr(pallas, "Model", type("Model", (Fake,), {"costs": costs}))


def tuned(tmp_path: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    file = tmp_path / "report.json"
    done = command("rms_norm", "--target", "v6e", "--direction", "forward", *arguments, "--json", str(file))
    report = json.loads(file.read_text())
    assert report["schema"] == "kdk.tune/1"
    return done, report


@needs_pallas
def test_the_best_of_the_legal_ones_is_recorded_and_what_it_gained_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_costs(monkeypatch, forward=4.0, forward_rows_64=3.0, forward_rows_128=1.0, forward_rows_1024=0.1)
    done, report = tuned(tmp_path)
    (result,) = report["results"]
    assert done.return_value == 0 and result["outcome"] == "tuned" and result["parameters"] == {"rows": 128}
    assert (result["before_seconds"], result["after_seconds"], result["ratio"], result["alone"]) == (4.0, 1.0, 0.25, 0.5)
    tried = {t["parameters"]["rows"]: t["reason"] for t in result["tried"]}
    assert 1024 not in tried, "`supports` does not take it: it is not compiled"
    assert tried[16] == "the compiler refuses it" and tried[64] == ""
    said = " ".join(done.output.split())
    assert "0.25" in said and "rows=128" in said and "4.0 s" in said and "modelled" in said
    part = tuning.table(OP, "v6e").part("launch", "forward", "bfloat16", CASE.sizes)
    assert part is not None and part["parameters"] == {"rows": 128} and part["evidence"] == "modelled" and part["environment"]["torch"]
    alone = tuning.table(OP, "v6e").part("alone", "forward", "bfloat16", CASE.sizes)
    assert alone is not None and (alone["winner"], alone["ratio"]) == ("kernel", 0.5)
    assert tuning.user_file(OP, "v6e").exists() and not tuning.shipped_file(OP, "v6e").exists()


@needs_pallas
def test_where_nothing_gains_the_kernel_chooses_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_costs(monkeypatch, forward=4.0, forward_rows_64=3.0)
    tuned(tmp_path, "--shipped")
    assert tuning.shipped_file(OP, "v6e").exists() and not tuning.user_file(OP, "v6e").exists()
    with_costs(monkeypatch, forward=1.0, forward_rows_64=0.995)  # less than LEAST_GAIN
    done, report = tuned(tmp_path, "--shipped")
    assert done.return_value == 0 and report["results"][0]["outcome"] == "kept"
    assert tuning.table(OP, "v6e").part("launch", "forward", "bfloat16", CASE.sizes) is None
    assert tuning.table(OP, "v6e").part("alone", "forward", "bfloat16", CASE.sizes) is not None


@needs_pallas
def test_what_is_unknown_and_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_costs(monkeypatch)
    done, report = tuned(tmp_path)
    assert done.return_value == 3 and report["results"][0]["outcome"] == "unknown" and "the compiler refuses it" in done.output
    assert not tuning.user_file(OP, "v6e").exists()

    def broken(*_: Any) -> Cost:
        raise ValueError("a fault of the kernel's own")

    monkeypatch.setattr(pallas.Model, "cost", broken)
    done, report = tuned(tmp_path)
    assert done.return_value == 1 and "a fault of the kernel's own" in report["results"][0]["reason"]


def test_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["no_such", "--target", "v6e"], ["rms_norm", "--target", "v9"], ["rms_norm", "--target", "v6e", "--case", "x"]):
        with pytest.raises(UsageError):
            command(*arguments)
    monkeypatch.setattr("kdk_bench.places.local_targets", dict)
    with pytest.raises(UsageError, match="no target, and no accelerator is here"):
        command("rms_norm")


@needs_pallas
def test_a_file_that_does_not_hold_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tuning.user_file(OP, "v6e")
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with_costs(monkeypatch, forward=4.0)
    with pytest.raises(kdk.errors.DeclarationError, match="KDK-TUNING"):
        tuned(tmp_path)
    assert file.read_text() == "{"


@pytest.mark.skipif(bool(ABSENT["nki"]), reason=str(ABSENT["nki"]))
def test_trainium_by_the_emulators_cost(tmp_path: Path) -> None:
    """The real cost model, on a decoding step: small enough."""
    file = tmp_path / "report.json"
    case = "llama-3-8b, batch of 64 decoding"
    done = command("rope", "--target", "trn2", "--direction", "forward", "--case", case, "--json", str(file))
    (result,) = json.loads(file.read_text())["results"]
    assert done.return_value == 0 and result["outcome"] in ("tuned", "kept") and result["evidence"] == "modelled"
    costs = {t["parameters"]["elements"]: t["seconds"] for t in result["tried"]}
    assert set(costs) == {512, 1024, 2048, 4096, 8192} and len(set(costs.values())) > 1
    assert result["after_seconds"] <= result["before_seconds"] and "roofline" not in result["alone_unknown"] and result["alone"] is None


def test_gpus_by_spills_bytes_occupancy_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from kdk.backends import Compiled
    from kdk_bench.modelled.triton import Model

    def costs(**found: Any) -> Cost:
        usual = {"spills": 0, "array_bytes": 10, "occupancy": 0.5, "widest_load_bits": 128, "registers": 32}
        answer = Compiled("sm_90", "compiled", "", {**usual, **found})
        monkeypatch.setattr(LANGUAGES["triton"].module("compile"), "compile_for", lambda *_: answer)
        return Model(None).cost(None, (), "sm_90")

    usual = costs()
    for worse in ({"spills": 1, "occupancy": 1.0}, {"array_bytes": 11}, {"occupancy": 0.4}, {"widest_load_bits": 64}):
        assert costs(**worse).order > usual.order
    assert costs(occupancy=1.0).order == usual.order and usual.seconds is None and usual.evidence == "compiled"


def test_on_a_device_candidates_take_turns_and_a_wrong_one_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the device: what the launcher would run there is the reference, and a fault with eight warps."""
    launch = LANGUAGES["triton"].module("launch")
    if launch.missing("cpu"):
        pytest.skip(launch.missing("cpu"))

    def run(function: Any, args: tuple[Any, ...]) -> Any:
        y, rstd = OP.reference(*args)
        return (y + 1 if function.__name__.endswith("warps_8") else y, rstd)

    monkeypatch.setattr(launch, "run_on_device", run)
    monkeypatch.setattr(search, "SECONDS", 1e-3)
    case = case_named("rms_norm", "llama-3-8b decode")[0]
    found = search.tune(Heat("rms_norm", "forward", "float32", "sm_90", case.name, case.sizes, False), case, None, "cpu")
    assert found.outcome in ("tuned", "kept") and found.after.evidence == "measured" and found.alone is not None
    wrong = [p["warps"] for p, cost in found.tried if cost.why_not]
    assert set(wrong) == {8} and all(cost.seconds for p, cost in found.tried if p["warps"] != 8)
    assert "parameters" not in found.parts()["alone"] and Race is not None


# ---- blocks --------------------------------------------------------------------------------------------------------------

BLOCK = Heat("llama-3-8b: norm + projection", "backward", "bfloat16", "v6e", "llama-3-8b", {"tokens": 2048, "hidden": 4096}, False)
KEY = tuning.key("backward", "bfloat16", {"N": 2048, "H": 4096})


def test_the_worst_of_the_blocks_of_a_bucket_is_recorded() -> None:
    won, lost = (InBlock("rms_norm", BLOCK, KNOWN, "", us, 100.0, (KEY,)) for us in (90.0, 108.0))
    for order in ([won, lost], [lost, won]):
        (part,) = in_blocks.worst(order).values()
        assert (part["winner"], part["ratio"], part["block"]) == ("reference", 1.08, BLOCK.op)
    assert in_blocks.worst([InBlock("rms_norm", BLOCK, "unknown", "no")]) == {}


def test_an_operators_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two programs of a block differ in the operator's choice alone; the record's bucket is that of its calls in it."""
    seen = []

    def estimate(model: Any, heat: Heat, name: str, chosen: tuple[str, str]) -> Any:
        seen.append(chosen)
        return in_blocks.Estimate("v6e", 108.0 if chosen[1] == "pallas" else 100.0, 1, 1)

    monkeypatch.setattr(in_blocks, "_estimate", estimate)
    (found,) = in_blocks._of(None, "rms_norm", BLOCK, "norm + projection")  # type: ignore[arg-type]
    assert seen == [("rms_norm", "pallas"), ("rms_norm", "")] and found.ratio == 1.08 and found.keys == (KEY,)
    assert in_blocks._of(None, "rope", BLOCK, "norm + projection") == []  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio, calls", [(0.9, ["rms_norm"]), (1.08, [])])
def test_a_modelled_block_follows_the_record(ratio: float, calls: list[str]) -> None:
    """What is modelled as torch.compile's program is what the operators' front door makes of the record."""
    from kdk_bench.modelled.block_program import COMPILED, Program
    from kdk_bench.modelled.blocks import traced

    part = {"winner": tuning.winner(ratio), "ratio": ratio, "block": "b", "evidence": "modelled", "environment": {}, "date": "d"}
    tuning.write(tuning.user_file(OP, "v6e"), OP, "v6e", {tuning.key("forward", "bfloat16", {"N": 4, "H": 4096}): {"block": part}})

    def called(**changes: Any) -> list[str]:
        program = Program("llama-3-8b", "norm + projection", "forward", COMPILED, "v6e", **changes)
        return [op for op, _, _ in traced(program, program.arguments(4, torch.bfloat16)).found]

    assert called() == calls
    assert called(chosen=("rms_norm", "pallas")) == ["rms_norm"] and called(chosen=("rms_norm", "")) == []


def test_the_kernels_ratio_is_shown_though_its_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"winner": "reference", "ratio": 1.08, "block": BLOCK.op, "evidence": "modelled", "environment": {}, "date": "2026-11-30"}
    tuning.write(tuning.user_file(OP, "v6e"), OP, "v6e", {KEY: {"block": part}})
    (entry,) = [e for e in listing.entries() if e["name"] == "rms_norm"]
    cell = listing._cell(entry, "pallas")
    assert "v6e: backward the reference runs; kernel x1.08 in llama-3-8b: norm + projection, modelled 2026-11-30" in cell
    assert "v6e" not in listing._cell(entry, "triton") and entry["tuning"][0]["block"] == part
    heat = Heat("rms_norm", "backward", "bfloat16", "v6e", "c", {"N": 2048, "H": 4096}, False)
    row = running._with_selection(Row(heat, "kdk pallas", "pallas", MODELLED, us=1.0, ratios={"without kdk": 0.7}))
    assert "the reference runs; kernel x1.08" in row.caveats[-1] and pallas.cells is not None and row.ratios == {"without kdk": 0.7}
    assert running._with_selection(Row(heat, "torch", "", MODELLED)).caveats == () and TARGETS["v6e"] == "pallas"
