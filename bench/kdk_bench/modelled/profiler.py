"""libtpu's compiler and its static profiler in processes of their own: the flag that turns the profiler on is the process's, and
some programs make it abort. What it had written until then is read all the same: the cycles of a part of the program."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO

LIMIT = 120.0  # seconds of its own for one program; the estimate's cost grows with the cycles that it simulates
STUCK = 10  # times the limit on the clock: a program that waits, or a machine that does much else


@dataclass(frozen=True)
class Program:
    """text: the optimised HLO, empty if there is none. profile: cycles by instruction. why_not: where something lacks, why; beside a
    text, why the cycles are of a part of the program or there are none."""

    text: str = ""
    profile: dict[str, int] = field(default_factory=dict)
    why_not: str = ""


class _Worker:
    """One process that compiles. Started at first use, and again after it died."""

    def __init__(self, profiling: bool) -> None:
        self.profiling = profiling
        self.process: subprocess.Popen[bytes] | None = None
        self.errors: IO[bytes] | None = None
        self.folder = ""  # of what it writes, which outlives it

    def ask(self, text: str, target: str, limit: float) -> Program:
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None and self.errors is not None
        self.errors.seek(0)
        self.errors.truncate()
        try:
            pickle.dump((text, target), process.stdin)
            process.stdin.flush()
            if not _answers(process, process.stdout, limit):
                return Program(profile=self._stopped(), why_not=f"no end after {limit:.0f} s")
            answer: Program = pickle.load(process.stdout)
            return answer
        except (EOFError, OSError, pickle.UnpicklingError):
            code = process.wait()
            self.errors.seek(0)
            said = self.errors.read().decode(errors="replace")
            return Program(profile=self._stopped(), why_not=f"the compiler's process ended with {code}{_last_words(said)}")

    def _start(self) -> subprocess.Popen[bytes]:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self.folder = tempfile.mkdtemp(prefix="kdk-profile-")
        command = [sys.executable, "-m", "kdk_bench.modelled.worker", self.folder, *(["profile"] if self.profiling else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment["JAX_PLATFORMS"] = "cpu"
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment)
        return self.process

    def _stopped(self) -> dict[str, int]:
        """Stop; the cycles that it had written."""
        profile = written(self.folder)
        self.stop()
        return profile

    def stop(self) -> None:
        if self.process is not None:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # of a process that ended before it read: there is nobody to flush to
                        pipe.close()
            self.process.kill()
            self.process.wait()
        if self.errors is not None:
            self.errors.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.process, self.errors, self.folder = None, None, ""


def _answers(process: subprocess.Popen[bytes], answers: IO[bytes], limit: float) -> bool:
    """Whether there is an answer before the process has computed for `limit` seconds."""
    begun, start = _computed(process.pid), time.monotonic()
    while not select.select([answers], [], [], min(1.0, limit))[0]:
        if _computed(process.pid) - begun >= limit or time.monotonic() - start >= STUCK * limit:
            return False
    return True


def _computed(pid: int) -> float:
    """Seconds that a process has computed. libtpu exists for Linux alone, so does this."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _last_words(said: str) -> str:
    """The line of a crash that says why."""
    lines = [line for line in said.splitlines() if line.strip()]
    telling = [line.partition("] ")[2] for line in lines if re.match(r"F\d{4} ", line)]
    telling += [line for line in lines if "Check failed" in line or "fatal" in line.lower()]
    return f": {' '.join((telling or lines[-1:])[0].split())[:300]}" if lines else ""


class Profiler:
    """Compiles programs for chips that are not here. A context: its processes end with it."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self._profiling, self._plain = _Worker(True), _Worker(False)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._profiling.stop()
        self._plain.stop()

    def program(self, stablehlo: str, target: str) -> Program:
        """A StableHLO module for a chip, with the profiler's cycles; where that aborts or does not end, with those that it had
        written until then, and why."""
        found = self._profiling.ask(stablehlo, target, self.limit)
        if found.text:
            return found
        plain = self._plain.ask(stablehlo, target, self.limit)
        if not plain.text:
            return Program(why_not=plain.why_not or found.why_not)
        return replace(found, text=plain.text)


PROFILES, DUMPED = "*_static_llo_profile.textproto", "*.after_codegen.txt"


def written(folder: str) -> dict[str, int]:
    """Cycles by instruction, of the profiler's files."""
    profile = {}
    for file in Path(folder).glob(PROFILES):
        content = file.read_text()
        name, cycles = re.search(r'hlo_op_name: "(.*?)"', content), re.search(r"estimated_cycles: (\d+)", content)
        if name and cycles:
            profile[name[1]] = int(cycles[1])
    return profile


def _optimised(stablehlo: str, target: str, folder: str) -> str:
    """The optimised program's text; of one that XLA compiles and cannot read back, as it was dumped."""
    from kdk.backends.pallas.compile import loaded, text_of

    program = loaded(stablehlo, target)
    try:
        return text_of(program)
    except Exception:
        dumped = sorted(Path(folder).glob(DUMPED), key=lambda file: file.stat().st_size)
        if not dumped:
            raise
        return dumped[-1].read_text()


def serve(stdin: IO[bytes], stdout: IO[bytes], folder: str) -> None:
    """In the worker: a program after the other, until the input ends. folder: of what the compiler writes."""
    from kdk.backends.pallas.compile import readable

    while True:
        try:
            text, target = pickle.load(stdin)
        except EOFError:
            return
        for file in (*Path(folder).glob(PROFILES), *Path(folder).glob("*.txt")):
            file.unlink()
        try:
            answer = Program(_optimised(text, target, folder), written(folder))
        except Exception as error:
            answer = Program(why_not=readable(error))
        pickle.dump(answer, stdout)
        stdout.flush()
