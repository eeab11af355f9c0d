"""`python -m kdk_bench.operator_docs` writes docs/operators/*.md and the README's table; `--check` exits 1 where they are stale."""

from __future__ import annotations

import click

from kdk.errors import UsageError
from kdk_bench.operator_docs import pages


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where a file is stale, dates and versions aside.")
def main(check: bool) -> None:
    """Write the pages of kdk's own operators, and the table in the README."""
    try:
        wanted = pages.files()
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    stale = pages.stale(wanted)
    if not check:
        pages.write(wanted)
        click.echo(f"wrote {len(wanted)} files, {len(stale)} of which were stale")
    elif stale:
        raise click.ClickException(f"stale: {', '.join(stale)}: run `python -m kdk_bench.operator_docs`")
    else:
        click.echo(f"{len(wanted)} files are up to date")


if __name__ == "__main__":
    main()
