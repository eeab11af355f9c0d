"""libtpu's compiler and its static profiler in processes of their own: the flag that turns the profiler on is the process's, and
some instructions make it abort. It works on as many instructions at once as there are CPUs, and a thread that aborts is made to wait
instead: where the others do the rest, the cycles of all other instructions are known. Else those are read that it wrote before an
abort ended it: the cycles of a part of the program."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO

LIMIT = 120.0  # seconds of its own for one program; the estimate's cost grows with the cycles that it simulates
IDLE = 5  # seconds in which no thread could run, after which none will
STUCK = 10  # times the limit on the clock: a program that waits, or a machine that does much else

# Of a worker: without the profiler; with it, until it aborts; with it, a thread that aborts waiting.
PLAIN, PROFILING, PARKING = MODES = ("plain", "profiling", "parking")
ANSWERED, LATE, PARKED = "answered", "late", "parked"


@dataclass(frozen=True)
class Program:
    """text: the optimised HLO, empty if there is none. profile: cycles by instruction. why_not: where something lacks, why; beside a
    text, why the cycles are of a part of the program or there are none. aborted: on something. but: on these instructions, which alone
    lack cycles, if that is known."""

    text: str = ""
    profile: dict[str, int] = field(default_factory=dict)
    why_not: str = ""
    aborted: bool = False
    but: tuple[str, ...] = ()


class _Worker:
    """One process that compiles, in one of the MODES. Started at first use, and again after it died."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
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
            state = _state(process, process.stdout, limit, self.mode == PARKING)
            if state == PARKED:
                return self._parked()
            if state == LATE:
                return Program(profile=self._stopped(), why_not=f"no end after {limit:.0f} s")
            answer: Program = pickle.load(process.stdout)
            return answer
        except (EOFError, OSError, pickle.UnpicklingError):
            code = process.wait()
            self.errors.seek(0)
            said = self.errors.read().decode(errors="replace")
            why_not = f"the compiler's process ended with {code}{_last_words(said)}"
            return Program(profile=self._stopped(), why_not=why_not, aborted=True)

    def _start(self) -> subprocess.Popen[bytes]:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self.folder = tempfile.mkdtemp(prefix="kdk-profile-")
        command = [sys.executable, "-m", "kdk_bench.modelled.worker", self.folder, self.mode]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment["JAX_PLATFORMS"] = "cpu"
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment)
        return self.process

    def _parked(self) -> Program:
        """What there is where all threads wait: everything but what they aborted on, if one of them was left to do it."""
        assert self.errors is not None
        self.errors.seek(0)
        failed = dict(re.findall(r"Static LLO profiling of (\S+) failed: (.*)", self.errors.read().decode(errors="replace")))
        but = tuple(failed) if 0 < len(failed) < len(os.sched_getaffinity(0)) else ()
        return Program(profile=self._stopped(), why_not="; ".join(dict.fromkeys(failed.values())), aborted=True, but=but)

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


def _state(process: subprocess.Popen[bytes], answers: IO[bytes], limit: float, parking: bool) -> str:
    """ANSWERED; LATE after the process has computed for `limit` seconds; PARKED where it does nothing any more and says nothing."""
    begun, start, asleep = _computed(process.pid), time.monotonic(), 0
    while not select.select([answers], [], [], min(1.0, limit))[0]:
        if _computed(process.pid) - begun >= limit or time.monotonic() - start >= STUCK * limit:
            return LATE
        asleep = asleep + 1 if parking and _sleeps(process.pid) else 0
        if asleep == IDLE:
            return PARKED
    return ANSWERED


def _sleeps(pid: int) -> bool:
    """Whether no thread of a process runs or could run."""
    states = []
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # of a thread that ended
            states.append(file.read_text().rpartition(")")[2].split()[0])
    return all(state == "S" for state in states)


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
        self._parking, self._profiling, self._plain = _Worker(PARKING), _Worker(PROFILING), _Worker(PLAIN)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for worker in (self._parking, self._profiling, self._plain):
            worker.stop()

    def program(self, stablehlo: str, target: str) -> Program:
        """A StableHLO module for a chip, with the profiler's cycles; where it aborts or does not end, with those that there are."""
        found = self._parking.ask(stablehlo, target, self.limit)
        if found.text:
            return found
        if found.aborted and not found.but:  # once more, one instruction after the other: what is written is the same every time
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


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _wait(number: int) -> None:
    while True:
        time.sleep(3600.0)


def _park() -> None:
    """A thread that aborts waits from now on. After libtpu has set its own handlers; Python's run in the main thread alone.

    libtpu sends SIGTRAP to a process that is still there 30 s after an abort, and ends it 15 s later: the others have so long."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    for number in (signal.SIGABRT, signal.SIGTRAP):
        libc.signal(number, ctypes.cast(_wait, ctypes.c_void_p))


def serve(stdin: IO[bytes], stdout: IO[bytes], folder: str, parking: bool) -> None:
    """In the worker: a program after the other, until the input ends. folder: of what the compiler writes."""
    from kdk.backends.pallas.compile import device, readable

    while True:
        try:
            text, target = pickle.load(stdin)
        except EOFError:
            return
        for file in (*Path(folder).glob(PROFILES), *Path(folder).glob("*.txt")):
            file.unlink()
        try:
            if parking:
                device(target)
                _park()
            answer = Program(_optimised(text, target, folder), written(folder))
        except Exception as error:
            answer = Program(why_not=readable(error))
        pickle.dump(answer, stdout)
        stdout.flush()
