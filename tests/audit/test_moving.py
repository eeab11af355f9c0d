"""What a first migration meets: cuda devices by number, wrappers, processes and threads, tensors of other layouts, damaged reports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdk.errors import UsageError
from kdk_bench.audit import audit, running, scripts, support
from kdk_bench.audit.command import read, targets_of
from kdk_bench.options import load

OPTIMISE = """
import os
import torch
from torch import nn
model = {model}
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.randn(2, 8, device={device})).sum().backward()
    optimiser.step()
for number in range(9):
    step()
    {after}
"""


class Of(nn.Module):
    """A linear layer, and a function of it and the inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.layer, *inputs)


def result(function: Any, *inputs: Any, train: bool = False) -> dict[str, Any]:
    load(None)
    session = running.run(lambda: (Of(function), inputs, {}), train)
    return audit.report(session.capture, support.platforms(["tpu"], {}, {}, ()), "model")


def script(tmp_path: Path, model: str = "nn.Linear(8, 8)", device: str = "'cpu'", after: str = "pass") -> Any:
    file = tmp_path / "train.py"
    file.write_text(OPTIMISE.format(model=model, device=device, after=after))
    return scripts.run_script(str(file), (), 3)


@pytest.mark.parametrize("device", ["torch.device('cuda', 0)", "torch.device(type='cuda', index=0)", "torch.device('cuda:1')", "'cuda'"])
def test_a_device_by_its_number_goes_to_the_cpu(tmp_path: Path, device: str) -> None:
    capture = script(tmp_path, device=device)
    assert not capture.error and len(capture.steps) == 3
    assert any(event.line.endswith("train.py:8") for event in capture.events)


def test_data_parallel_and_generators_go_to_the_cpu(tmp_path: Path) -> None:
    after = "assert isinstance(torch.Generator(device='cuda'), torch.Generator)"
    capture = script(tmp_path, model="nn.DataParallel(nn.Linear(8, 8)).cuda()", device="'cuda'", after=after)
    assert not capture.error and len(capture.steps) == 3
    assert {"nn.DataParallel", 'torch.Generator("cuda")'} <= {event.text for event in capture.events}


def test_os_exit_does_not_end_the_audit(tmp_path: Path) -> None:
    capture = script(tmp_path, after="os._exit(0)")
    assert len(capture.steps) == 1 and not capture.error
    assert script(tmp_path, after="os._exit(3)").error.startswith("SystemExit: 3")


def test_a_forked_process_writes_no_second_report(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(OPTIMISE.format(model="nn.Linear(8, 8)", device="'cpu'", after="pass").replace("def step", "os.fork()\ndef step"))
    program = f"from kdk_bench.audit.scripts import run_script; print(len(run_script({str(file)!r}, (), 2).steps), 'steps')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "2 steps\n", done.stderr


def test_tracing_asks_for_no_cuda_of_its_own() -> None:
    def on_cuda(layer: Any, x: Tensor) -> Tensor:
        return layer(x.cuda() if torch.cuda.is_available() else x)

    found = result(on_cuda, torch.randn(2, 8))
    assert not [f for f in found["findings"] if f["kind"] == "graph break"]


def test_a_thread_is_named() -> None:
    def threaded(layer: Any, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        thread = threading.Thread(target=lambda: made.append(layer(x)))
        thread.start()
        thread.join()
        return made[0] * 2

    says = [f["says"] for f in result(threaded, torch.randn(2, 8))["findings"] if f["kind"] == "blind"]
    assert any(text.startswith("another thread: Thread") for text in says)


def test_a_sparse_tensor_is_not_what_the_tables_speak_of() -> None:
    found = result(lambda layer, a, x: torch.sparse.mm(a, layer(x)), torch.eye(3).to_sparse(), torch.randn(3, 8))
    ops = {op["op"]: op["support"]["tpu"] for op in found["ops"]}
    assert ops["aten::_sparse_addmm"]["status"] == "unknown" and "sparse_coo" in ops["aten::_sparse_addmm"]["condition"]
    assert ops["aten::addmm"]["status"] == "native"


def test_nested_tensors_do_not_end_the_process() -> None:
    program = (
        "import torch; from torch import nn; from kdk_bench.audit import running\n"
        "rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)\n"
        "session = running.run(lambda: (nn.Linear(8, 8), (rows,), {}), True)\n"
        "print(len(session.capture.steps), session.capture.error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("2"), done.stderr


def test_rope_is_found_with_tables_that_have_no_batch() -> None:
    def turned(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turn(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, -1)
            return heads * cos + torch.cat((-second, first), -1) * sin

        q, k = (layer(y).view(2, 5, 2, 4).transpose(1, 2) for y in (x, x + 1))
        return turn(q) @ turn(k).transpose(-1, -2)

    angles = torch.randn(5, 2).repeat(1, 2)
    found = result(turned, torch.randn(2, 5, 8), angles.cos(), angles.sin())
    (chain,) = [f for f in found["findings"] if f["pattern"] == "rope"]
    assert chain["evidence"]["kind"] == "measured"


def test_a_synchronisation_becomes_the_accelerators(tmp_path: Path) -> None:
    capture = script(tmp_path, after="torch.cuda.synchronize()")
    found = audit.report(capture, support.platforms(["tpu"], {}, {}, ()), "model")["findings"]
    assert [f["filled_by"]["name"] for f in found if f["kind"] == "code"] == ["torch.accelerator.synchronize()"]


@pytest.mark.parametrize("loss", [lambda y: "text", lambda y: y.sum().detach()])
def test_a_loss_without_a_gradient_has_a_way_out(loss: Any) -> None:
    with pytest.raises(UsageError, match="leave --train out"):
        running.run(lambda: (nn.Linear(8, 8), (torch.randn(2, 8),), {}, loss), True)


def test_a_file_in_place_of_a_module_has_a_way_out() -> None:
    with pytest.raises(UsageError, match=r"small\.model:factory, or --script small/model\.py"):
        running.from_factory("small/model.py:factory")


def test_a_target_counts_once() -> None:
    assert targets_of(("tpu,tpu", "tpu")) == ["tpu"]


@pytest.mark.parametrize("damage", [{"platforms": None}, {"platforms": [5]}, {"findings": [{"id": 5}]}, {"ops": 5}])
def test_a_damaged_report_is_said_to_be(tmp_path: Path, damage: dict[str, Any]) -> None:
    whole = {"schema": "kdk.audit/1", "findings": [], "ops": [], "capture": {}, "model": "m", "platforms": [{"name": "tpu"}]}
    file = tmp_path / "report.json"
    file.write_text(json.dumps(whole))
    assert read(str(file), "kdk.audit/1")["model"] == "m"
    file.write_text(json.dumps({**whole, **damage}))
    with pytest.raises(UsageError, match="is damaged"):
        read(str(file), "kdk.audit/1")
