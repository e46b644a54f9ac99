"""Results as tests make them, the command line of analysis, and its refusals."""

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from analysis.compare.table import ResultFile
from gssim.result import PHASES, Collective, Density, RankClass, Result

ALL_REDUCE = Collective(kind="all-reduce", group=(0, 1), bytes=4_000_000, count=3)
PUSH = Collective(kind="all-to-all-v", group=(0, 1), bytes=8_000_000, count=2, payload_bytes=1_000_000.0)


def make_result(
    source: str,
    *,
    scenario_id: str = "a" * 16,
    name: str = "ddp-even",
    method: str = "ddp",
    threshold: float | None = None,
    step_time_s: float = 0.2,
    phase_shares: tuple[float, ...] = (0.3, 0.4, 0.0, 0.1, 0.15, 0.05),
    peaks_bytes: tuple[float, ...] = (100e6, 100e6),
    devices: tuple[str, ...] | None = None,
    collectives: tuple[Collective, ...] = (ALL_REDUCE,),
    push_density: float | None = None,
    publish: dict[str, Any] | None = None,
    losses: tuple[float, ...] = (),
    steps: int = 10,
    step_times_s: tuple[float, ...] = (),
    repeat: int | None = None,
    bytes_sent: float | None = None,
    scenario: dict[str, Any] | None = None,
) -> Result:
    phases_s = {phase: share * step_time_s for phase, share in zip(PHASES, phase_shares, strict=True)}
    n = len(peaks_bytes)
    return Result(
        source=source,  # type: ignore[arg-type]
        scenario_id=scenario_id,
        calibration_id="c" * 16,
        scenario={
            "name": name,
            "run": {"steps": steps},
            "plan": {
                "method": method,
                "push": {"threshold": "inf" if threshold == math.inf else threshold},
                "publish": publish,
            },
            **(scenario or {}),
        },
        step_time_s=step_time_s,
        step_time_p10_s=0.9 * step_time_s,
        step_times_s=step_times_s,
        phases_s=phases_s,
        fits=True,
        throughput_samples_per_s=32 / step_time_s,
        density=Density(push=push_density, publish=0.5 if publish else None),
        loss=losses,
        collectives=collectives,
        ranks=tuple(
            RankClass(
                ranks=(rank,),
                count=1,
                device=devices[rank] if devices else "cpu-core",
                peak_allocated_bytes=peak,
                peak_by_category_bytes={"parameters": peak},
                phases_s=phases_s,
                bytes_sent=bytes_sent,
                bytes_received=bytes_sent,
                batch_share=1 / n,
                shard_share=1 / n,
            )
            for rank, peak in enumerate(peaks_bytes)
        ),
        provenance={} if repeat is None else {"repeat": repeat},
    )


def in_file(result: Result, path: str = "x.json", modified_ns: int = 0) -> ResultFile:
    return ResultFile(Path(path), modified_ns, result)


def write(folder: Path, name: str, result: Result, *, modified_s: int = 1_000_000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(result.to_json(), encoding="utf-8")
    os.utime(path, (modified_s, modified_s))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object, verb: str = "compare", drawn: bool = True) -> int:
    """Run the command as a user would; return its exit status.

    `drawn`: whether it writes its charts, which takes most of its time.
    """
    if not drawn:
        monkeypatch.setattr("analysis.charts.save_all", lambda _charts, _folder: [])
    monkeypatch.setattr(sys, "argv", ["analysis", verb, *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def assert_refused(capsys: pytest.CaptureFixture[str], status: int, *parts: str) -> None:
    """A user's fault is exit 2, nothing on stdout, and one line on stderr that names the parts."""
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    line = said.err.splitlines()[-1]
    assert line.startswith("analysis: ")
    assert "Traceback" not in said.err
    for part in parts:
        assert part in line
