"""`kdk audit` from a model to its findings."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kdk_bench import cli

MODELS = "tests.audit.models"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", *arguments])
    return int(ended.value.code or 0)


def report(tmp_path: Path, model: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "report.json"
    code = run(f"{MODELS}:{model}", "--json", str(file), *arguments)
    return code, json.loads(file.read_text())


def of_kind(result: dict[str, Any], kind: str, platform: str = "") -> list[dict[str, Any]]:
    return [f for f in result["findings"] if f["kind"] == kind and (not platform or f["platform"] == platform)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report(tmp_path_factory.mktemp("llama"), "llama", "--train")[1]


def test_a_llama_is_whole_on_tpu_and_every_formula_in_it_is_found(trained: dict[str, Any]) -> None:
    assert trained["schema"] == "kdk.audit/1" and not trained["capture"]["error"]
    assert not of_kind(trained, "missing") and not of_kind(trained, "unknown", "tpu") and not of_kind(trained, "unknown", "cuda")
    chains = trained["capture"]["chains"]
    norms = chains["rms_norm"] + chains["add_rms_norm"]
    assert sorted(norms) == sorted(
        [*(f"model.layers.{i}.{n}" for i in range(2) for n in ("input_layernorm", "post_attention_layernorm")), "model.norm"]
    )
    assert chains["silu_and_mul"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert chains["rope"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for finding in of_kind(trained, "chain"):
        assert finding["filled_by"]["what"] == "kdk" or finding["pattern"] not in ("rms_norm", "add_rms_norm", "silu_and_mul", "rope")
        assert finding["evidence"]["kind"] == "measured"
        assert finding["cost"]["now"] > finding["cost"]["after"] > 0 and finding["cost"]["evidence"] == "modelled"


def test_every_phase_is_there_with_its_module_and_line(trained: dict[str, Any]) -> None:
    ops = {(o["op"], o["phase"]): o for o in trained["ops"]}
    assert {o["phase"] for o in trained["ops"]} == {"forward", "backward", "optimiser"}
    assert "model.layers.0.mlp.down_proj" in [
        m for o in trained["ops"] if o["op"] == "aten::mm" and o["phase"] == "backward" for m in o["modules"]
    ]
    silu = ops["aten::silu", "forward"]
    assert silu["count"] == 2 and silu["bytes"] == 2 * 2 * 2 * 16 * 128 * 4 and silu["functions"] == ["torch.nn.functional.silu"]
    forward = [o for o in trained["ops"] if o["op"] == "aten::mm" and o["phase"] == "forward"]
    tokens, hidden, inner = 32, 64, 128
    per_layer = 2 * tokens * (hidden * hidden * 2 + hidden * 32 * 2 + 3 * hidden * inner)
    assert sum(o["flops"] for o in forward) == 2 * per_layer + 2 * tokens * hidden * 128


def test_memory_is_predicted(trained: dict[str, Any]) -> None:
    memory = trained["capture"]["memory"]
    parameters = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 128 * 64
    assert memory["gradients"] == parameters * 4 and memory["parameters"] >= parameters * 4
    assert memory["optimiser"] >= 2 * parameters * 4 and memory["activations"] > 0
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")


@pytest.mark.slow
def test_a_llama_takes_less_than_twenty_seconds() -> None:
    command = [sys.executable, "-m", "kdk_bench.cli", "audit", f"{MODELS}:llama", "--train", "--target", "tpu,neuron,xla,cuda"]
    subprocess.run(command, capture_output=True, check=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: other tests run beside this one.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 20


def test_nothing_unknown_is_called_supported(trained: dict[str, Any]) -> None:
    """Neuron's published list names few operators: the others are unknown, and that is no success."""
    assert of_kind(trained, "unknown", "neuron")
    names = {(o["op"]): o["support"]["neuron"]["status"] for o in trained["ops"]}
    assert names["aten::rsqrt"] == "unknown" and names["aten::mm"] == "native"


def test_missing_fallback_sync_and_data_dependent_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = report(tmp_path, "median")
    assert code == cli.DOES_NOT_HOLD
    (missing,) = of_kind(result, "missing", "tpu")
    assert missing["op"] == "aten::median" and missing["blocking"] and missing["filled_by"]["what"] == "rewrite"
    assert missing["line"].startswith("tests/audit/models.py:")
    (fallback,) = of_kind(result, "fallback", "xla")
    assert fallback["op"] == "aten::median" and not fallback["blocking"] and fallback["cost"]["now"] > fallback["cost"]["after"]
    assert [f["op"] for f in of_kind(result, "sync")] == ["aten::_local_scalar_dense"]
    assert "aten::index.Tensor" in [f["op"] for f in of_kind(result, "dynamic")]
    (broken,) = of_kind(result, "graph break")
    assert "data-dependent" in broken["says"].lower() or "unbacked" in broken["says"].lower() or "Guard" in broken["says"]
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("tpu (v6e) operators: 1 missing") and "code lines" in first and "compilation" in first and "%" not in first


