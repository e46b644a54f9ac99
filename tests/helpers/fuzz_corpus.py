# ruff: noqa: E501  a command line or a value and what it is for are one line
"""Small inputs of every kind, all valid, that the fuzzer damages: made by the project's own commands."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import commands
import kineto_traces
import strategies

LINK = '{ bandwidth_bytes_per_s = "10 MB/s", latency_s = "20 us", source = "assumed" }'
HEAD = strategies.PAIR_TOML[: strategies.PAIR_TOML.index("[[devices]]")]
GROUP = '[{ device = "fast", count = 4 }]'
SERVERS = f"""
[[topology.servers]]
count = 2
device = "fast"
devices = 2
inside = "pcie"
inside_link = {LINK}
nics = 1
nic_link = {LINK}
pcie_link = {LINK}
"""
TOPOLOGIES = {
    "ring": f'[topology]\nkind = "ring"\ndevices = {GROUP}\nlink = {LINK}\n',
    "full": f'[topology]\nkind = "fully-connected"\ndevices = {GROUP}\nlink = {LINK}\n',
    "torus": f'[topology]\nkind = "torus"\ndevice = "fast"\nshape = [2, 2]\nhost_shape = [1, 2]\nlink = {LINK}\n',
    "servers": '[topology]\nkind = "servers"\nfabric = { kind = "switch" }\n' + SERVERS,
    "spines": '[topology]\nkind = "servers"\n[topology.fabric]\nkind = "leaf-spine"\nservers_per_leaf = 1\nspines = 2\n'
    "rails = false\noversubscription = 2.0\n" + SERVERS,
    "sites": f'[topology]\nkind = "sites"\nlink = {LINK}\n'
    + "".join(
        f'[[topology.sites]]\nname = "{name}"\ntopology = {{ kind = "switch", devices = {GROUP}, link = {LINK} }}\n'
        for name in ("north", "south")
    ),
}
SWEEP = """# What does a threshold save?
scenario = "scenario.toml"
keep = "plan.push.threshold > 0 and ranks <= 8"

[set]
run.steps = 4

[variants]
gs = { plan.method = "gs", axes = { plan.push.threshold = [1e-3, 1e-2] } }

[[groups]]
name = "pair"
axes = { "cluster.links.0.bandwidth_bytes_per_s" = { from = "1 MB/s", to = "1 GB/s", count = 2, scale = "log" } }

[[groups]]
name = "slow"
set = { workload.global_batch_size = 8 }
linked = [{ run.seed = [0, 1], run.warmup_steps = [1, 0] }]
"""
STUDY = """# What does a threshold cost in loss?
scenario = "scenario.toml"
seeds = [0, 1, 2]
dense = "dense"
silent = "nothing"

[set]
run.evaluate_every_steps = 2

[[variants]]
name = "dense"
control = true

[[variants]]
name = "nothing"
control = true
set = { plan.method = "gs", plan.push.threshold = inf }

[[variants]]
name = "some"
set = { plan.method = "gs", plan.push.threshold = 1e-3 }
"""
CONVERGENCE = """variant,control,threshold,kind,seeds,samples,push_density,loss_mean,loss_sd,loss_change_mean,loss_change_low,\
loss_change_high,step_time_mean_s,speed_up_mean,speed_up_low,speed_up_high
dense,True,,absolute,3,64,,2.0,0.1,,,,0.1,,,
some,False,0.001,absolute,3,64,0.2,2.1,0.1,0.05,0.01,0.09,0.08,1.2,1.1,1.3
more,False,0.01,absolute,3,64,0.1,2.2,0.1,0.2,0.1,0.3,0.07,1.4,1.3,1.5
"""
PUBLISHED = """experiment,dp,tp,pp,micro_batch,partition,measured_iter_s
homogeneous,4,2,2,2,"[0, 14, 29]",2.5
homogeneous,16,1,1,1,"[0, 29]",3.5
homogeneous,2,4,2,1,"[0, 14, 29]",inf
"""
SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "imports"
IMPORTS = {
    name: name
    for name in ("deepspeed.json", "megatron.sh", "torchtitan.toml", "automodel.yaml", "axolotl.yaml", "trainer.yaml")
}
IMPORTS |= {name: name for name in ("dgx-h100.xml", "topology.conf")} | {"accelerate.yaml": "accelerate-fsdp2.yaml"}
TREE = """- topology: default
  cluster_default: true
  tree:
    switches:
      - {switch: leaf0, nodes: "a[0-1]"}
      - {switch: leaf1, nodes: "a[2-3]"}
      - {switch: spine0, children: "leaf[0-1]"}
