"""The generated files of the documentation, as text; what is stale; writing them."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import kdk.ops  # noqa: F401  (registers the operators)
from kdk.backends import LANGUAGES
from kdk.errors import UsageError
from kdk.op import Op
from kdk.registry import OPERATORS
from kdk_bench import evidence
from kdk_bench.operator_docs import facts, figures, limits
from kdk_bench.stubs import OWN

ROOT = Path(__file__).parents[3]
FOLDER = "docs/operators"
README = "README.md"
BEGIN, END = "<!-- operators: written by `python -m kdk_bench.operator_docs` -->\n", "<!-- operators: end -->"
LONGEST_CALL = 76  # characters of a call in the README's table; a longer one shows the arguments that have no default


def own() -> list[Op]:
    """kdk's own operators, by name: what else is installed differs from host to host."""
    return sorted((o.op for o in OPERATORS.values() if o.op.package.startswith(OWN)), key=lambda op: op.name)


def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parents[1] / "templates")
    found = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    found.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return found


def page(op: Op, records: list[evidence.Record]) -> str:
    """docs/operators/<name>.md."""
    mine = [r for r in records if r["op"] == op.name]
    resources, blocks = figures.resources(mine), figures.in_blocks(op, records)
    text = _templates().get_template("operator.md.j2").render(
        d=facts.declaration(op),
        promises=facts.promises(op, filter(evidence.shows_results, mine)),
        refusals=limits.refusals(op),
        accuracy=figures.accuracy(op, mine),
        resources=resources,
        legend=figures.legend(resources),
        alone=figures.alone(mine),
        blocks=blocks,
        unknown={report: figures.unknown(op, mine, report) for report in ("check", "compile", "bench")},
        environments=_environments([*mine, *(r for r in records if op.name in r.get("operators", ()))]),
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n")))


def _environments(records: list[evidence.Record]) -> list[str]:
    return sorted({", ".join(f"{name} {version}" for name, version in r["environment"].items()) for r in records})


def table(ops: list[Op], records: list[evidence.Record]) -> str:
    """The README's table of operators."""
    rows = [_row(op, [r for r in records if r["op"] == op.name and evidence.shows_results(r)]) for op in ops]
    return _templates().get_template("operators.md.j2").render(rows=rows)


def _row(op: Op, records: list[evidence.Record]) -> dict[str, str]:
    there = [(i, d) for i, d in facts.implementations(op) if i in LANGUAGES]
    kernels = {direction: ", ".join(i for i, d in there if d == direction) for direction in dict.fromkeys(d for _, d in there)}
    same = len(set(kernels.values())) == 1 < len(kernels)
    promise = [f"{kernels['forward']}, forward and backward"] if same else [f"{names}, {d}" for d, names in kernels.items()]
    checked = {(r["implementation"], r["direction"]) for r in records if r["report"] == "check"}
    missing = [f"{i} {d}" for i, d in there if (i, d) not in checked]
    known = facts.kinds(r for r in records if r["implementation"] in LANGUAGES)
    unknown = "results unknown: no check that holds"
    unknown += "" if len(missing) == len(there) else f" of {', '.join(missing)}"
    return {
        "name": op.name,
        "call": _call(op),
        "summary": op.summary,
        "promise": "; ".join(promise) or "none",
        "evidence": "; ".join([*filter(None, [known]), *([unknown] if missing else [])]),
    }


def _call(op: Op) -> str:
    """As it is called: names, and defaults as far as there is room."""
    parameters = list(op.signature.parameters.values())
    by_name = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    if by_name is not None:
        written.insert(by_name, "*")
    text = f"{op.name}({', '.join(written)})"
    if len(text) <= LONGEST_CALL:
        return text
    return f"{op.name}({', '.join(p.name for p in parameters if p.default is p.empty)}, ...)"


def files(store: Path = evidence.STORE, root: Path = ROOT) -> dict[str, str]:
    """Every generated file below the repository's root, whole. Raises UsageError outside a repository, or where a kernel language
    is missing."""
    readme = root / README
    if not readme.exists():
        raise UsageError("KDK-DOCS", "no repository around this kdk_bench", value=str(root), way_out="run it in a checkout")
    records, ops = evidence.load(store), own()
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UsageError("KDK-DOCS", f"{README} has no table of operators", limit=f"it stands between {BEGIN.strip()} and {END}")
    found = {f"{FOLDER}/{op.name}.md": page(op, records) for op in ops}
    return {**found, README: f"{before}{begin}{table(ops, records)}{end}{after}"}


def comparable(text: str) -> str:
    """A file without what may differ while it is not stale: dates and versions."""
    made_with = text.partition("\n## Made with\n")
    return re.sub(r"\d{4}-\d{2}-\d{2}", "DATE", made_with[0] + made_with[1])


def stale(wanted: dict[str, str], root: Path = ROOT) -> list[str]:
    """Files that are not what they should be, or that belong to no operator."""
    there = {f"{FOLDER}/{path.name}" for path in (root / FOLDER).glob("*.md")}
    differ = [n for n, text in wanted.items() if not (root / n).exists() or comparable((root / n).read_text()) != comparable(text)]
    return [*differ, *sorted(there - set(wanted))]


def write(wanted: dict[str, str], root: Path = ROOT) -> None:
    """Write every file, and take away pages of operators that are gone."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for path in (root / FOLDER).glob("*.md"):
        if f"{FOLDER}/{path.name}" not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (root / name).write_text(text)


