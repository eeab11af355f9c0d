"""A strict NumPy emulator of the public NKI 0.6/0.7 API, standing in where the vendor's package is absent.

    from kdk.backends.nki import emulator
    nki = emulator.install()             # import nki, nki.isa, nki.language, nki.typing now find it
    nki.simulate(kernel)(*arrays)

It refuses what the hardware or the API would refuse, with a stable code and the way out. Passing does not guarantee
that the vendor's compiler accepts a kernel. Imports no torch.
"""

from __future__ import annotations

from .cost.timeline import write_timeline
from .errors import CHECKS, NkiValidationError
from .host import TensorSpec
from .modules import install, is_emulator, vendor_nki_available
from .simulator import Kernel, Simulation, jit, simulate

__all__ = [
    "CHECKS",
    "Kernel",
    "NkiValidationError",
    "Simulation",
    "TensorSpec",
    "install",
    "is_emulator",
    "jit",
    "simulate",
    "vendor_nki_available",
    "write_timeline",
]
