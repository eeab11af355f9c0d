"""A strict NumPy emulator of the public NKI 0.6/0.7 API, standing in where the vendor's package is absent.

    from kdk.backends.nki import emulator
    nki = emulator.install()             # import nki, nki.isa, nki.language, nki.typing now find it
    nki.simulate(kernel)(*arrays)

It refuses what the hardware or the API would refuse, with a stable code and the way out. Passing does not guarantee
that the vendor's compiler accepts a kernel, and every time it reports is modelled. Imports no torch.

What it holds on to: storage is bytes, so views, dtypes and addresses alias as on the chip; every element knows whether
it may be used and what wrote it; arithmetic is float32 and rounds once on write. Where the public documents are silent
or contradict each other, the docstring of the instruction says what was chosen ("not documented", "not verified").
It does not emulate collectives, the order in which a compiler would schedule, nor the bits of the random numbers.

Environment: NEURON_PLATFORM_TARGET_OVERRIDE (trn2 or trn3, where no target is given), NKI_SIMULATOR=1 (calling a kernel
simulates it), NEURON_LOGICAL_NC_CONFIG (must agree with the launch), NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE (seven PSUM banks),
OPENBLAS_NUM_THREADS=1 (faster matrix products, where threadpoolctl is not installed).
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
