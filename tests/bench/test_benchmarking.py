"""`kdk bench` measured on the CPU: who takes part, who is shut out, and what is said about a regression."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kdk.errors import UsageError
from kdk.peers import Peer
from kdk_bench import cli
from kdk_bench.bench_command import bench_command
from kdk_bench.benchmarking import baseline, blocks, contenders, measuring, memory, page, reporting, statistics
from kdk_bench.benchmarking.measuring import Race, case_named, measure

CPU = torch.device("cpu")
ONLY_KDK = ("nobody else",)


def wrong(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps) * 1.001


def crash(*args: Any) -> Any:
    raise RuntimeError("no such instruction")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measuring, "CPU_ELEMENTS", 2**14)
    yield


def entries(direction: str, *names: str, **options: Any) -> dict[str, measuring.Entry]:
    race = Race("rms_norm", direction, "float32", case_named("rms_norm", "")[0], CPU, "cpu")
    return {e.contender: e for e in measure(race, seconds=0.05, against=names or ONLY_KDK, **options)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_everyone_who_is_right_is_timed(direction: str) -> None:
    found = entries(direction, "F.rms_norm", price=2.0)
    assert {name for name, e in found.items() if e.outcome == "measured"} >= {"eager reference", "kdk reference", "F.rms_norm"}
    one = found["kdk reference"]
    assert one.heat.cut and one.heat.sizes == {"N": 4, "H": 4096}
    assert one.cold and one.times["p50"] and one.ratio and one.ratio["low"] <= one.ratio["value"] <= one.ratio["high"]
    tensors = 2 * 4 * 4096 + 4096 if direction == "forward" else 3 * 4 * 4096 + 2 * 4096 + 4
    assert one.rates["bytes"] == 4 * tensors
    assert one.rates["share_of_bandwidth"] is None  # nobody knows this CPU's peak
    assert one.rates["cost_per_million_calls"] == pytest.approx(2.0 / 3600 * one.times["p50"] * 1e6)
    assert found["eager reference"].ratio == {"to": "eager reference", "value": 1.0, "low": 1.0, "high": 1.0}


def test_the_wrong_and_the_broken_are_shown_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = (Peer("a bit off", wrong), Peer("crash", crash), Peer("picky", wrong, refuse=lambda *args: "not on Mondays"))
    absent = (Peer("elsewhere", wrong, platforms=("cuda",)), Peer("unheard of", wrong, package="no-such-package"))
    monkeypatch.setattr(contenders, "peers_of", lambda name: (*peers, *absent))
    found = entries("forward", *(p.name for p in (*peers, *absent)))
    assert {n: found[n].outcome for n in ("a bit off", "crash", "picky", "elsewhere", "unheard of")} == {
        "a bit off": "wrong", "crash": "failed", "picky": "refused", "elsewhere": "absent", "unheard of": "absent",
    }  # fmt: skip
    assert "worst error" in found["a bit off"].reason and not found["a bit off"].samples
    assert "no such instruction" in found["crash"].reason and "not on Mondays" in found["picky"].reason
    assert "runs on cuda" in found["elsewhere"].reason and "pip install no-such-package" in found["unheard of"].reason


def test_exit_codes() -> None:
    found = list(entries("forward").values())
    assert reporting.exit_code(found) == 0
    assert reporting.exit_code([e for e in found if not e.implementation]) == 3
    own = next(e for e in found if e.implementation)
    broken = measuring.Entry(own.heat, own.contender, own.implementation, "wrong", "off by one")
    assert reporting.exit_code([*found, broken]) == 1


def test_percentiles_need_samples() -> None:
    few, many = statistics.percentiles([1.0, 2.0, 3.0]), statistics.percentiles([float(i) for i in range(100)])
    assert few["p50"] == 2.0 and few["p95"] is None and few["p99"] is None
    assert many["p99"] == pytest.approx(98.01)


def test_paired_rounds_cancel_what_slows_both() -> None:
    disturbed = [1.0 if i % 2 else 100.0 for i in range(50)]
    ratio = statistics.paired_ratio([2 * s for s in disturbed], disturbed)
    assert ratio == statistics.Ratio(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="must pair up"):
        statistics.paired_ratio([1.0], [1.0, 2.0])


def results(own: float, eager: float, noise: float) -> list[dict[str, Any]]:
    def one(contender: str, implementation: str, time: float, step: int) -> dict[str, Any]:
        samples = [time * (1 + noise * (step * i % 7 - 3) / 3) for i in range(50)]
        key = {"op": "rms_norm", "direction": "forward", "case": "c", "dtype": "float32", "target": "cpu"}
        return {**key, "contender": contender, "implementation": implementation, "samples": samples, "sizes": {"N": 2}}

    return [one("eager reference", "", eager, 1), one("kdk torch", "torch", own, 3)]


@pytest.mark.parametrize(
    ("own", "eager", "noise", "regressed"),
    [
        (1.0, 1.0, 0.01, False),
        (1.2, 1.0, 0.01, True),
        (2.4, 2.0, 0.01, True),  # on a machine half as fast
        (2.0, 2.0, 0.01, False),
        (1.06, 1.0, 0.5, False),  # nobody can say
    ],
)
def test_a_regression_is_what_the_interval_shows(own: float, eager: float, noise: float, regressed: bool) -> None:
    (change,) = baseline.changes(results(own, eager, noise), results(1.0, 1.0, noise))
    assert change.regressed(5) is regressed, change


def test_other_sizes_are_no_baseline() -> None:
    old = [{**r, "sizes": {"N": 3}} for r in results(1.0, 1.0, 0.0)]
    assert baseline.changes(results(1.0, 1.0, 0.0), old) == []


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "no JSON",
        '{"schema": "kdk.check/1", "results": []}',
        '{"schema": "kdk.bench/1"}',
        '{"schema": "kdk.bench/1", "results": [{"op": "rms_norm"}]}',
    ],
)
def test_what_is_no_baseline(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(UsageError, match="KDK-BASELINE"):
        baseline.load(str(tmp_path / "old.json"))


def test_peak_memory_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1
        del a
        return (b * 2).sum()

    assert 8000 <= memory.peak(run, CPU) <= 8100
    assert capfd.readouterr().err == ""


def test_the_command(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    arguments = ["rms_norm", "--direction", "forward", "--against", "F.rms_norm", "--seconds", "0.05"]
    done = CliRunner().invoke(bench_command, [*arguments, "--json", str(first)], standalone_mode=False, catch_exceptions=False)
    assert "rms_norm forward, llama-3-8b" in done.output and done.return_value == 0
    report = json.loads(first.read_text())
    assert report["schema"] == "kdk.bench/1" and {r["evidence"] for r in report["results"]} == {"measured"}
    html, plots = tmp_path / "page.html", tmp_path / "plots"
    more = ["--baseline", str(first), "--fail-on-regression", "1000", "--html", str(html), "--plot", str(plots)]
    done = CliRunner().invoke(bench_command, [*arguments, *more], standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0 and "of the baseline's" in done.output
    text = html.read_text()
    assert "kdk reference" in text and "http://" not in text and "https://" not in text
    assert sorted(p.name for p in plots.iterdir()) == ["rms_norm-forward-float32-cpu.png", "roofline-cpu.png"]


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--case", "no such"], ["--dtype", "int4"], ["no_such_op"]])
def test_usage(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        CliRunner().invoke(bench_command, ["rms_norm", *arguments], standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "value", "limit"),
    [
        ("rms_norm --seconds 0", "0", "above 0"),
        ("rms_norm --seconds -1", "-1", "above 0"),
        ("rms_norm --seconds nan", "nan", "above 0"),
        ("rms_norm --seconds inf", "inf", "finite"),
        ("rms_norm --against liger", "'liger'", "F.rms_norm"),
        ("rms_norm --target v6e --against F.rms_norm", "F.rms_norm", "modelled"),
        ("--block llama-3-8b --against eager", "eager", "as it is and patched"),
        ("rms_norm --baseline no/such.json", "No such file", "kdk.bench/1"),
        ("rms_norm --fail-on-regression 5", "5", "--baseline FILE"),
        ("rms_norm --baseline no/such.json --fail-on-regression -5", "-5", "0 or more"),
        ("rms_norm --baseline no/such.json --fail-on-regression nan", "nan", "0 or more"),
        ("rms_norm --target h100", "'h100'", "sm_90"),
        ("--block llama-9", "'llama-9'", "llama-3-8b"),
        ("--block llama-9 --target v6e", "'llama-9'", "llama-3-8b"),
        ("--block llama-3-8b --tokens 0", "0", "at least 1"),
        ("rms_norm --tokens 8", "8", "--block MODEL"),
        ("rms_norm --block llama-3-8b", "rms_norm", "exclude each other"),
    ],
)
def test_options_that_mean_nothing_are_usage_errors(
    arguments: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything runs; the value, the limit and the way out are named."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments.split()])
    captured = capsys.readouterr()
    assert ended.value.code == cli.USAGE and not captured.out
    assert value in captured.err and limit in captured.err and "Way out:" in captured.err and "Traceback" not in captured.err, captured.err


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"sm_90": "3.5"}', '{"sm_90": -1}', '{"sm_90": NaN}'])
def test_what_is_no_table_of_prices(tmp_path: Path, text: str) -> None:
    (tmp_path / "prices.json").write_text(text)
    with pytest.raises(UsageError, match="KDK-PRICES"):
        CliRunner().invoke(bench_command, ["--prices", str(tmp_path / "prices.json")], standalone_mode=False, catch_exceptions=False)


TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_of_a_model(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of a model, small here, runs with kdk and without; the patched one is judged against float64."""
    monkeypatch.setitem(blocks.MODELS, "tiny", ("Llama", TINY))
    monkeypatch.setattr(blocks.torch, "compile", lambda module, **options: module)  # compiling has tests of its own
    for name in blocks.BLOCKS:
        found = {e.contender: e for e in blocks.measure(blocks.build("tiny", name, 8, torch.float32, CPU), direction, "cpu", 0.01)}
        assert {e.outcome for e in found.values()} == {"measured"}, (name, found)
        assert found["kdk, eager"].ratio and found["kdk, eager"].heat.op == f"tiny: {name}"


