"""Reader of a table of DDP, local SGD and DiLoCo on hosts of one GPU each, behind links that are shaped to a rate.

The scored time is that of an outer step, or, for DDP, of every step. Its two inputs are measured, and nothing is fitted
to a step:

- Compute time is the row's own (`compute_ms_median`). The model has one layer, with the FLOP that a GPU of one TFLOP/s
  does in that time.
- The network's rate follows from the time of one exchange of all parameters (`sync_ms_median`), in which a ring moves
  2 (n - 1) / n of their bytes over each of the n hosts' links. The exchange is taken from the first row of local SGD or
  DiLoCo with the same model, GPU, number of hosts and shaped rate. That row is not scored. Where there is none, the
  network has the rate that it is shaped to.

Two effects are in the measurements and not modelled. An exchange in DDP's buckets takes 1.4 times as long as one of all
parameters at once at 50 Mbit/s, 1.3 times at 1 Gbit/s, and 0.8 times where links are not shaped: so the shaper causes
it, but the table does not show how. An exchange after 128 inner steps takes 1.2 to 1.5 times as long as one after 8 at
1 Gbit/s, and 6 times where links are not shaped: presumably a connection that was idle for seconds starts slowly.
"""

import re
from collections.abc import Mapping, Sequence

from analysis.literature.runs import Measured, Run, SkippedError, Software, gpt
from analysis.literature.tables.fields import needed, positive

METHODS = {"ddp": "ddp", "localsgd": "local_sgd", "diloco": "diloco"}
GPU = "L40S"
VALUE_BYTES = 4


def periodic(record: Mapping[str, str], identity: str, table: Sequence[Mapping[str, str]]) -> Run:
    """Return the run of a row of a table; raise SkippedError for missing fields, or where its network is not known."""
    method = METHODS.get(record["algorithm"])
    if method is None:
        raise SkippedError(f"the algorithm '{record['algorithm']}' is not known")
    ranks, parameters = needed(record, "world_size"), needed(record, "n_params")
    micro_batch, sequence_length = needed(record, "micro_batch"), needed(record, "seq")
    compute_ms, step_ms = positive(record, "compute_ms_median"), positive(record, "outer_step_ms_median")
    if compute_ms is None or step_ms is None:
        raise SkippedError("the row has no time of its compute, or of its outer step")
    if ranks < 2:
        raise SkippedError("one host exchanges nothing")
    if not record["gpu"].startswith(GPU):
        raise SkippedError("a GPU that this table's reader does not know")
    # a row's exchange tells the rate of the network of others of its size
    of_network = ("gpu", "world_size", "bandwidth", "n_params")
    alike = [row for row in table if all(row[key] == record[key] for key in of_network)]
    exchanges = [row for row in alike if row["algorithm"] in ("localsgd", "diloco")]
    network = next((row for row in exchanges if positive(row, "sync_ms_median") is not None), None)
    sync_ms = positive(network, "sync_ms_median") if network else None
    ring_bytes = 2 * (ranks - 1) / ranks * VALUE_BYTES * parameters
    rate = ring_bytes / (sync_ms / 1e3) if sync_ms else _shaped_bytes_per_s(record["bandwidth"])
    return Run(
        identity=record["run"] or identity,
        source=f"DiLoCo measured, {method} on {ranks} {GPU}",
        gpu=GPU,
        per_node=1,
        shape=gpt(layers=6, hidden=384, heads=6, vocabulary=50304, sequence_length=sequence_length),
        software=Software(precision="fp32"),
        method=method,
        dp=ranks,
        micro_batch=micro_batch,
        micro_batches=1,
        recompute="none",
        overlap=True,
        step_s=step_ms / 1e3,
        measured=Measured(
            parameters=parameters,
            compute_s=compute_ms / 1e3,
            link_bytes_per_s=rate,
            sync_every_steps=None if method == "ddp" else needed(record, "H"),
        ),
        calibration=network is not None and network["run"] == record["run"],
    )


def _shaped_bytes_per_s(text: str) -> float:
    """Return the rate that links are shaped to; raise SkippedError where it is not stated.

    >>> _shaped_bytes_per_s("50m"), _shaped_bytes_per_s("2.5gbit")
    (6250000.0, 312500000.0)
    """
    match = re.match(r"([\d.]+) ?([kmg])(bit)?", text.lower())
    if match is None:
        raise SkippedError("no row of local SGD or DiLoCo tells the rate of its network")
    return float(match.group(1)) * {"k": 1e3, "m": 1e6, "g": 1e9}[match.group(2)] / 8
