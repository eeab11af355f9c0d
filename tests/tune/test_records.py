"""Tuning files: what is taken from them, what is refused and why; launch parameters in a kernel's call; records under torch.compile."""

from __future__ import annotations

import functools
import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kdk.ops
from kdk import decomposing, dispatch, tuning
from kdk.backends import LANGUAGES, TARGETS
from kdk.errors import FallbackWarning, RefusedError
from kdk.registry import OPERATORS
from kdk.torch_library import Operator

PROVENANCE = {"evidence": "modelled", "environment": {}, "date": "2026-11-30"}
RMS_NORM = OPERATORS["rms_norm"]
SIZES = {"N": 6, "H": 50}
ABSENT = {name: language.module("launch").missing("cpu") for name, language in LANGUAGES.items()}
pallas = pytest.mark.skipif(bool(ABSENT["pallas"]), reason=str(ABSENT["pallas"]))


def launch(**parameters: Any) -> dict[str, Any]:
    return {"launch": {"parameters": parameters, "case": "c", "before": 2.0, "after": 1.0, "unit": "s", "ratio": 0.5, **PROVENANCE}}


def block(ratio: float) -> dict[str, Any]:
    return {"block": {"winner": tuning.winner(ratio), "ratio": ratio, "block": "llama-3-8b: norm + projection", **PROVENANCE}}


def record(parts: dict[str, Any], direction: str = "forward", target: str = "v6e", operator: Operator = RMS_NORM, **sizes: int) -> None:
    key = tuning.key(direction, "float32", sizes or SIZES)
    tuning.write(tuning.user_file(operator.op, target), operator.op, target, {key: parts})


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_buckets_end_at_powers_of_two() -> None:
    assert tuning.bucket({"N": 4097, "H": 4096, "K": 1, "L": 3}) == {"H": 4096, "K": 1, "L": 4, "N": 8192}


@pytest.mark.parametrize("name", list(OPERATORS))
def test_sizes_are_found_among_the_arguments(name: str) -> None:
    """Every letter of the primary case, by either direction's arguments alone; what only results have is left out."""
    from kdk_bench.compiling.described import arguments
    from kdk_bench.declared_cases import cases_of

    op = OPERATORS[name].op
    case = cases_of(op).models[0]
    for direction in ("forward", "backward") if op.backward else ("forward",):
        args = arguments(op, direction, case, op.dtypes[0])
        found = tuning.sizes_of(tuning.places(op, direction), args)
        assert found and found == {letter: case.sizes[letter] for letter in found}
        if direction == "forward":
            assert set(found) == op.letters


def test_the_users_entry_goes_before_the_shipped_one_part_by_part() -> None:
    key = tuning.key("forward", "float32", SIZES)
    tuning.write(tuning.shipped_file(RMS_NORM.op, "v6e"), RMS_NORM.op, "v6e", {key: launch(rows=64) | block(1.5)})
    record(launch(rows=32))
    found = tuning.table(RMS_NORM.op, "v6e")
    launched, blocked = (found.part(name, "forward", "float32", SIZES) for name in ("launch", "block"))
    assert launched is not None and launched["parameters"] == {"rows": 32} and blocked is not None and blocked["ratio"] == 1.5
    assert found.part("launch", "backward", "float32", SIZES) is None and found.part("launch", "forward", "bfloat16", SIZES) is None
    assert found.part("launch", "forward", "float32", {"N": 9, "H": 50}) is None, "another bucket"


GOOD = {"direction": "forward", "dtype": "float32", "bucket": {"N": 8, "H": 64}, **launch(rows=16)}
BAD = {
    "letter": {**GOOD, "bucket": {"M": 8}},
    "powers of two": {**GOOD, "bucket": {"N": 6, "H": 64}},
    "direction": {**GOOD, "direction": "sideways"},
    "unknown parts": {**GOOD, "lunch": {}},
    "parameters": {**GOOD, "launch": {**GOOD["launch"], "parameters": 3}},
    "launch has": {**GOOD, "launch": {"parameters": {}}},
    "evidence": {**GOOD, "launch": {**GOOD["launch"], "evidence": "hoped"}},
    "winner": {**GOOD, "block": {**block(1.5)["block"], "winner": "kernel"}},
    "no direction": {"bucket": {}},
}


