"""The command line: `kdk list`, `kdk env`, `kdk check`, `kdk compile`, `kdk bench`, `kdk tune`, `kdk audit`, `kdk new`,
`kdk evidence add`.

Exit codes: 0 holds, 1 does not hold, 2 usage, 3 something asked for could not be determined, 4 internal error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

try:
    from kdk import Op  # noqa: F401  (an editable install would find kdk.errors even so)
    from kdk.errors import DeclarationError, KdkError, UsageError
except ImportError as error:  # another package of this name goes before
    from kdk_bench.identity import explain

    raise SystemExit(explain(error)) from None
except ValueError as error:  # kdk's UsageError: KDK_USE or KDK_STRICT, which are read by the import
    print(f"kdk: {error} (from the environment: KDK_USE or KDK_STRICT)", file=sys.stderr)
    raise SystemExit(2) from None

from kdk_bench.audit.command import audit_command
from kdk_bench.bench_command import bench_command
from kdk_bench.compile import compile_command
from kdk_bench.new.command import new_command
from kdk_bench.options import DIRECTION, DTYPE, GITHUB, JOBS, JSON, OPS, TARGET, known, load, options, progress
from kdk_bench.tune.command import tune_command

HOLDS, DOES_NOT_HOLD, USAGE, UNDETERMINED, INTERNAL = 0, 1, 2, 3, 4


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="torch-kdk", prog_name="kdk")
def cli() -> None:
    """Custom kernels for PyTorch in Triton, Pallas and NKI, checked against one reference."""


@cli.command("list")
@options(JSON, OPS)
def list_command(json_file: str | None, directory: str | None) -> None:
    """The operators, their kernels, and the evidence for each."""
    load(directory)
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
@options(DIRECTION, TARGET, DTYPE)
@click.option("--case", default="", metavar="NAME", help="Only the case of this name.")
@click.option("--quick/--full", default=True, help="A dozen cases per row (the default), or all edges and the models' shapes.")
@click.option("--seed", default=0, show_default=True, help="Another seed draws other sizes and values.")
@options(JOBS)
@click.option("--row-limit", type=float, default=0.0, metavar="SECONDS", help="Give up a row that takes longer: 600, or 7200 with --full.")
@options(GITHUB, JSON, OPS)
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
    row_limit: float,
    github: bool,
    json_file: str | None,
    directory: str | None,
) -> int:
    """Check kernels against their reference: on a device that is here, else in the language's simulator.

    Without OP, every operator; with --ops, those of that folder.
    """
    own = load(directory)
    from kdk.selection import IMPLEMENTATIONS
    from kdk_bench import report, runner

    known(implementations, IMPLEMENTATIONS)
    rows = runner.rows_of(ops or own, implementations, directions, runner.targets_of(targets), dtypes)
    if not rows:
        raise UsageError("KDK-CHECK", "nothing to check: the filters leave no row", way_out="`kdk list` shows what there is")
    plan = runner.Plan(rows, full=not quick, seed=seed, case=case, directory=directory, limit=row_limit)
    jobs = min(os.cpu_count() or 1, len(rows)) if jobs is None else jobs
    console = report.console(to_stderr=json_file == "-")
    with progress("checking", len(rows)) as advance:
        results = runner.run(plan, jobs=jobs, progress=advance)
    if case and not any(r.case == case or r.outcome == "unknown" for r in results):  # a row that died has no case
        raise UsageError("KDK-CASE", "no case has this name", value=repr(case), way_out="leave --case out to see them all")
    report.check_table(results, console)
    if github:
        for line in report.github_lines(results):
            click.echo(line, err=json_file == "-")
    if json_file:
        report.write_json(report.check_json(results), json_file)
    return report.exit_code(results)


cli.add_command(compile_command)


cli.add_command(bench_command)
cli.add_command(tune_command)


@cli.group("evidence")
def evidence_group() -> None:
    """The store of evidence behind `kdk list` and the documentation."""


@evidence_group.command("add")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def evidence_add(file: str) -> None:
    """Merge the records of a report (`kdk check`, `kdk compile` or `kdk bench`, with --json FILE) into the store."""
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
