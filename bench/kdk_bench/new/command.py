"""The command `kdk new`."""

from __future__ import annotations

from pathlib import Path

import click

from kdk.errors import UsageError

KINDS = ("elementwise", "row", "matmul", "gather")


@click.command("new")
@click.argument("name")
@click.option("--from-audit", "source", nargs=2, metavar="REPORT ID", help="A `kdk audit --json` report and the id of a finding in it.")
@click.option("--kind", type=click.Choice(KINDS), default=None, help="The kernels' skeleton; of a finding its own. Default: elementwise.")
@click.option("--dir", "folder", default=".", show_default=True, metavar="DIR", help="Where the operator's folder goes.")
def new_command(name: str, source: tuple[str, str] | None, kind: str | None, folder: str) -> None:
    """Write the folder of an operator: declaration, cases, reference, patterns, and kernels in Triton, Pallas and NKI.

    `kdk check --ops DIR` runs at once. From a finding, the reference and the pattern are what the model computed there, and the
    kernels refuse until their formula is written.
    """
    from kdk_bench.new.writing import write

    if source and kind:
        problem = "--kind with --from-audit"
        raise UsageError("NEW-KIND", problem, value=kind, limit="the finding's own kind", way_out="leave --kind out")
    path = write(name, kind or "elementwise", _finding(*source) if source else None, folder)
    click.echo(f"wrote {path}: kdk check --ops {folder}")


def _finding(report: str, identity: str) -> dict[str, object]:
    from kdk_bench.audit.audit import SCHEMA
    from kdk_bench.audit.command import read

    for finding in read(report, SCHEMA)["findings"]:
        if finding["id"] == identity:
            if not finding["program"]:
                limit = "open chains, and operators that a platform lacks or is not known to have"
                problem = f"{identity} has no program that a reference could be made of"
                raise UsageError("NEW-FINDING", problem, value=finding["kind"], limit=limit, way_out="kdk new NAME --kind KIND")
            return dict(finding)
    raise UsageError("NEW-FINDING", "the report has no finding of this id", value=identity, way_out=f"the ids are in {Path(report).name}")
