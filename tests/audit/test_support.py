"""What is said about an operator comes from the best evidence there is, with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kdk.errors import UsageError
from kdk_bench.audit import expanding, support
from kdk_bench.audit.import_table import read_markdown
from kdk_bench.audit.tables import listing
from kdk_bench.audit.tables.listing import xla_names
from kdk_bench.audit.trace import Meta

TABLE = """
# Operators

| Operator | Neuron support | dtypes | CPU fallback | Notes |
|---|:---:|---|---|---|
| `aten::rsqrt` | ✅ |  | no | |
| `aten.topk` | ✅ | | no | k up to 16384 |
| `torch.nonzero` | ❌ | | yes | |
| `aten::silu.default` | supported | | | |
"""


REALISTIC = """
# PyTorch operators

Operators are listed by namespace. See [limitations](limits.md) | for more.

## Pointwise

| Op | Supported | Supported dtypes | Execution |
| :--- | :---: | :--- | --- |
| [`torch.add`](https://example.org/add) | Yes | fp32, bf16, int32 | Neuron |
| `torch.ops.aten.silu.default` | ✅ | fp32, bf16 | Neuron |
| **aten::erfinv** | Yes | fp32 | CPU fallback |
| `aten::pow.Tensor_Scalar` | Partial | | Neuron |

Some text between the tables.

## Reductions and sorting

| Supported | Op | Notes |
| --- | --- | --- |
| Yes | `aten::topk` | `k <= 16384`, see note \\| below |
| No | `aten::median` | |
| Yes | `aten::cumsum`, `aten::cumprod` | |
| TBD | `aten::mode` | |
"""


def test_a_table_with_links_several_sections_and_lists_of_names(tmp_path: Path) -> None:
    file = tmp_path / "operators.md"
    file.write_text(REALISTIC)
    ops = read_markdown(str(file))["ops"]
    assert set(ops["families"]) == {"aten::cumsum", "aten::cumprod"}
    # dtypes are a condition: what the model has may not be among them.
    assert ops["conditional"]["aten::add"] == "fp32, bf16, int32" and ops["conditional"]["aten::silu"] == "fp32, bf16"
    assert "aten::pow.Tensor_Scalar" in ops["conditional"] and "k <= 16384" in ops["conditional"]["aten::topk"]
    assert set(ops["host"]) == {"aten::erfinv", "aten::median"}
    neuron = platform("neuron", table=read_markdown(str(file)))
    assert neuron.of("aten::mode").status == "unknown"  # to be done is no support
    assert neuron.of("aten::add.Tensor").status == "conditional"  # a name without overload speaks for all of them


def platform(name: str, **imported: object) -> support.Platform:
    return support.platforms([name], {}, {name: imported["table"]} if imported else {}, [])[0]  # type: ignore[dict-item]


def test_the_vendors_table_goes_before_the_shipped_one(tmp_path: Path) -> None:
    file = tmp_path / "operators.md"
    file.write_text(TABLE)
    neuron = platform("neuron", table=read_markdown(str(file)))
    assert neuron.of("aten::rsqrt").status == neuron.of("aten::silu").status == "native"
    assert "operators.md" in neuron.of("aten::rsqrt").source
    assert neuron.of("aten::topk") == support.Support("conditional", "k up to 16384", "declared", neuron.of("aten::topk").source)
    assert neuron.of("aten::nonzero").status == "host"
    assert neuron.of("aten::mm").status == "native" and "2026-03-13" in neuron.of("aten::mm").source
    assert neuron.of("aten::erfinv").status == "unknown"
    file.write_text("no table")
    with pytest.raises(UsageError, match="no table of operators"):
        read_markdown(str(file))


def test_structured_composite_and_autograd_registrations_on_tpu() -> None:
    tpu = platform("tpu")
    assert tpu.of("aten::mm").condition == "through aten::mm.out" and tpu.of("aten::mm").status == "native"
    assert tpu.of("aten::linear").status == "native"  # at the Autograd key too
    assert tpu.of("aten::median").status == "error" and "raises" in tpu.of("aten::median").condition
    expanding.children(torch.ops.aten.kthvalue.default, (torch.randn(4), 2), {})
    kthvalue = tpu.of("aten::kthvalue")
    assert kthvalue.status == "error" and "aten::kthvalue.values" in kthvalue.condition
    expanding.children(torch.ops.aten.index_put_.default, (torch.randn(4), [torch.tensor([1])], torch.ones(1)), {})
    assert tpu.of("aten::index_put_").status == "decomposed"


def test_expanding_an_operator_leaves_its_arguments_alone() -> None:
    x = torch.zeros(4)
    expanding.CHILDREN.pop("aten::index_put_", None)
    assert "aten::_index_put_impl_" in expanding.children(torch.ops.aten.index_put_.default, (x, [torch.tensor([1])], torch.ones(1)), {})
    assert not x.any()


def test_documented_conditions_of_neuron() -> None:
    neuron = platform("neuron")
    assert neuron.of("aten::embedding", [Meta("float32", (4, 4), "contiguous"), Meta("int64", (2,), "contiguous")]).status == "conditional"
    assert neuron.of("aten::add", [Meta("float32", (1, 2, 3, 4), "channels_last")]).condition.startswith("no channels_last")
    assert neuron.of("aten::add", [Meta("float32", (4,), "contiguous")]).status == "native"


def test_an_operator_outside_aten_is_unknown() -> None:
    assert platform("cuda").of("torchvision::nms").status == "unknown"


def test_the_lists_of_sources_are_read_whole() -> None:
    text = "full_codegen:\n  - abs\n  - any.dim\nsupported:\n  - mm\nautograd:\n  - einsum\n"
    assert xla_names(text) == ["aten::abs", "aten::any.dim", "aten::einsum", "aten::mm"]
    cuda, xla = platform("cuda"), platform("xla")
    assert cuda.of("aten::add.Tensor").status == "native" and xla.of("aten::add.Tensor").status == "native"
    assert xla.of("aten::grid_sampler_2d").status == "host" and xla.of("aten::add_.Tensor").status == "native"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required"),
        (["torch_xla"], "required"),
        (["torch_xla", "no_such.yaml", "2.9.0", "2025-11-17"], "could not be read"),
        (["torch_xla", "README.md", "2.9.0", "2025-11-17"], "lists no operators"),
    ],
)
def test_the_scripts_of_the_tables_say_what_they_want(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        listing.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_scripts_write_the_shipped_tables_again(tmp_path: Path) -> None:
    shipped = {name: json.loads((support.TABLES / f"{name}.json").read_text()) for name in ("torch_xla", "cuda")}
    file = tmp_path / "xla_native_functions.yaml"
    names = (f"  - {name.removeprefix('aten::')}\n" for name in shipped["torch_xla"]["ops"]["native"])
    file.write_text("supported:\n" + "".join(names))
    again = {"torch_xla": listing.main(["torch_xla", str(file), "2.9.0", "2025-11-17"]), "cuda": listing.main(["cuda"])}
    for name, table in again.items():
        fixed = ("schema", "platform") if name == "cuda" else ("schema", "platform", "version", "source", "date")
        assert {k: table[k] for k in fixed} == {k: shipped[name][k] for k in fixed}
        assert name == "cuda" or table["ops"]["native"] == shipped[name]["ops"]["native"]
        if torch.__version__.partition("+")[0] == shipped["cuda"]["version"].removeprefix("torch "):
            assert table["ops"] == shipped[name]["ops"]
