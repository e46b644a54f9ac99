"""Runs on every rank of a test: what `gsreal calibrate` measures of messages, shortly; rank 0 writes it.

Argument: the file to write.
"""

import json
import sys
from pathlib import Path

from gsreal.calibrate import communication
from gsreal.calibrate.bench import Bench, Settings
from gsreal.run.rank import run_on_rank


def main(out: str) -> None:
    communication.OUTLIERS = 0.0
    communication.EXCHANGE_BYTES = communication.POSTED_BYTES = (2**14, 2**20)
    settings = Settings(models=(), batch_sizes=(), sequence_length=1, precision="fp32", kind="cpu", link_repeats=1)
    bench = Bench(settings)
    bench.displace = lambda: None
    found = communication.communication_cost(bench)
    found["all_reduces"] = communication.all_reduce_table(bench, "gloo", (2**10, 2**20))
    if bench.rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
