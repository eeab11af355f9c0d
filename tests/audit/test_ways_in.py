"""The other ways to a capture: a script as it is, an exported program, a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kdk_bench import cli

SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
width = parser.parse_args().width
device = "cuda"
model = torch.compile(nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 4)).to(device))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss = nn.CrossEntropyLoss().cuda()
for step in range(100):
    assert step < 3, "more steps than asked for"
    x = torch.randn(4 + step % 2, 8).cuda(non_blocking=True)
    y = torch.randint(0, 4, (len(x),), device=torch.device("cuda"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value = loss(model(x), y)
    value.backward()
    optimiser.step()
    optimiser.zero_grad()
    torch.cuda.synchronize()
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", *arguments])
    return int(ended.value.code or 0)


def report(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    run("--target", "tpu", "--json", str(file), *arguments)
    return dict(json.loads(file.read_text()))


def test_a_script_runs_unchanged_for_so_many_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = report(tmp_path, "--script", str(script), "--steps", "3", "--", "--width", "16")
    capture = result["capture"]
    assert not capture["error"] and capture["steps"] == 3 and capture["train"]
    assert {o["phase"] for o in result["ops"]} == {"forward", "backward", "optimiser"}
    assert capture["memory"]["optimiser"] == capture["memory"]["gradients"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert {f["calls_per_step"] for f in result["findings"] if f["kind"] == "shapes"} == {2}
    met = {int(f["line"].rpartition(":")[2]): f for f in result["findings"] if f["kind"] == "code"}
    wanted = {i + 1 for i, line in enumerate(SCRIPT.splitlines()) if "cuda" in line or ".to(device)" in line}
    assert set(met) == wanted
    counted = {n: f["calls_per_step"] for n, f in met.items()}
    line = SCRIPT.splitlines().index("    x = torch.randn(4 + step % 2, 8).cuda(non_blocking=True)") + 1
    assert counted[line] == 3
    assert not torch.cuda.is_available()


def test_a_script_that_fails_is_reported_with_what_was_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import flash_attn\nimport torch\n")
    file = tmp_path / "report.json"
    assert run("--target", "tpu", "--json", str(file), "--script", str(script)) == cli.DOES_NOT_HOLD
    result = json.loads(file.read_text())
    assert "flash_attn" in result["capture"]["error"]
    assert [f["says"].partition(":")[0] for f in result["findings"] if f["kind"] == "library"] == ["flash_attn"]


def test_an_exported_program_is_forward_only_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(8, 8), nn.GELU()), (torch.randn(2, 8),))
    path = tmp_path / "model.pt2"
    torch.export.save(program, path)
    result = report(tmp_path, str(path))
    assert result["capture"]["how"] == "exported program" and not result["capture"]["train"]
    assert "exported program, forward only" in capsys.readouterr().out
    assert "aten::gelu" in {o["op"] for o in result["ops"]}
    assert run(str(path), "--train") == cli.USAGE


def test_a_configuration_is_costed_at_its_real_size(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    result = report(tmp_path, "--hf", str(path))
    weights = 4 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 2816 + 2 * 1024) + 1024 + 2 * 4096 * 1024
    assert result["capture"]["memory"]["parameters"] == 2 * weights
    assert len(result["capture"]["chains"]["silu_and_mul"]) == 4
    silu = next(o for o in result["ops"] if o["op"] == "aten::silu")
    assert silu["count"] == 4 and silu["tensors"] == ["bfloat16[1, 512, 2816]"]
    path.write_text('{"hidden_size": 3}')
    assert run("--hf", str(path)) == cli.USAGE
