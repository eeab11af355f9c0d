"""python -m kdk_bench.modelled.worker [profile]: compiles what it is given on standard input. See profiler.py."""

from __future__ import annotations

import os
import sys
import tempfile


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libtpu prints is no answer
    with tempfile.TemporaryDirectory(prefix="kdk-profile-") as folder:
        profiling = sys.argv[1:] == ["profile"]
        if profiling:
            given = os.environ.get("LIBTPU_INIT_ARGS", "")
            os.environ["LIBTPU_INIT_ARGS"] = f"{given} --xla_jf_dump_static_llo_profile_to={folder}".strip()
        from kdk.backends.pallas.environment import prepare_jax

        prepare_jax()
        from kdk_bench.modelled.profiler import serve

        serve(sys.stdin.buffer, answers, folder if profiling else "")


if __name__ == "__main__":
    main()
