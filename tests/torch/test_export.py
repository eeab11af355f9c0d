"""torch.export, strict and not, saved and loaded; AOTInductor. A program keeps the choice it was exported under."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kdk

pytestmark = pytest.mark.filterwarnings("ignore::kdk.FallbackWarning")


class Model(torch.nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return kdk.ops.cube(kdk.ops.rms_norm(x, w, 1e-5))


def inputs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6), torch.randn(6)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("choice", ["", "pallas"])
def test_export_save_load(strict: bool, choice: str, tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    context = kdk.use(choice) if choice else kdk.use()
    with context:
        program = torch.export.export(Model(), inputs(4), strict=strict, dynamic_shapes=({0: rows}, None))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    kept = [(n.target.__name__, n.kwargs.get("impl", "")) for n in loaded.graph.nodes if "kdk" in str(n.target)]
    both = [("rms_norm.default", choice), ("cube.default", choice)]
    assert kept == (both if choice else both[1:])  # without a choice the row operator is inlined
    x, w = inputs(9)
    with kdk.record() as r, kdk.use("reference"):  # too late
        found = loaded.module()(x, w)
    torch.testing.assert_close(found, Model()(x, w))
    assert r.calls("cube", implementation="torch") == 1
    assert r.calls("cube", implementation="pallas", how="refused") == (choice == "pallas")


@pytest.mark.slow
def test_aot_inductor(tmp_path: Path) -> None:
    args = inputs(4)
    program = torch.export.export(Model(), args)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    model = torch._inductor.aoti_load_package(path)
    with kdk.record() as r:
        for _ in range(3):
            torch.testing.assert_close(model(*args), Model()(*args))
    assert r.calls("cube", implementation="torch") == 6
