"""NCCL on an idle machine: the algorithm and protocol it chooses, their latency, and the bandwidth they reach."""

from gssim.collectives.nccl.fit import fit
from gssim.collectives.nccl.packing import ring_packing
from gssim.collectives.nccl.times import Group, times, ways
