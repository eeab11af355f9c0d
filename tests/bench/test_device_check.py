"""`make device-check` without a device: its dry run walks the whole way; a device that is wrong, hangs or is not there is said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import kdk_kernels.rms_norm.triton as kernel
from kdk_bench import device_check, evidence
from kdk_bench.benchmarking import contenders
from kdk_bench.device_check import DOES_NOT_HOLD, HOLDS, UNDETERMINED, USAGE, Device, Heat, Report, main
from kdk_bench.device_comparison import AGREES, DEVICE_WRONG, DIFFERS, SIMULATOR_WRONG, compare_row
from kdk_bench.expectation import Row
from kdk_bench.workers import LATE, each

ROW = Row("rms_norm", "forward", "triton", "sm_90", "float32")


def only_triton() -> list[Device]:
    return [Device("cpu", "sm_90", "triton")]


def no_race(heat: Heat, seconds: float) -> list[Any]:
    return []


def test_the_dry_run_walks_the_whole_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_check, "BUDGET", 3000.0)  # this machine may have much else to do
    monkeypatch.setattr(contenders.torch, "compile", lambda function, **options: function)  # compiling has tests of its own
    assert main(["--dry-run", "--out", str(tmp_path)]) == HOLDS
    assert {p.name for p in tmp_path.iterdir()} == {"check.json", "bench.json", "device-check.json", "index.html", "bench.html"}
    check, bench, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("check", "bench", "device-check"))
    assert {r["implementation"] for r in check["results"]} == {"triton", "pallas", "nki"}
    assert {r["evidence"] for r in check["results"]} == {"simulated"} == {c["evidence"] for c in found["comparisons"]}
    assert found["dry_run"] and found["not_done"] == [] and {c["outcome"] for c in found["comparisons"]} == {AGREES}
    assert all(c["difference"] == 0 and c["other"] == 0 and c["elements"] > 0 for c in found["comparisons"])
    assert {r["target"] for r in bench["results"]} == {"cpu"}
    assert {"eager reference", "torch.compile", "kdk reference"} <= {r["contender"] for r in bench["results"] if r["outcome"] == "measured"}
    assert "dry run, simulated" in (tmp_path / "index.html").read_text()
    assert "http" not in (tmp_path / "index.html").read_text()
    assert evidence.add(check, tmp_path / "store" / "evidence.json") == 3
    assert {r["evidence"] for r in evidence.load(tmp_path / "store" / "evidence.json")} == {"simulated"}
    assert "everything was done and holds" in capsys.readouterr().out


def on_the_device(monkeypatch: pytest.MonkeyPatch, off: float, first: bool = False) -> None:
    """The second of two calls, which stands for the device, gives values that are off; or the first, simulated, does."""
    right, calls = kernel.forward, []

    def forward(*args: Any) -> Any:
        calls.append(1)
        return tuple([t * (1 + off * ((len(calls) == 1) == first)) for t in right(*args)])

    monkeypatch.setattr(kernel, "forward", forward)


def test_a_device_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_device(monkeypatch, 1e-3)
    (found,) = compare_row(ROW, 1)
    assert found.outcome == DEVICE_WRONG and "on the device" in found.reason and "worst error" in found.reason


def test_a_simulator_that_is_wrong_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_device(monkeypatch, 1e-3, first=True)
    (found,) = compare_row(ROW, 1)
    assert found.outcome == SIMULATOR_WRONG and found.reason.startswith("simulated")


def test_a_small_difference_agrees_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_device(monkeypatch, 2**-23)
    (found,) = compare_row(ROW, 1)
    assert found.outcome == AGREES and found.difference and 0 < found.difference <= 1 and found.other and found.other <= found.elements


def test_both_right_and_far_apart_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdk_bench.device_comparison.apart", lambda *args: (1.5, 3, 10))
    (found,) = compare_row(ROW, 1)
    assert (found.outcome, found.difference, found.other) == (DIFFERS, 1.5, 3)


def test_a_wrong_device_does_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_check, "simulated_devices", only_triton)
    monkeypatch.setattr(device_check, "race", no_race)
    right = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *args: tuple(2 * t for t in right(*args)))
    assert main(["--dry-run", "--out", str(tmp_path)]) == DOES_NOT_HOLD
    assert "failed: check rms_norm.forward triton sm_90" in capsys.readouterr().out
    assert "wrong scale" in (tmp_path / "index.html").read_text()


def test_what_does_not_fit_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The time is up before the first row; and such a row is no evidence."""
    monkeypatch.setattr(device_check, "simulated_devices", only_triton)
    monkeypatch.setattr(device_check, "ENDS", dict.fromkeys(device_check.ENDS, 0.0))
    assert main(["--dry-run", "--out", str(tmp_path)]) == UNDETERMINED
    found = json.loads((tmp_path / "device-check.json").read_text())
    assert [(n["phase"], n["what"]) for n in found["not_done"]] == [
        ("check", str(ROW)), ("compare", str(ROW)), ("bench", "silu_and_mul.forward float32 on cpu"),
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert all(f"not done: {phase}" in out for phase in ("check", "compare", "bench"))
    check = json.loads((tmp_path / "check.json").read_text())
    assert [r["outcome"] for r in check["results"]] == ["unknown"] and evidence.from_report(check) == []


def test_no_device_and_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_check, "in_processes", lambda *args: iter([(None, [])]))
    assert main(["--out", str(tmp_path)]) == UNDETERMINED
    assert "DRY=1" in capsys.readouterr().err
    monkeypatch.setattr(device_check, "NEEDS", ("torch", "no_such_package"))
    assert main(["--out", str(tmp_path)]) == USAGE
    assert "not installed: no_such_package. pip install no_such_package" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["0", "nan", "301", "inf"])
def test_budgets(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--dry-run", "--budget", budget])
    assert ended.value.code == USAGE and "10 to 300" in capsys.readouterr().err


def test_every_operator_has_its_turn_before_a_second_dtype() -> None:
    rows = device_check.rows_for([Device("cuda:0", "sm_90", "triton")], False)
    first = rows[: len({(r.op, r.direction) for r in rows})]
    assert len({(r.op, r.direction) for r in first}) == len(first)
    heats = device_check.heats_for([Device("cuda:0", "sm_90", "triton")], False)
    assert {h.op for h in heats} == {r.op for r in rows} and heats[0].direction == "forward" and heats[-1].direction == "backward"


def begin() -> None: ...


def test_processes_end_at_the_deadline() -> None:
    started = time.monotonic()
    found = dict(each(begin, time.sleep, [600, 601, 602], jobs=1, limit=600.0, until=started + 0.5))
    assert found == dict.fromkeys((600, 601, 602), LATE) and time.monotonic() - started < 200


def test_a_report_needs_no_comparison_of_its_own() -> None:
    """Nothing was done at all: that is not a success."""
    assert device_check.exit_code(Report(only_triton(), False)) == UNDETERMINED
