"""The numbers of the cost model. Everything computed from them is modelled, not measured.

Sources: clocks, memory sizes and DMA figures from the architecture guides of NeuronCore v2 to v4 and the DMA bandwidth
guide; instruction formulas from the API documentation up to NKI 0.1, since withdrawn there (they are averages for
back-to-back instructions). The payload penalty is this project's choice.
"""

from __future__ import annotations

CLOCK_GHZ = {
    2: {"tensor": 2.8, "vector": 1.12, "scalar": 1.4, "gpsimd": 1.4},
    3: {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2},
    4: {"tensor": 2.4, "vector": 1.2, "scalar": 1.2, "gpsimd": 1.2},
}
ISSUE_CYCLES = 64  # least cycles between two instructions of an engine
GPSIMD_START_CYCLES = 150
ACCUMULATOR_READ_CYCLES = 64

DMA_ENGINES = 16
PARTITIONS_PER_DMA_ENGINE = 8
DMA_BYTES_PER_NS = {2: 17.0, 3: 23.0, 4: 33.0}  # achievable, of one engine
DMA_START_US = 1.3
DMA_PAYLOAD_BYTES = 2048  # recommended least bytes per partition
DMA_PAYLOAD_WORST = 8.0  # bound of our penalty for smaller payloads
DMA_TRANSPOSE_SHARE = {"hbm": 0.9, "sbuf": 0.5}  # of the copy bandwidth, at most
DMA_COMPUTE_SHARE = {2: 0.5, 3: 0.5, 4: 1.0}

HBM_BYTES_PER_NS = {2: 410.0, 3: 362.0, 4: 588.0}  # one core's share of the chip
