"""The README's Python runs, top to bottom, as a newcomer would paste it."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_python_of_the_readme_runs(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    promised = re.findall(r"^# (rms_norm\..*)$", README.read_text(), re.M)
    assert promised and all(line in printed for line in promised)


def test_the_table_of_the_readme_names_every_operator() -> None:
    import kdk.ops  # noqa: F401
    from kdk.registry import OPERATORS

    text = README.read_text()
    for name, operator in OPERATORS.items():
        if operator.op.package.startswith("kdk_kernels."):
            assert f"`{name}(" in text, f"the README's table lacks {name}"
