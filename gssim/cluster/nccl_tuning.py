"""Constants of NCCL's performance model by GPU generation, and the names of its algorithms and protocols."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from gssim.units import BytesPerSecond, NonNegativeFloat, PositiveFloat, PositiveInt, Seconds, spec

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "send", "all-to-all"]
Algorithm = Literal["ring", "tree", "nvls", "direct"]
Protocol = Literal["ll", "ll128", "simple"]
Joint = Literal["nvlink", "pcie", "network"]
Array = np.ndarray[Any, np.dtype[np.float64]]


@spec
class NcclTuning:
    """Constants of a platform. The defaults are NCCL's own for Ampere; `GENERATIONS` has the others.

    The first five may be fitted, but only four from one table: of the two bandwidth ratios, the network's if there is a
    network, else the links'.

    >>> NcclTuning(latency_s="20 us").latency_s
    2e-05
    """

    latency_s: Seconds = 0.0
    """Fitted. Added to every call, beyond NCCL's own base latency: launch, synchronisation, a framework's overhead."""
    simple_hop_ratio: PositiveFloat = 1.0
    """Fitted. Actual over published latency of a hop with the Simple protocol: fences, and on a network the proxy."""
    pipeline_latency_s: Seconds = 0.0
    """Fitted. Exposed latency W of the chunk pipeline: 2 * sqrt(W * t) on top of t seconds of transfer."""
    bandwidth_ratio: PositiveFloat = 0.8
    """Fitted. Achieved rate over wire rate inside a node: NCCL assumes 20 of NVLink's 25 GB/s (`topo.h`)."""
    network_bandwidth_ratio: PositiveFloat = 0.96
    """Fitted (several nodes). Achieved rate over wire rate of the network: NCCL assumes 12 of 12.5 GB/s (`topo.h`)."""
    low_latency_ratio: PositiveFloat = 1.0
    """Achieved relative to published rate of LL and LL128; NCCL assumes 1, see `MEASURED_LOW_LATENCY_RATIO`."""
    ll_node_bytes_per_s: BytesPerSecond = 87.7e9
    """Largest rate of LL through a GPU within one node."""
    ll_two_nodes_bytes_per_s: BytesPerSecond = 22.5e9
    """Largest rate of LL through a GPU if the ranks are on two nodes."""
    ll_nodes_bytes_per_s: BytesPerSecond = 19e9
    """Largest rate of LL through a GPU if the ranks are on three or more nodes."""
    ll128_across_nodes: bool = False
    """Whether LL128 may be used across the network: only where the path keeps 128-byte stores whole."""
    nvls_ratio: NonNegativeFloat = 0.0
    """Achieved rate of in-switch reduction (NVLS) relative to `bandwidth_ratio`; 0: the GPU has no NVLS."""
    copy_bytes_per_s: BytesPerSecond | None = None
    """Rate of a ring's last step, a copy from buffer to output in GPU memory: half of the bandwidth. None: no cost."""
    channels: PositiveInt = 16
    """Channels of a ring across nodes. The plateau begins once every channel's part of a rank's buffer reaches 64
    bytes.
    """
    plateau_ratio: PositiveFloat = 1.4
    """Time ratio of a ring across nodes with the Simple protocol on the plateau (`ncclTopoGetAlgoTime`)."""


# Fitted on every other size of the vTrain tables (V100, A100) and of 2x8 H100: 0.8 to 0.9 of NCCL's assumption.
MEASURED_LOW_LATENCY_RATIO = 0.85
# Fitted on every other size of the vTrain table of eight A100: 0.25 to 0.35, from any start value; V100 show 0.9.
MEASURED_NVSWITCH_HOP_RATIO = 0.3


def _generation(ll_gb_per_s: tuple[float, float, float], memory_gb_per_s: float, **others: Any) -> NcclTuning:
    one, two, more = (rate * 1e9 for rate in ll_gb_per_s)
    return NcclTuning(
        low_latency_ratio=MEASURED_LOW_LATENCY_RATIO,
        ll_node_bytes_per_s=one,
        ll_two_nodes_bytes_per_s=two,
        ll_nodes_bytes_per_s=more,
        copy_bytes_per_s=memory_gb_per_s / 2 * 1e9,
        **others,
    )


GENERATIONS: dict[str, NcclTuning] = {
    "volta": _generation((39, 39, 20.4), 900, plateau_ratio=1.9),
    "ampere": _generation((87.7, 22.5, 19), 1555, simple_hop_ratio=MEASURED_NVSWITCH_HOP_RATIO),
    "hopper": _generation((141, 45, 35), 3350, nvls_ratio=0.85, simple_hop_ratio=MEASURED_NVSWITCH_HOP_RATIO),
    "blackwell": _generation((282, 90, 70), 8000, nvls_ratio=0.74, simple_hop_ratio=MEASURED_NVSWITCH_HOP_RATIO),
}
"""Published constants by GPU generation, with memory bandwidths from data sheets and the measured ratios above."""
GENERATIONS |= {
    # fitted on every other size of an all-reduce over eight V100 of a DGX-1 (vTrain: 1 MB to 1 GB, nccl-tests)
    "volta-dgx-1": replace(GENERATIONS["volta"], latency_s=23e-6, simple_hop_ratio=0.91, bandwidth_ratio=0.931),
    # the latency was set by hand to row 34 of AMP's trials, whose blocks are cut and whose micro-batches are small
    "volta-t4": replace(GENERATIONS["volta"], latency_s=500e-6),
    # fitted in the same way to eight A100 of a DGX A100
    "ampere-dgx-a100": replace(
        GENERATIONS["ampere"],
        latency_s=34e-6,
        simple_hop_ratio=0.30,
        pipeline_latency_s=1.87e-6,
        bandwidth_ratio=0.805,
    ),
}
"""Further constants, fitted to machines of these generations."""