def test_the_baseline_lets_known_gaps_pass_and_new_ones_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    target = ("--target", "tpu")
    assert run(f"{MODELS}:median", *target, "--json", str(old)) == cli.DOES_NOT_HOLD
    assert run(f"{MODELS}:median", *target, "--baseline", str(old)) == cli.HOLDS
    assert run(f"{MODELS}:median", *target, "--fail-on", "unknown") == cli.HOLDS
    known = json.loads(old.read_text())
    known["findings"] = [f for f in known["findings"] if f["kind"] != "missing"]
    known["findings"] += [{**known["findings"][0], "id": f"chain-{p}-0", "platform": p} for p in ("tpu", "xla")]
    old.write_text(json.dumps(known))
    capsys.readouterr()
    assert run(f"{MODELS}:median", *target, "--baseline", str(old)) == cli.DOES_NOT_HOLD
    out = capsys.readouterr().out
    assert "chain-tpu-0" in out and "chain-xla-0" not in out and "the baseline is of" not in out  # xla was not asked for
    assert run(f"{MODELS}:ok", *target, "--baseline", str(old)) == cli.HOLDS
    assert f"the baseline is of {MODELS}:median on tpu" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "schema"), [("--baseline", "kdk.audit"), ("--evidence", "kdk.probe")])
