"""python -m kdk_bench.modelled.worker FOLDER MODE: compiles what it is given on standard input. See profiler.py."""

from __future__ import annotations

import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libtpu prints is no answer
    folder, mode = sys.argv[1:]
    _add("XLA_FLAGS", f"--xla_dump_to={folder} --xla_dump_hlo_as_text=true")
    if mode != "plain":
        _add("LIBTPU_INIT_ARGS", f"--xla_jf_dump_static_llo_profile_to={folder}")
    if mode == "profiling":
        # On one CPU it takes the instructions in their order: what is written before an abort is the same every time.
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {mine[os.getpid() % len(mine)]})
    from kdk.backends.pallas.environment import prepare_jax

    prepare_jax()
    from kdk_bench.modelled.profiler import serve

    serve(sys.stdin.buffer, answers, folder, mode == "parking")


def _add(variable: str, flags: str) -> None:
    os.environ[variable] = f"{os.environ.get(variable, '')} {flags}".strip()


if __name__ == "__main__":
    main()
