"""A patched Llama in two processes: FSDP2, tensor parallelism with and without DTensors inside, sequence parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.torch import parallel_llama
from tests.torch.two_processes import run


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("two_processes")
    return run(parallel_llama.cases, folder)


@pytest.mark.parametrize("case", [name for name, _ in parallel_llama.cases(None)])
def test_parallel(outcome: dict[str, str], case: str) -> None:
    assert outcome[case] == ""
