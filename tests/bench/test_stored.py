"""What the modelled programs of blocks leave in the user's cache."""

import pytest

from kdk_bench.compiling import sources
from kdk_bench.modelled.profiler import Profiler, Program
from kdk_bench.modelled.stored import Stored


@pytest.mark.parametrize(
    "program, runs",
    [
        (Program("hlo", {"add": 3}), 1),
        (Program("hlo", {"add": 3}, "aborts", aborted=True, but=("gather",)), 1),
        (Program("hlo", {"add": 3}, "no end after 120 s"), 2),
        (Program("hlo", {"add": 3}, "the process ended", aborted=True), 2),
    ],
)
def test_what_was_cut_short_is_done_again(program, runs, monkeypatch):
    kept, asked = {}, []
    monkeypatch.setattr(sources, "load", kept.get)
    monkeypatch.setattr(sources, "store", kept.__setitem__)
    monkeypatch.setattr(Profiler, "program", lambda self, text, target: asked.append(text) or program)
    profiler = Stored()
    assert [profiler.program("module", "v6e").text for _ in range(2)] == ["hlo", "hlo"]
    assert len(asked) == runs