@pytest.mark.parametrize("reason", list(BAD))
def test_an_entry_that_does_not_fit_is_left_out_with_its_reason(reason: str) -> None:
    file = tuning.user_file(RMS_NORM.op, "v6e")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"schema": tuning.SCHEMA, "op": "rms_norm", "target": "v6e", "entries": [GOOD, BAD[reason], GOOD]}))
    found = tuning.table(RMS_NORM.op, "v6e")
    assert list(found.entries) == [tuning.key("forward", "float32", SIZES)] and len(found.refused) == 2
    assert reason in found.refused[0] and "entry 1" in found.refused[0] and str(file) in found.refused[0]
    assert "a second entry" in found.refused[1]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "kdk.tuning/0"}'])
def test_a_file_that_is_none_is_refused(text: str) -> None:
    file = tuning.user_file(RMS_NORM.op, "v6e")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = tuning.table(RMS_NORM.op, "v6e")
    assert not found.entries and str(file) in found.refused[0]


def test_what_ships_holds() -> None:
    """Every file in an operator's folder is valid, and its launch parameters are ones that the kernel takes at the recorded case."""
    from kdk_bench.compiling.described import arguments
    from kdk_bench.compiling.rows import case_of

    for operator in OPERATORS.values():
        op = operator.op
        folder = Path(next(iter(__import__(op.package, fromlist=["x"]).__path__))) / "tuning"
        for file in sorted(folder.glob("*.json")):
            target = file.stem
            found = tuning.read(file, op, target)
            assert found.entries and not found.refused, found.refused
            for (direction, dtype, _), entry in found.entries.items():
                if "launch" not in entry or ABSENT[TARGETS[target]]:
                    continue
                LANGUAGES[TARGETS[target]].module("launch").prepare()
                kernel, case = dispatch.load_kernel(op, TARGETS[target], direction), case_of(op, entry["launch"]["case"])
                assert kernel is not None and case is not None
                args = kernel.arguments(*arguments(op, direction, case, dtype))
                assert kernel.refuses(target, entry["launch"]["parameters"], args) is None


# ---- launch parameters -----------------------------------------------------------------------------------------------------


TUNABLE = [
    (name, direction, language)
    for name, operator in OPERATORS.items()
    for direction in ("forward", "backward")
    for language in LANGUAGES
    if operator.op.function(direction) is not None and dispatch.kernel_file(operator.op, language, direction) and not ABSENT[language]
]


@pytest.mark.parametrize("name, direction, language", TUNABLE)
def test_a_kernel_takes_what_it_declares(name: str, direction: str, language: str) -> None:
    """Each launch parameter is a keyword of the function and of `supports`, None being the kernel's own choice; no other is."""
    LANGUAGES[language].module("launch").prepare()
    kernel = dispatch.load_kernel(OPERATORS[name].op, language, direction)
    assert kernel is not None
    for function in filter(None, (kernel.function, kernel.supports)):
        keywords = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        keywords.pop("interpret", None)
        assert keywords == dict.fromkeys(kernel.tunable)
    assert all(values and len(set(values)) == len(values) for values in kernel.tunable.values())


class Launched:
    """What a language's simulator is given, by the name of the function: it says which launch parameters are bound."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, language: str) -> None:
        self.names: list[str] = []
        simulate = LANGUAGES[language].module("simulate")
        real = simulate.run_simulated

        def run(function: Any, args: Any, target: str) -> Any:
            self.names.append(function.__name__)
            return real(function, args, target)

        monkeypatch.setattr(simulate, "run_simulated", run)


def run_once(operator: Operator, target: str, strict: bool, *args: Any) -> Any:
    """The operator's body anew: one that ran keeps the configuration that it found."""
    fresh = dispatch.body(operator.op, "forward")
    return fresh(*args, impl=f"{TARGETS[target]}@{target}{'!' if strict else ''}")


def inputs() -> tuple[Tensor, Tensor, float, float]:
    return torch.randn(6, 50), torch.randn(50), 1e-5, 0.0


RMS_NORM_BY = {"v6e": {"rows": 16}, "sm_90": {"elements": 1024, "warps": 2}}