def test_a_block_that_kdk_makes_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks.MODELS, "tiny", ("Llama", TINY))
    monkeypatch.setattr(blocks.torch, "compile", lambda module, **options: module)
    spoilt = blocks._patched

    def patched(module: torch.nn.Module) -> torch.nn.Module:
        module = spoilt(module)
        with torch.no_grad():
            next(module.parameters()).mul_(1.001)
        return module

    monkeypatch.setattr(blocks, "_patched", patched)
    found = {e.contender: e for e in blocks.measure(blocks.build("tiny", "mlp", 8, torch.float32, CPU), "forward", "cpu", 0.01)}
    assert {n: e.outcome for n, e in found.items()} == {
        "eager": "measured", "torch.compile": "measured", "kdk, eager": "wrong", "kdk, torch.compile": "wrong",
    }  # fmt: skip


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Opened in headless Chromium, its filter hides what does not match."""
    from tests.browser import chromium

    heats = [dict(r, case=name) for name in ("alpha", "beta") for r in reporting.as_json(entries("forward").values())["results"]]
    file = tmp_path / "page.html"
    script = """<script>addEventListener("load", () => {
        const filter = document.getElementById("filter");
        filter.value = "beta";
        filter.dispatchEvent(new Event("input"));
        document.title = [...document.querySelectorAll("section")].map(s => s.hidden).join();
    })</script>"""
    file.write_text(page.render(heats, []).replace("</body>", script + "</body>"))
    done = subprocess.run([*chromium(), "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "<title>true,false</title>" in done.stdout
