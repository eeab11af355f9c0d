"""The page of `--html`: whole by itself, and clicked in a browser."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.browser import chromium

from kdk_bench import cli

# Clicks a platform's filter, searches, sorts, and leaves what it saw in the page's title.
CLICKS = """
<script>
{
const seen = {};
const visible = (id) => [...document.querySelectorAll(`#${id} tbody tr`)].filter((r) => !r.hidden);
seen.all = visible("findings").length;
document.querySelector('.filters button[data-platform="xla"]').click();
seen.xla = visible("findings").length;
seen.others = visible("findings").filter((r) => !["", "xla"].includes(r.dataset.platform)).length;
document.querySelector('.filters button[data-platform=""]').click();
seen.again = visible("findings").length;
const find = document.getElementById("find");
find.value = "aten::median"; find.dispatchEvent(new Event("input"));
seen.found = visible("ops").map((r) => r.querySelector("code").textContent);
find.value = ""; find.dispatchEvent(new Event("input"));
document.querySelector('#ops button[data-sort="bytes"]').click();
const bytes = visible("ops").map((r) => Number(r.dataset.bytes));
seen.sorted = bytes.every((b, i) => i === 0 || bytes[i - 1] >= b);
document.querySelector("#findings details summary").click();
seen.open = document.querySelector("#findings details").open;
document.title = "RESULT" + JSON.stringify(seen) + "END";
}
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("html")
    with pytest.raises(SystemExit):
        cli.main(["audit", "tests.audit.models:median", "--html", str(folder / "r.html"), "--json", str(folder / "r.json")])
    return (folder / "r.html").read_text(), json.loads((folder / "r.json").read_text())


def test_the_page_is_whole_by_itself(page: tuple[str, dict[str, object]]) -> None:
    text, report = page
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|fetch\(""", text)
    assert all(f["id"] in text for f in report["findings"])  # type: ignore[index,attr-defined]
    assert "aten::median" in text and "operators: 1 missing" in text


@pytest.mark.slow
def test_the_page_works_in_a_browser(page: tuple[str, dict[str, object]], tmp_path: Path) -> None:
    browser = chromium()
    text, report = page
    file = tmp_path / "page.html"
    file.write_text(text.replace("</body>", CLICKS + "</body>"))
    command = [*browser, "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    match = re.search(r"RESULT(.*?)END", done.stdout)
    assert match, done.stdout[:2000]
    seen = json.loads(match[1].replace("&quot;", '"'))
    findings = report["findings"]
    assert seen["all"] == seen["again"] == len(findings)  # type: ignore[arg-type]
    assert seen["xla"] == sum(f["platform"] in ("", "xla") for f in findings) and seen["others"] == 0  # type: ignore[attr-defined]
    assert seen["found"] == ["aten::median"] and seen["sorted"] and seen["open"]