@pytest.mark.parametrize("target", list(RMS_NORM_BY))
def test_recorded_parameters_reach_the_kernel(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ABSENT[TARGETS[target]]:
        pytest.skip(str(ABSENT[TARGETS[target]]))
    launched, args = Launched(monkeypatch, TARGETS[target]), inputs()
    plain = run_once(RMS_NORM, target, True, *args)
    record(launch(**RMS_NORM_BY[target]), target=target)
    tuned = run_once(RMS_NORM, target, True, *args)
    name = "_".join(["forward", *(f"{n}_{v}" for n, v in RMS_NORM_BY[target].items())])
    assert launched.names == ["forward", name]
    torch.testing.assert_close(tuned, plain)


@pytest.mark.skipif(bool(ABSENT["nki"]), reason=str(ABSENT["nki"]))
def test_recorded_parameters_reach_a_kernel_of_nki(monkeypatch: pytest.MonkeyPatch) -> None:
    rope, launched = OPERATORS["rope"], Launched(monkeypatch, "nki")
    args = (*(torch.randn(1, 2, heads, 8) for heads in (4, 2)), torch.randn(1, 2, 8), torch.randn(1, 2, 8), False)
    record(launch(elements=512), target="trn2", operator=rope, B=1, S=2, Hq=4, Hk=2, D=8, R=8)
    tuned = run_once(rope, "trn2", True, *args)
    assert launched.names == ["forward_elements_512"]
    torch.testing.assert_close(tuned, rope.op.reference(*args))


@pallas
@pytest.mark.parametrize("parameters, reason", [({"rows": 17}, "legal are 16, 32"), ({"columns": 8}, "no launch parameter 'columns'")])
def test_an_illegal_or_stale_configuration_is_refused(parameters: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, args = Launched(monkeypatch, "pallas"), inputs()
    record(launch(**parameters))
    with pytest.warns(FallbackWarning, match=reason), kdk.record() as r:
        run_once(RMS_NORM, "v6e", False, *args)
    assert launched.names == ["forward"]
    assert {row.how: reason in row.reason for row in r.rows} == {"simulated": False, "refused": True}
    with pytest.raises(RefusedError, match=r"KDK-TUNING.*kdk tune rms_norm --target v6e"):
        run_once(RMS_NORM, "v6e", True, *args)


@pallas
def test_a_configuration_goes_through_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket's case fits VMEM with it, another shape of the bucket does not: refused there, used here."""
    launched, weight = Launched(monkeypatch, "pallas"), torch.randn(2048)
    record(launch(rows=1024), N=4, H=2048)
    with pytest.warns(FallbackWarning, match="a block of 1024 rows fits up to H = 1"):
        run_once(RMS_NORM, "v6e", False, torch.randn(4, 2048), weight, 1e-5, 0.0)
    run_once(RMS_NORM, "v6e", False, torch.randn(4, 1025), weight[:1025], 1e-5, 0.0)
    assert launched.names == ["forward", "forward_rows_1024"]


@pallas
def test_what_is_compiled_is_what_is_launched() -> None:
    from kdk_bench.compiling.rows import Task, call
    from kdk_bench.expectation import Row

    task = Task(Row("rms_norm", "forward", "pallas", "v6e", "float32"), "llama-3-8b decode")
    assert call(task)[0].__name__ == "forward"
    record(launch(rows=32), N=1, H=4096)
    assert call(task)[0].__name__ == "forward_rows_32"


# ---- under torch.compile ---------------------------------------------------------------------------------------------------


def compiled(monkeypatch: pytest.MonkeyPatch, *, gradient: bool, dynamic: bool = False, name: str = "rms_norm") -> tuple[list[str], str]:
    """The kdk operators in the graph of a compiled call, as if CPU tensors lay on a v6e; and what was recorded of it."""
    monkeypatch.setattr(decomposing, "chip", lambda device, index: "v6e")
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x, weight = torch.randn(6, 50, requires_grad=gradient), torch.randn(50)
    if name == "cumsum":
        function, args = functools.partial(kdk.ops.cumsum), (torch.randn(2, 6, 50),)
    else:
        function, args = functools.partial(kdk.ops.rms_norm, eps=1e-5), (x, weight)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with kdk.record() as r:
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes if str(node.target).startswith("kdk.")]
    return nodes, "; ".join(row.reason for row in r.rows if row.how == "inlined")


def test_without_a_record_the_kind_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled(monkeypatch, gradient=False) == ([], "compile")
    assert compiled(monkeypatch, gradient=False, name="cumsum") == (["kdk.cumsum.default"], "")


def test_flipping_the_record_flips_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    record(block(0.9))
    assert compiled(monkeypatch, gradient=False) == (["kdk.rms_norm.default"], "")
    record(block(1.08))
    nodes, reason = compiled(monkeypatch, gradient=False)
    assert nodes == [] and reason.startswith("compile: in llama-3-8b: norm + projection on v6e") and "1.08" in reason


def test_forward_alone_and_training_have_records_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    record(block(0.98))
    record(block(1.08), "backward")
    assert compiled(monkeypatch, gradient=False)[0] == ["kdk.rms_norm.default"]
    assert compiled(monkeypatch, gradient=True)[0] == []


def test_an_algorithmic_operator_that_loses_decomposes(monkeypatch: pytest.MonkeyPatch) -> None:
    cumsum = OPERATORS["cumsum"]
    sizes = tuning.sizes_of(tuning.places(cumsum.op, "forward"), (torch.empty(2, 6, 50),))
    record(block(1.2), operator=cumsum, **sizes)
    assert compiled(monkeypatch, gradient=False, name="cumsum")[0] == []


def test_another_bucket_and_an_open_size_have_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that the graph leaves open is in no bucket: the kind decides, and the graph gets no guard on it."""
    record(block(0.9), N=16, H=50)
    assert compiled(monkeypatch, gradient=False) == ([], "compile")
    record(block(0.9))
    assert compiled(monkeypatch, gradient=False, dynamic=True) == ([], "compile")


def test_eager_keeps_the_kernel_and_a_choice_goes_before_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record(block(1.5))
    x, weight, eps, _ = inputs()
    with kdk.record() as r:
        kdk.ops.rms_norm(x, weight, eps)
    assert [(row.how, row.reason) for row in r.rows] == [("device", "")]
    with kdk.use(rms_norm="pallas"):
        assert compiled(monkeypatch, gradient=False)[0] == ["kdk.rms_norm.default"]


def test_a_patched_module_whose_operators_decompose_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in bfloat16, where the operator's reference rounds in another place; with a record that the kernel wins it calls the
    operator."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(decomposing, "chip", lambda device, index: "v6e")
    norm, x = LlamaRMSNorm(64).bfloat16(), torch.randn(6, 64).bfloat16()
    norm.weight.data.normal_()
    plain = norm(x)
    kdk.patch(norm)
    reference = RMS_NORM.op.reference(x, norm.weight, norm.variance_epsilon, 0.0)[0]
    assert not torch.equal(plain, reference), "the two cannot be told apart"

    def run() -> tuple[Tensor, str]:
        torch._dynamo.reset()
        with kdk.record() as r, torch.no_grad():
            y = torch.compile(norm, backend="eager", fullgraph=True)(x)
        return y, "; ".join(row.reason for row in r.rows)

    y, reason = run()
    assert torch.equal(y, plain) and reason == decomposing.OWN_FORWARD
    key = tuning.key("forward", "bfloat16", {"N": 6, "H": 64})
    tuning.write(tuning.user_file(RMS_NORM.op, "v6e"), RMS_NORM.op, "v6e", {key: block(0.9)})
    y, reason = run()
    assert torch.equal(y, reference) and reason == ""
    tuning.write(tuning.user_file(RMS_NORM.op, "v6e"), RMS_NORM.op, "v6e", {key: block(1.1)})
    assert run()[1] == decomposing.OWN_FORWARD
    with kdk.use(rms_norm="pallas"):
        assert run()[1] != decomposing.OWN_FORWARD


def test_a_record_for_a_kernel_that_has_no_parameters_any_more_is_refused() -> None:
    record(launch(rows=64))
    kernel = dispatch.Kernel(types.ModuleType("kernels"), "forward", None, lambda *args: args)
    said: list[str] = []
    found = tuning.launch_parameters(RMS_NORM.op, "forward", "v6e", kernel, said.append)
    assert found((torch.zeros(6, 50), torch.ones(50), 1e-6, 0.0)) == {}
    assert len(said) == 1 and "kernels has no launch parameter 'rows'; it has none" in said[0]