@pytest.mark.parametrize(("version", "said"), [("0", "not a report of this kind"), ("1", "is damaged")])
def test_reports_of_another_schema_and_damaged_ones(
    option: str, schema: str, version: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    heads = dict.fromkeys(("capture", "model", "platforms", "platform", "device", "versions", "date"), "tpu")
    for rows in ({}, {**heads, "findings": [{}], "ops": [{}]}):
        file.write_text(json.dumps({"schema": f"{schema}/{version}", **rows}))
        assert run(f"{MODELS}:median", option, str(file)) == cli.USAGE
        assert said in capsys.readouterr().err


def test_evidence_of_another_platform_is_refused_and_of_another_model_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "probe.json"
    row = {"op": "aten::cos", "tensors": ["float32[3]"], "outcome": "native"}
    for platform, code, said in (("cpu", cli.USAGE, "another platform: got cpu"), ("tpu", cli.DOES_NOT_HOLD, "another model's")):
        head = {"schema": "kdk.probe/1", "platform": platform, "device": "d", "versions": "v", "date": "2026-01-01"}
        file.write_text(json.dumps({**head, "ops": [row]}))
        assert run(f"{MODELS}:median", "--target", "tpu", "--evidence", str(file)) == code
        captured = capsys.readouterr()
        assert said in (captured.out + captured.err).replace("\n", " ")


def test_what_a_model_prints_does_not_get_into_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "ok.py"
    script.write_text("import torch\nprint('hello')\nprint(torch.nn.Linear(2, 2)(torch.ones(2)))\n")
    run("--script", str(script), "--target", "tpu", "--json", "-")
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model"].endswith("ok.py") and "hello" in captured.err
    run("--script", str(script), "--target", "tpu")
    assert "ok.py: script" in capsys.readouterr().out.replace("\n", "")


def test_a_name_between_colons_is_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{MODELS}:ok", "--target", "tpu") == cli.HOLDS
    assert f"{MODELS}:ok: eager run" in capsys.readouterr().out


def test_lines_that_ask_for_cuda_are_found_where_they_stand(tmp_path: Path) -> None:
    result = report(tmp_path, "on_cuda")[1]
    source = Path(__file__).with_name("models.py").read_text().splitlines()
    lines = {f["line"]: f for f in of_kind(result, "code")}
    wanted = [i + 1 for i, text in enumerate(source) if "cuda" in text and "def " not in text and '"""' not in text]
    assert set(lines) == {f"tests/audit/models.py:{i}" for i in wanted} and len(wanted) == 3
    assert all(f["blocking"] and f["calls_per_step"] for f in lines.values())
    assert not of_kind(report(tmp_path, "on_cuda", "--target", "cuda")[1], "code")


def test_several_inputs_are_several_compilations(tmp_path: Path) -> None:
    result = report(tmp_path, "llama_lengths")[1]
    assert {f["platform"]: f["calls_per_step"] for f in of_kind(result, "shapes")} == {"neuron": 3, "xla": 3, "tpu": 2}


def test_explain_and_github(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = report(tmp_path, "median", "--target", "tpu", "--github")
    identity = of_kind(result, "missing")[0]["id"]
    assert "::error file=tests/audit/models.py,line=" in capsys.readouterr().out
    run(f"{MODELS}:median", "--target", "tpu", "--explain", identity)
    out = capsys.readouterr().out
    assert "aten::median" in out and "torch_tpu 0.2.0" in out and "forward x1" in out


BROKEN = """
import torch
from torch import nn

class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("boom")

class Idle(nn.Module):
    def forward(self, x):
        return x

def raises():
    return Raises(), (torch.randn(2, 4),)

def idle():
    return Idle(), (torch.randn(2, 4),)

def factory_raises():
    raise KeyError("nope")

def exits():
    raise SystemExit(3)

def wants_an_argument(width):
    return nn.Linear(width, 4), (torch.randn(2, 4),)

def yields_nothing():
    return
    yield

def no_dictionary():
    return nn.Linear(4, 4), (torch.randn(2, 4),), 3

def no_tuple():
    return nn.Linear(4, 4), torch.randn(2, 4)

def no_loss():
    return nn.Linear(4, 4), (torch.randn(2, 4),), {}, lambda out: 3

class Exits(nn.Module):
    def forward(self, x):
        raise SystemExit("enough")

def ends_the_process():
    return Exits(), (torch.randn(2, 4),)

def frozen():
    return nn.Linear(4, 4).requires_grad_(False), (torch.randn(2, 4),)

class Shapes(nn.Module):
    def forward(self, x):
        return x @ x

def within_torch():
    return Shapes(), (torch.randn(2, 4),)

class Nested(nn.Module):
    def forward(self, x):
        return torch.nested.nested_tensor([x[0], x[1, :2]]).to_padded_tensor(0.0)

def nested():
    return Nested(), (torch.randn(2, 4),)
"""


@pytest.mark.parametrize(
    ("factory", "code", "said"),
    [
        ("raises", cli.UNDETERMINED, "ValueError: boom (broken.py:7)"),
        ("idle", cli.UNDETERMINED, "called no operator"),
        ("factory_raises", cli.USAGE, "KeyError: 'nope' (broken.py:20)"),
        ("exits", cli.USAGE, "SystemExit: 3"),
        ("wants_an_argument", cli.USAGE, "without arguments"),
        ("yields_nothing", cli.USAGE, "the factory gave nothing"),
        ("no_dictionary", cli.USAGE, "(Linear, tuple, int)"),
        ("no_tuple", cli.USAGE, "(Linear, Tensor)"),
        ("no_loss", cli.USAGE, "a tensor with a gradient"),
        ("ends_the_process", cli.UNDETERMINED, "SystemExit: enough (broken.py:43)"),
        ("nested", cli.DOES_NOT_HOLD, "1 missing, of"),
        ("frozen", cli.USAGE, "no output of the model has a gradient"),
        ("within_torch", cli.UNDETERMINED, "(broken.py:53)"),
    ],
)
def test_broken_models_and_factories(
    factory: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    assert run(f"broken:{factory}", "--target", "tpu", *(["--train"] if factory in ("no_loss", "frozen") else [])) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "exactly one"),
        (["no.such:thing"], "no such module"),
        ([f"{MODELS}:nothing"], "no such function"),
        ([f"{MODELS}:Median"], "what the factory returned"),
        ([f"{MODELS}:median", "another"], "more than one MODEL"),
        (["--hf", "no/such.json"], "the config.json of a model"),
        (["--hf", "pyproject.toml"], "could not be read as JSON"),
        (["--script", "no_such.py"], "the path of a Python file"),
        (["--script", "setup.py", "--train"], "a script trains or not by itself"),
        (["--script", "setup.py", "--dtype", "bfloat16"], "a script chooses its dtypes"),
        ([f"{MODELS}:median", "--steps", "2"], "--steps without --script"),
        ([f"{MODELS}:median", "--ops", "no/such/folder"], "no such folder"),
        ([f"{MODELS}:median", "--import-table", "pyproject.toml"], "no table of operators"),
        ([f"{MODELS}:median", "--import-table", "no_such.md"], "could not be read"),
        ([f"{MODELS}:median", "--evidence", "no_such.json"], "of schema kdk.probe/1"),
        ([f"{MODELS}:median", "--json", "no/such/folder/r.json"], "cannot be written"),
        ([f"{MODELS}:median", "--target", "gpu"], "unknown target"),
        ([f"{MODELS}:median", "--fail-on", "new"], "--baseline"),
        ([f"{MODELS}:median", "--fail-on", "everything"], "unknown gate"),
        ([f"{MODELS}:median", "--dtype", "int4"], "unknown dtype"),
        ([f"{MODELS}:median", "--baseline", "pyproject.toml"], "could not be read as JSON"),
        (["nothing.pt2"], "could not be read"),
        ([f"{MODELS}:median", "--html", "no/such/folder/r.html"], "could not be written"),
        ([f"{MODELS}:median", "--emit-probe", "pyproject.toml"], "could not be written"),
        ([f"{MODELS}:median", "--explain", "missing-tpu-0"], "no finding has this id"),
    ],
)
def test_usage_errors(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == cli.USAGE
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err


def test_the_files_are_there_when_the_terminal_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("kdk_bench.audit.terminal.show", closed)
    run(f"{MODELS}:median", "--target", "tpu", "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    assert (tmp_path / "a.json").exists() and (tmp_path / "a.html").exists()
