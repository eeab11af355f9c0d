"""The command line: `kdk list`, `kdk env`, `kdk check`, `kdk audit`, `kdk new`, `kdk evidence add`.

Exit codes: 0 holds, 1 does not hold, 2 usage, 3 something asked for could not be determined, 4 internal error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

try:
    from kdk import Op  # noqa: F401  (an editable install would find kdk.errors even so)
    from kdk.errors import DeclarationError, KdkError, UsageError
except ImportError as error:  # another package of this name goes before
    from kdk_bench.identity import explain

    raise SystemExit(explain(error)) from None

from kdk_bench.audit.command import audit_command
from kdk_bench.new.command import new_command

HOLDS, DOES_NOT_HOLD, USAGE, UNDETERMINED, INTERNAL = 0, 1, 2, 3, 4


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


JSON = click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON; - is standard output.")
OPS = click.option("--ops", "directory", metavar="DIR", help="Also take the operators in a folder of your own.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="torch-kdk", prog_name="kdk")
def cli() -> None:
    """Custom kernels for PyTorch in Triton, Pallas and NKI, checked against one reference."""


def _load(directory: str | None) -> list[str]:
    """Register the operators; the names of those in `directory`."""
    import kdk.ops  # noqa: F401
    from kdk.registry import load_directory

    if not directory:
        return []
    from kdk_bench.declared_cases import cases_of

    own = [operator.op for operator in load_directory(directory)]
    for op in own:
        cases_of(op)  # what does not fit the declaration shows here, and not in a worker
    return [op.name for op in own]


@cli.command("list")
@_options(JSON, OPS)
def list_command(json_file: str | None, directory: str | None) -> None:
    """The operators, their kernels, and the evidence for each."""
    _load(directory)
    from kdk_bench import listing, report

    entries = listing.entries()
    if json_file:
        report.write_json({"schema": "kdk.list/1", "ops": entries}, json_file)
    if json_file != "-":
        listing.table(entries, report.console(to_stderr=False))


@cli.command("env")
@JSON
def env_command(json_file: str | None) -> int:
    """Toolchains and devices that are here, whether their versions fit together, and how to get what is missing."""
    from kdk_bench import environment, report

    found = environment.report()
    if json_file != "-":
        environment.table(found, report.console(to_stderr=False))
    if json_file:
        report.write_json(found, json_file)
    return environment.exit_code(found)


@cli.command("check")
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--implementation", "implementations", multiple=True, metavar="NAME", help="reference, torch, triton, pallas or nki.")
@click.option("--direction", "directions", multiple=True, type=click.Choice(["forward", "backward"]))
@click.option("--target", "targets", multiple=True, metavar="CHIP", help="sm_90, v6e, trn2 ...; a platform stands for all its chips.")
@click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE", help="float32, bfloat16, float16.")
@click.option("--case", default="", metavar="NAME", help="Only the case of this name.")
@click.option("--quick/--full", default=True, help="A dozen cases per row (the default), or all edges and the models' shapes.")
@click.option("--seed", default=0, show_default=True, help="Another seed draws other sizes and values.")
@click.option("--jobs", type=int, default=None, metavar="N", help="Processes; 0 runs in this one. Default: one per core.")
@click.option("--github", is_flag=True, help="Also print GitHub annotations.")
@_options(JSON, OPS)
def check_command(
    ops: tuple[str, ...],
    implementations: tuple[str, ...],
    directions: tuple[str, ...],
    targets: tuple[str, ...],
    dtypes: tuple[str, ...],
    case: str,
    quick: bool,
    seed: int,
    jobs: int | None,
    github: bool,
    json_file: str | None,
    directory: str | None,
) -> int:
    """Check kernels against their reference: on a device that is here, else in the language's simulator.

    Without OP, every operator; with --ops, those of that folder.
    """
    own = _load(directory)
    from kdk.selection import IMPLEMENTATIONS
    from kdk_bench import report, runner

    for name in implementations:
        if name not in IMPLEMENTATIONS:
            limit = f"there are {', '.join(IMPLEMENTATIONS)}"
            raise UsageError("KDK-IMPLEMENTATION", "unknown implementation", value=repr(name), limit=limit)
    rows = runner.rows_of(ops or own, implementations, directions, runner.targets_of(targets), dtypes)
    if not rows:
        raise UsageError("KDK-CHECK", "nothing to check: the filters leave no row", way_out="`kdk list` shows what there is")
    plan = runner.Plan(rows, full=not quick, seed=seed, case=case, directory=directory)
    jobs = min(os.cpu_count() or 1, len(rows)) if jobs is None else jobs
    console = report.console(to_stderr=json_file == "-")
    results = _with_progress(plan, jobs, console)
    if case and not any(r.case == case for r in results):
        raise UsageError("KDK-CASE", "no case has this name", value=repr(case), way_out="leave --case out to see them all")
    report.check_table(results, console)
    if github:
        for line in report.github_lines(results):
            click.echo(line, err=json_file == "-")
    if json_file:
        report.write_json(report.check_json(results), json_file)
    return report.exit_code(results)


def _with_progress(plan: Any, jobs: int, console: Any) -> list[Any]:
    from rich.console import Console
    from rich.progress import Progress

    from kdk_bench import runner

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("checking", total=len(plan.rows))
        return runner.run(plan, jobs=jobs, progress=lambda: progress.advance(task))


@cli.group("evidence")
def evidence_group() -> None:
    """The store of evidence behind `kdk list` and the documentation."""


@evidence_group.command("add")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def evidence_add(file: str) -> None:
    """Merge the records of a report (`kdk check --json FILE`) into the store."""
    from kdk_bench import evidence

    try:
        report = json.loads(Path(file).read_text())
    except ValueError as error:
        raise UsageError("KDK-REPORT", f"{file} is not JSON", value=str(error)) from None
    click.echo(f"{evidence.add(report)} records from {file} are in the store")


cli.add_command(audit_command)
cli.add_command(new_command)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and exit with the codes above."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        code = cli.main(args=arguments, prog_name="kdk", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = USAGE
    except click.Abort:
        click.echo("interrupted", err=True)
        code = INTERNAL
    except (UsageError, DeclarationError) as error:
        click.echo(f"kdk: {error}", err=True)
        code = USAGE
    except KdkError as error:
        click.echo(f"kdk: {error}", err=True)
        code = DOES_NOT_HOLD
    except Exception as error:
        import traceback

        click.echo(f"kdk: internal error: {type(error).__name__}: {error}\n{''.join(traceback.format_exc())}", err=True)
        code = INTERNAL
    sys.exit(code or HOLDS)


if __name__ == "__main__":
    main()
