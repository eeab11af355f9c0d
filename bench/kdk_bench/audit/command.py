"""The command `kdk audit`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kdk.errors import UsageError

PLATFORMS = ("tpu", "neuron", "xla", "cuda")


@click.command("audit", context_settings={"ignore_unknown_options": False})
@click.argument("model", required=False, default="")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--script", metavar="FILE", help="Run a training script unchanged; its arguments after --.")
@click.option("--steps", type=int, help="With --script: end after so many steps of the optimiser, 3 by default.")
@click.option("--hf", metavar="CONFIG", help="A transformers config.json: built small, costed at its real size.")
@click.option("--target", "targets", multiple=True, metavar="NAME", help="tpu, neuron, xla, cuda or a chip; also separated by commas.")
@click.option("--train", is_flag=True, help="Forward, backward and optimiser; without it forward only.")
@click.option("--dtype", default="", metavar="DTYPE", help="float32, bfloat16, float16: casts the model and its inputs.")
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON; - is standard output.")
@click.option("--html", "html_file", metavar="FILE", help="Write the report as one self-contained page.")
@click.option("--baseline", metavar="FILE", help="An earlier --json: only what is new fails.")
@click.option("--fail-on", "fail_on", metavar="LIST", help="missing, fallback, unknown, new. Default: missing,fallback.")
@click.option("--explain", metavar="ID", help="Everything about one finding.")
@click.option("--evidence", "evidence_files", multiple=True, metavar="FILE", help="What --emit-probe's script measured on a device.")
@click.option("--emit-probe", "probe", metavar="DIR", help="Write a script that measures this model's operators on a rented device.")
@click.option("--import-table", "table_file", metavar="FILE", help="The vendor's Markdown table of torch-neuronx.")
@click.option("--ops", "directory", metavar="DIR", help="Also take the operators in a folder of your own.")
@click.option("--github", is_flag=True, help="Also print GitHub annotations.")
def audit_command(**options: Any) -> int:
    """What of a model works on another platform, what must change, and what it costs. No device is needed.

    MODEL is pkg.module:factory, where the factory returns (module, args, kwargs) or yields several, or a .pt2 file.
    """
    return audit(**options)


def platform_of(name: str) -> str:
    """The platform of a chip, or the platform itself."""
    from kdk_bench.audit.chips import CHIPS

    return CHIPS[name].platform if name in CHIPS else name


def targets_of(given: tuple[str, ...]) -> list[str]:
    """Platforms and chips, all platforms by default."""
    from kdk_bench.audit.chips import CHIPS

    names = [part.strip() for text in given for part in text.split(",") if part.strip()]
    for name in names:
        if name not in PLATFORMS and name not in CHIPS:
            limit = f"platforms are {', '.join(PLATFORMS)}; chips {', '.join(CHIPS)}"
            raise UsageError("AUDIT-TARGET", "unknown target", value=repr(name), limit=limit)
    return list(dict.fromkeys(names)) or list(PLATFORMS)


KEYS: dict[str, dict[str, type]] = {
    "kdk.audit/1": {"findings": list, "ops": list, "capture": dict, "model": str, "platforms": list},
    "kdk.probe/1": {"platform": str, "device": str, "versions": str, "date": str, "ops": list},
}
ROWS: dict[str, dict[str, dict[str, type]]] = {
    "kdk.audit/1": {"findings": {"id": str, "kind": str, "platform": str, "program": dict}, "platforms": {"name": str}},
    "kdk.probe/1": {"ops": {"op": str, "tensors": list, "outcome": str}},
}
"""What a report of a schema and its rows have, so that a damaged one is no surprise later."""


def read(file: str, schema: str) -> dict[str, Any]:
    """A JSON report of this schema."""
    try:
        report = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        way_out = f"a file that kdk wrote, of schema {schema}"
        raise UsageError("KDK-REPORT", f"{file} could not be read as JSON", value=str(error), way_out=way_out) from None
    if not isinstance(report, dict) or report.get("schema") != schema:
        got = report.get("schema") if isinstance(report, dict) else type(report).__name__
        raise UsageError("KDK-REPORT", f"{file} is not a report of this kind", value=got, limit=schema, way_out="write it again")
    missing = [key for key, kind in KEYS[schema].items() if not isinstance(report.get(key), kind)]
    for rows, needed in ROWS[schema].items() if not missing else ():
        if not all(isinstance(row, dict) and all(isinstance(row.get(k), t) for k, t in needed.items()) for row in report[rows]):
            missing.append(f"{' or '.join(sorted(needed))} in one of its {rows}")
    if missing:
        raise UsageError("KDK-REPORT", f"{file} is damaged", value=f"no {', '.join(missing)}", limit=schema, way_out="write it again")
    return report


def audit(
    model: str, arguments: tuple[str, ...], script: str | None, steps: int | None, hf: str | None, targets: tuple[str, ...],
    train: bool, dtype: str, json_file: str | None, html_file: str | None, baseline: str | None, fail_on: str | None,
    explain: str | None, evidence_files: tuple[str, ...], probe: str | None, table_file: str | None,
    directory: str | None, github: bool,
) -> int:  # fmt: skip
    """Capture, look up, report; the exit code."""
    from kdk_bench import report as output
    from kdk_bench.audit import audit as assembling
    from kdk_bench.audit import gate, support, terminal
    from kdk_bench.options import load

    names = targets_of(targets)
    gates = gate.parse(fail_on, baseline is not None)
    old = read(baseline, assembling.SCHEMA) if baseline else None
    measured = [read(file, "kdk.probe/1") for file in evidence_files]
    load(directory)
    platforms_wanted = {platform_of(n) for n in names}
    _on_a_target(evidence_files, measured, platforms_wanted)
    live = {n: support.LiveLookUp(support.descriptions()[n]["plugin"]) for n in platforms_wanted}
    with _printing_elsewhere(json_file == "-"):
        capture = _capture(model, arguments, script, steps, hf, train, dtype)
    imported = {}
    if table_file:
        from kdk_bench.audit.import_table import read_markdown

        imported["neuron"] = read_markdown(table_file)
    platforms = support.platforms(names, live, imported, measured)
    result = assembling.report(capture, platforms, script or hf or model or "")
    for file, report in zip(evidence_files, measured):
        result["capture"]["notes"].append(support.measured_in(result, report, file))
    gone = assembling.compare(result, old) if old else []
    if json_file:  # before the terminal, which a pager may close
        output.write_json(result, json_file)
    if html_file:
        from kdk_bench.audit.html import write_html

        write_html(result, html_file)
    console = output.console(to_stderr=json_file == "-")
    if explain:
        if not terminal.explain(result, explain, console):
            raise UsageError("AUDIT-ID", "no finding has this id", value=explain, way_out="--json has them all")
    else:
        terminal.show(result, console, gone)
    if probe:
        from kdk_bench.audit.probe import emit

        said = f"wrote {emit(result, probe)}: run it on the device, then kdk audit --evidence with the file that it writes"
        console.print(said, soft_wrap=True)
    if github:
        for line in terminal.github(result, gate.failing(result, gates, old is not None)):
            click.echo(line, err=json_file == "-")
    return gate.exit_code(result, gates, old is not None)


def _on_a_target(files: tuple[str, ...], measured: list[dict[str, Any]], platforms: set[str]) -> None:
    """What was measured elsewhere says nothing here, and is not left out in silence."""
    for file, report in zip(files, measured):
        if report["platform"] not in platforms:
            limit, way_out = f"a report of {', '.join(sorted(platforms))}", "--target with its platform"
            if report["platform"] not in PLATFORMS:
                way_out = "python probe.py --device with the platform, on a machine that has it"
            raise UsageError(
                "AUDIT-EVIDENCE", f"{file} was measured on another platform", value=report["platform"], limit=limit, way_out=way_out
            )


@contextlib.contextmanager
def _printing_elsewhere(taken: bool) -> Iterator[None]:
    """What somebody's program prints goes to standard error where standard output is the report's."""
    with contextlib.redirect_stdout(sys.stderr) if taken else contextlib.nullcontext():
        yield


def _capture(model: str, arguments: tuple[str, ...], script: str | None, steps: int | None, hf: str | None, train: bool, dtype: str) -> Any:
    from kdk_bench.audit import running

    if dtype and dtype not in running.DTYPES:
        raise UsageError("AUDIT-DTYPE", "unknown dtype", value=repr(dtype), limit=f"there are {', '.join(running.DTYPES)}")
    if sum(map(bool, (script, hf, model and not script))) != 1:
        limit = "exactly one of MODEL, --script FILE, --hf CONFIG"
        raise UsageError("AUDIT-MODEL", "what is audited", value=model or script or hf or "nothing", limit=limit)
    if arguments and not script:
        way_out = "the arguments of a script go behind --script FILE --; a factory takes none"
        raise UsageError("AUDIT-MODEL", "more than one MODEL", value=" ".join((model, *arguments)), limit="one", way_out=way_out)
    if script and (dtype or train):
        given, limit = (f"--dtype {dtype}", "a script chooses its dtypes") if dtype else ("--train", "a script trains or not by itself")
        raise UsageError("AUDIT-SCRIPT", "options of a factory", value=given, limit=limit, way_out="the script's arguments, or a factory")
    if steps is not None and not script:
        raise UsageError("AUDIT-SCRIPT", "--steps without --script", value=steps, limit="a factory has one step", way_out="leave it out")
    if script:
        from kdk_bench.audit.scripts import run_script

        return run_script(script, [a for a in (model, *arguments) if a], 3 if steps is None else steps)
    if hf:
        from kdk_bench.audit.configurations import run_config

        return run_config(hf, train, dtype)
    if model.endswith(".pt2"):
        if train:
            raise UsageError("AUDIT-PT2", "--train with an exported program", way_out="audit the factory that makes the model")
        return running.run_exported(model, dtype).capture
    factory, files = running.from_factory(model)
    return running.capture_of(running.run(factory, train, dtype), files)
