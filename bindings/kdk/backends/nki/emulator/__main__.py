"""python -m kdk.backends.nki.emulator SCRIPT [ARGS]: run a script whose `import nki` finds the emulator."""

from __future__ import annotations

import os
import runpy
import sys

from . import install


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m kdk.backends.nki.emulator SCRIPT [ARGS]")
    install()
    os.environ.setdefault("NKI_SIMULATOR", "1")
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
