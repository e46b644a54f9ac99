"""What NCCL needs for one collective on an idle machine: algorithm, protocol, latency, and the share of the links.

NCCL prices every algorithm and protocol as latency + bytes / bandwidth and runs the cheapest (`src/graph/tuning.cc` and
`ncclTopoGetAlgoTime` of github.com/NVIDIA/nccl; the numbers below are of that file). `NcclTuning` starts from those
numbers; four of them a user may `fit` to a table of nccl-tests, for a machine is slower than its planner believes.

Note [chunk pipelining]
    A buffer of t seconds on the wire is cut into m chunks that follow each other over the steps of the algorithm. Every
    chunk costs an exposed latency, every step before the first chunk arrives costs a chunk's time: with W = steps *
    latency, T(m) = t + m * W / steps + steps * t / m, least at m = steps * sqrt(t / W), where T = t + 2 * sqrt(W * t).
    The square root is why small messages fill no link. NCCL comes near the best m by eight slots of 4 MiB / 8 = 512 KiB
    (`NCCL_STEPS`, `src/include/device.h`) and by chunks cut down for small buffers (`src/enqueue.cc`). W is what
    measurements tell (`pipeline_latency_s`). LL and LL128 forward line by line: no such term.
"""

from gssim.nccl.fit import fit
from gssim.nccl.packing import ring_packing
from gssim.nccl.times import BASE_LATENCY_S, HOP_LATENCY_S, Choice, Group, times
from gssim.nccl.tuning import GENERATIONS, Algorithm, Joint, Kind, NcclTuning, Protocol

__all__ = [
    "BASE_LATENCY_S",
    "GENERATIONS",
    "HOP_LATENCY_S",
    "Algorithm",
    "Choice",
    "Group",
    "Joint",
    "Kind",
    "NcclTuning",
    "Protocol",
    "fit",
    "ring_packing",
    "times",
]