"""
NODES = [
    {
        "metadata": {
            "name": f"n{i}",
            "labels": {"fabric.topograph.run/tier-0": f"s{i // 2}", "fabric.topograph.run/tier-1": "t"},
        }
    }
    for i in range(4)
]
SMI = "\n".join(
    [
        "\t" + "\t".join(f"GPU{i}" for i in range(4)),
        *(f"GPU{i}\t" + "\t".join("X" if i == j else "NV18" for j in range(4)) for i in range(4)),
    ]
)
NCCL = """# nThread 1 nGpus 16 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
""" + "".join(
    f"{8 << i:>12} {2 << i:>12} float sum -1 {30 + (8 << i) / 2e5:.2f} 1.0 1.9 0 {30 + (8 << i) / 2e5:.2f} 1.0 1.9 0\n"
    for i in range(0, 26, 2)
)
GPT = ("gsreal.models.gpt", "--argument", "width=8", "--argument", "heads=2", "--argument", "layers=1")


def build(folder: Path, programs: tuple[str, ...]) -> None:
    """Write the inputs of some programs into a folder."""
    making = folder.with_name("making")
    shutil.rmtree(making, ignore_errors=True)
    strategies.write_files(making)
    gs = strategies.SCENARIO_TOML.replace('method = "ddp"', 'method = "gs"\npush = { threshold = 1e-3 }')
    texts = {
        "gs.toml": gs,
        "sweep.toml": SWEEP,
        "study.toml": STUDY,
        "convergence.csv": CONVERGENCE,
        "topology.yaml": TREE,
        "nodes.json": json.dumps({"items": NODES}),
        "smi.txt": SMI,
        "nccl.log": NCCL,
        "published.csv": PUBLISHED,
        "study/convergence.csv": CONVERGENCE,
        "study/findings.txt": "A threshold of 1e-3 costs 0.05 nats.\n",
        **{f"{name}.toml": HEAD + text for name, text in TOPOLOGIES.items()},
        **_parted(),
    }
    for name, text in texts.items():
        (making / name).parent.mkdir(exist_ok=True)
        (making / name).write_text(text)
    for name, source in IMPORTS.items():
        shutil.copyfile(SHIPPED / source, making / name)
    shutil.copyfile(SHIPPED.parent / "clusters/dgx-h100.toml", making / "eight.toml")
    for rank in range(2):
        (making / f"rank{rank}.json").write_text(json.dumps(kineto_traces.training(rank).data()))
    _run(making, "gssim", "sweep", "sweep.toml", "--out", "table.parquet", "--jobs", "1")
    (making / "table").mkdir()
    for name in ("table.parquet", "table.csv"):
        shutil.copy(making / name, making / "table" / name)
    _write_parts(making)
    _run(making, "gssim", "sweep", "sweep.toml", "--out", "results", "--jobs", "1")
    for name in sorted((making / "results").iterdir())[:2]:
        _measured(name)
    if "analysis" in programs:
        _run(making, "analysis", "compare", "results", "--out", "comparison")
        for picture in (*(making / "comparison").glob("*.png"), *(making / "comparison").glob("*.svg")):
            picture.unlink()
    (making / "traces").mkdir()
    _run(making, "gssim", "run", "scenario.toml", "--trace", "traces/predicted.json")
    trace = json.loads((making / "traces/predicted.json").read_text())
    trace["otherData"]["source"] = "measured"
    (making / "traces/measured.json").write_text(json.dumps(trace))
    if "gsreal" in programs:
        _write_gpt(making)
        _write_checkpoint(making)
    making.rename(folder)


def _run(folder: Path, program: str, *words: str) -> None:
    ended = commands.run(program, *words, folder=folder)
    assert ended.returncode == 0, (words, ended.stderr)


def _parted() -> dict[str, str]:
    """Return a cluster whose device types and backend costs are in files of their own."""
    types = HEAD[HEAD.index("[device_types.fast]") :].replace("[device_types.fast]", "[fast]")
    profile = (
        '\n[[fast.profiles]]\nmodel = "tiny"\nprecision = "fp32"\nsequence_length = 4\n'
        + "".join(
            f"layers.{name} = {{ forward_s = {{ sizes = [2, 8], values = [1e-3, 3e-3] }}, "
            "backward_s = { sizes = [2, 8], values = [2e-3, 5e-3] } }\n"
            for name in ("embedding", "h", "head", "loss")
        )
        + "\n[fast.compression]\ncall_s = 1e-5\nthreshold_element_s = 1e-9\npack_element_s = 1e-9\nscatter_element_s = 1e-9\n"
        + "\n[fast.optimizers.adamw]\ntensor_s = 1e-5\nelements_s = { sizes = [100.0, 1e6], values = [1e-6, 1e-2] }\n"
    )
    backend = (
        'overhead_s = { default = "10 us" }\nposting_s = 1e-6\nposting_byte_s = 1e-10\nreduction_bytes_per_s = "5 GB/s"\n'
        'measured_s = { all-reduce = { sizes = [1e3, 1e6], values = [1e-4, 1e-2] } }\nsource = "assumed"\n'
    )
    start = HEAD[: HEAD.index("[device_types.fast]")]
    rest = strategies.PAIR_TOML[strategies.PAIR_TOML.index("[[devices]]") :]
    named = 'device_types = "devices.toml"\nbackend_cost = "backend.toml"\n'
    return {"devices.toml": types + profile, "backend.toml": backend, "parted.toml": start + named + rest}


def _write_parts(folder: Path) -> None:
    """Leave a table's rows as an interrupted sweep does."""
    from gssim.execution import RecordStore
    from gssim.execution.cache import Shared
    from gssim.scenario.sweep import load_sweep, points_of
    from gssim.sweeps import Fingerprints, outcome, parts_folder, predicted

    points = points_of(load_sweep(folder / "sweep.toml"), file=folder / "sweep.toml")
    parts = RecordStore(parts_folder(folder / "table.csv"), ())
    for point in points[:3]:
        parts.keep(Fingerprints().of_point(point), outcome(predicted(point, Shared())))
    parts.close()


def _measured(file: Path) -> None:
    """Write beside a prediction a measurement of the same scenario."""
    data = json.loads(file.read_text())
    data |= {"source": "measured", "step_time_s": data["step_time_s"] * 1.1, "loss": [2.0, 1.9, 1.8, 1.7], "links": []}
    file.with_name(file.name.replace("simulated", "measured")).write_text(json.dumps(data))


def _write_checkpoint(folder: Path) -> None:
    """Leave what a checkpoint says of its training; the training's state is not read before ranks start."""
    from gsreal.run.checkpoint import Progress, identity
    from gssim.scenario import load_scenario

    place = folder / "kept" / "step-00000002"
    place.mkdir(parents=True)
    scenario = load_scenario(
        folder / "scenario.toml", [f"workload.model={folder / 'gpt.toml'}"], gradients_needed=False
    ).scenario
    (place / "progress.json").write_text(json.dumps(asdict(Progress(2, (2.0,), 2, identity(scenario)))))


def _write_gpt(folder: Path) -> None:
    sizes = ("--vocabulary", "256", "--maximum-sequence-length", "16")
    _run(folder, "gsreal", "trace", *GPT, *sizes, "--out", "gpt.toml")
