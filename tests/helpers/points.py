"""Random scenario points, each from a seed alone: plain tables that are written as scenario files.

The keys of a point mostly combine, because otherwise little but refusals would be tested; now and then they do not.
"""

import math
import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from gssim.cluster import presets
from gssim.plan import METHODS as REGISTRY

SCENARIOS = Path(__file__).resolve().parent.parent.parent / "scenarios"

Table = dict[str, Any]
RECOMPUTED = ("full", "selective", "every-second-product")


@dataclass(frozen=True)
class Trained:
    """A model file, and what it can be trained on."""

    name: str
    """Name of a model that ships, or a file."""
    batch: int
    """Samples of a step, about."""
    lengths: tuple[int, ...] = ()
    """Tokens of a sample; empty: images."""
    heads: int = 4
    """Heads, or groups of norms: the most ranks among which blocks are cut and sequences divided."""
    statistics: tuple[Table, ...] = ()
    """Gradient statistics of it, each with the workload that they were taken with."""
    experts: int = 0
    """Routed experts of each layer, which a divisor of this number of ranks may divide."""


GPT_STATISTICS = {"optimizer": "adamw", "learning_rate": 3e-4, "global_batch_size": 16, "sequence_length": 128}
GPT = Trained("gpt-byte-1m", 32, (32, 128), 4, ({"gradients": "gpt-byte-1m", **GPT_STATISTICS},))
BERT = Trained("bert-byte-1m", 32, (32, 128), 4, ({"gradients": "bert-byte-1m", **GPT_STATISTICS},))
RESNET = Trained(
    "resnet-digits",
    64,
    (),
    8,
    tuple(
        {"gradients": name, "optimizer": "sgd-momentum", "learning_rate": 1e-3, "global_batch_size": batch}
        for name, batch in (("resnet-digits", 64), ("resnet-digits-32", 32))
    ),
)
TIED = Trained(str(SCENARIOS.parent / "tests/helpers/models/gpt-tied.toml"), 24, (24,))
"""Its first and last layers share their embedding."""
MIXTURE = Trained("mixture-byte-1m", 24, (32, 128), 1, experts=12)
OTHERS = tuple(
    Trained(str(SCENARIOS.parent / f"tests/helpers/models/{name}.toml"), 12, (24,), 2)
    for name in (
        "llama",
        "gpt2",
        *(f"of_tests/{kind}-{of}" for kind in ("adapters", "autocast") for of in ("gpt", "llama")),
    )
)
"""Some of Hugging Face, and some traced with adapters or under autocast."""
LATER = 10_000
"""From this seed on points have keys and models that came later too; earlier seeds stay the points they were."""
RECOMPUTING = 12_400
"""From this seed on points with frozen layers, adapters or autocast are checkpointed at times."""
SEQUENCES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
"""Methods whose ranks divide sequences beside the batch."""
DIVIDING_EXPERTS = ("ddp", "zero2", "zero3", "fsdp")
"""Methods whose ranks divide experts beside the batch."""
LARGER = (
    Trained("gpt2-124m", 32, (512, 1024)),
    Trained("bert-base", 32, (128, 512)),
    Trained("resnet-50", 64),
    Trained("llama3-8b", 16, (2048,)),
    Trained("gpt3-6.7b", 16, (2048,)),
)
OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw")
STREAMED = 14_000
"""From this seed on points have fragments that are synchronized behind other steps; earlier ones stay the same."""
COMBINED = 15_000
"""From this seed on points push gradients or are pipelines more often, with frozen layers, adapters or autocast, and
`gs_wgrad` is checkpointed at times."""
SHARDED_REPLICAS = 16_000
"""From this seed on most points synchronize periodically, replicas that are sharded as a rule."""
PARTED = 17_000
"""From this seed on ranks that push gradients divide sequences as often as others do, and most points push."""
EXPERTS_IN_PARTS = 18_000
"""From this seed on most points are mixtures, whose experts are divided among the ranks that divide sequences too."""
EXPERTS_OF_TENSOR_RANKS = 19_000
"""From this seed on experts are divided among the ranks of tensor groups, each with the tokens of its own part."""
PUSHED_EXPERTS = 20_000
"""From this seed on most points are mixtures whose gradients are pushed, those of divided experts among fewer ranks."""
SUMMED_EXPERTS = 21_000
"""From this seed on most points are mixtures whose replicas all-reduce gradients, often in another precision than the
training's, those of divided experts too."""
EXPERTS_ON_TWO_LEVELS = 22_000
"""From this seed on most points are mixtures whose gradients are pushed on two levels, those of experts on one."""
UNDER_AUTOCAST = 23_000
"""From this seed on points are under autocast, as a rule where ranks divide blocks, sequences or experts."""
CAST = (
    *(
        Trained(str(SCENARIOS.parent / f"tests/helpers/models/of_tests/divided-autocast-{name}.toml"), 12, lengths)
        for name, lengths in (("gpt", (24,)), ("bert", (24,)), ("llama", (24, 48)))
    ),
    Trained(
        str(SCENARIOS.parent / "tests/helpers/models/of_tests/divided-autocast-mixture.toml"), 12, (48,), 1, experts=12
    ),
)
"""Models whose divided layers are traced under autocast."""
ADAPTED_PARTS = 24_000
"""From this seed on points have low-rank adapters where ranks divide sequences beside blocks or experts, as a rule, or
push scaled gradients in fp16."""
ADAPTED = (
    Trained(str(SCENARIOS.parent / "tests/helpers/models/of_tests/context-adapters-llama.toml"), 12, (24, 48), 4),
    Trained(
        str(SCENARIOS.parent / "tests/helpers/models/of_tests/context-adapters-mixture.toml"), 12, (48,), 1, experts=12
    ),
)
"""Models whose divided layers are traced with adapters, at all lengths of sequences."""
SPLIT_BACKWARDS = 25_000
"""From this seed on points are pipelines whose backwards are split (zero bubble), as a rule."""
SPLIT = (GPT, BERT, RESNET, TIED, *OTHERS[:2])
"""Models whose layers are traced with split backwards."""
FROZEN_PARTS = 26_000
"""From this seed on layers are frozen where ranks divide blocks, sequences or experts, as a rule."""
FROZEN = (
    Trained("gpt-byte-150k", 12, (24,), 4),
    Trained(str(SCENARIOS.parent / "tests/helpers/models/of_tests/frozen-llama.toml"), 12, (24, 48), 4),
    Trained(str(SCENARIOS.parent / "tests/helpers/models/of_tests/frozen-mixture.toml"), 12, (48,), 1, experts=12),
)
"""Models whose divided layers are traced in every role that frozen layers give them."""
ADAPTED_LOSSES = 27_000
"""From this seed on points have low-rank adapters where tensor ranks divide sequences and losses, as a rule."""
SUMS_BESIDE_PRODUCTS = 28_000
"""From this seed on tensor ranks sum gradients of inputs beside products, as a rule."""
PRODUCTS_BESIDE_EXCHANGES = 29_000
"""From this seed on tensor ranks divide sequences and exchange their parts beside products, as a rule."""
SHARDED_STAGES = 30_000
"""From this seed on `gs_z3` runs in pipelines as often as other methods."""
BESIDE = (
    Trained("gpt-byte-150k", 12, (24,), 4),
    Trained("bert-byte-1m", 12, (24,), 4),
    Trained(str(SCENARIOS.parent / "tests/helpers/models/of_tests/frozen-llama.toml"), 12, (24, 48), 4),
    Trained(str(SCENARIOS.parent / "tests/helpers/models/of_tests/autocast-gpt.toml"), 12, (24,), 2),
)
"""Models of such points; weights of the last are (inputs, outputs)."""
PERIODIC = tuple(name for name, method in REGISTRY.items() if method.sync_every_steps)
IN_FRAGMENTS = tuple(name for name, method in REGISTRY.items() if method.in_fragments)
METHODS = tuple(
    name for name, method in REGISTRY.items() if not method.is_gradient_sharding and name not in IN_FRAGMENTS
)
PUSHING = tuple(name for name, method in REGISTRY.items() if method.gradients == "push")
DEALING = ("gs_wgrad", "gs_tp")
ONE_AXIS = ("single", "pipeline", "tensor", *DEALING)
"""Methods for few devices each: models have only so many layers and heads."""
DEVICES = (1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5, 6, 6, 8, 8, 8, 12, 16, 24, 32)
GPUS = ("v100-sxm2-16", "t4", "a100-sxm-40", "a100-sxm-80", "h100-sxm", "h200-sxm")


def _further_methods(seed: int) -> tuple[str, ...]:
    """Return the methods of Gradient Sharding, and those that later seeds draw most often."""
    if SPLIT_BACKWARDS <= seed < FROZEN_PARTS:
        return ("pipeline", "zero2", "gs", "gs") * 100
    if seed >= UNDER_AUTOCAST:
        later = ("gs_hier",) if seed >= FROZEN_PARTS else ()
        later += ("tensor", "tensor", "gs_tp") * 2 if seed >= ADAPTED_LOSSES else ()
        return (*SEQUENCES, "gs", "gs_z3", "gs_tp", "tensor", "pipeline", *later) * 20
    if seed >= EXPERTS_ON_TWO_LEVELS:
        return ("gs_hier",) * 180
    if seed >= SUMMED_EXPERTS:
        return ("ddp", "zero1", "half") * 60
    if seed >= PUSHED_EXPERTS:
        return ("gs", "gs", "gs_z3") * 60
    if seed >= EXPERTS_IN_PARTS:
        return ("ddp", "zero1", "zero2", "zero3") * 20
    if seed >= PARTED:
        return PUSHING * 10
    if seed >= SHARDED_REPLICAS:
        return PERIODIC * 60
    if seed >= COMBINED:
        return PUSHING * 6 + DEALING * 3 + ("pipeline",) * 6
    return PUSHING * 2 + DEALING + IN_FRAGMENTS * (60 if seed >= STREAMED else 0)


def _dividing(seed: int) -> tuple[str, ...]:
    """Return the methods of which late seeds draw mixtures."""
    return (*SEQUENCES, *_dividing_late(seed))


def _dividing_late(seed: int) -> tuple[str, ...]:
    """Return the methods whose ranks divide experts in points of late seeds alone."""
    if seed >= UNDER_AUTOCAST:
        return ("gs", "gs_z3")
    if seed >= EXPERTS_ON_TWO_LEVELS:
        return ("gs_hier",)
    return ("half",) if seed >= SUMMED_EXPERTS else ("gs", "gs_z3") if seed >= PUSHED_EXPERTS else ()


def _late_models(seed: int) -> tuple[Trained, ...]:
    """Return the models of points under autocast, and of later ones."""
    if seed >= SUMS_BESIDE_PRODUCTS:
        return BESIDE
    if seed >= ADAPTED_LOSSES:
        return (ADAPTED[0],) * 3 + ADAPTED
    if seed >= FROZEN_PARTS:
        return FROZEN
    if seed >= SPLIT_BACKWARDS:
        return SPLIT
    return ADAPTED if seed >= ADAPTED_PARTS else CAST


def random_point(seed: int, *, most_devices: int = 32) -> Table:
    """Return the scenario of a seed, to be simulated."""
    random = Random(seed)
    devices = random.choice([n for n in DEVICES if n <= most_devices])
    cluster = _cluster(random, devices)
    method = random.choice(METHODS + _further_methods(seed))
    if devices > 6 and method in ONE_AXIS and random.random() < 0.8:
        method = random.choice(PUSHING)
    smaller = (
        [GPT] * 6
        + [BERT] * 4
        + [RESNET] * 4
        + [TIED] * (6 if method in ("pipeline", "ddp", "zero1") else 2)
        + [MIXTURE] * (18 if method == "ddp" else 8 if method in DIVIDING_EXPERTS else 1)
    )
    varies = any(kind.get("step_jitter_ratio") for kind in cluster["device_types"].values())
    model = random.choice(smaller if varies else [*smaller, random.choice(LARGER)])
    if seed >= LATER and random.random() < 0.15:
        model = random.choice(OTHERS)
    if seed >= EXPERTS_IN_PARTS and method in _dividing(seed) and random.random() < 0.9:
        model = MIXTURE
    if seed >= UNDER_AUTOCAST:
        model = random.choice(_late_models(seed))
    if method in ONE_AXIS and (seed >= FROZEN_PARTS or ADAPTED_PARTS <= seed < SPLIT_BACKWARDS):
        model = _late_models(seed)[0]  # the mixture's blocks cannot be cut
    plan, parts = _plan(random, seed, method, devices, model)
    _shard_replicas(random, seed, plan, parts)
    workload = _workload(random, model, plan, parts, _precisions(cluster), thresholds=method in PUSHING)
    _sum_experts(random, seed, workload, plan)
    if seed >= LATER:
        _later_keys(random, model, workload, plan)
        _predicted_keys(random, cluster, workload, plan)
    _recompute_keys(random, seed, workload, plan)
    if seed >= COMBINED:
        _combined_keys(random, workload, plan)
    if plan.get("context_exchange") == "ring" and seed % 3 == 0:
        plan["context_exchange"] = "gather"
    if "context_exchange" in plan and seed % 5 == 0:
        plan["context_overlap"] = False
    _cast_products(random, seed, cluster, workload, plan)
    found = _scenario(random, seed, cluster, workload, plan, parts, devices)
    _leave_out_beside_experts(random, seed, found, parts)
    return found


KNOWN_DENSITIES: list[Table] = [
    {"threshold": 0.0},
    {"threshold": 1e9, "kind": "relative"},
    {"threshold": 0.3, "kind": "target-density", "reestimate_steps": 1},
]
"""Pushes of all, of no and of a stated fraction of the gradients, whatever the gradients are: a real run sends what is
predicted."""


def random_real_point(seed: int) -> Table:
    """Return the scenario of a seed, to be run on two to four ranks of this machine as well."""
    random = Random(seed)
    devices = random.choice([2, 2, 3, 4])
    types = {"cpu": _cpu(random)}
    link = {"bandwidth_bytes_per_s": "1 GB/s", "latency_s": "10 us", "source": "random"}
    topology = {"kind": "switch", "devices": [{"device": "cpu", "count": devices}], "link": link}
    topology["devices_per_host"] = devices if devices % 2 else devices // 2
    cluster = {"name": "random", "backend": "gloo", "source": "random", "device_types": types, "topology": topology}
    method = random.choice(METHODS[1:] + _further_methods(seed))
    model = _real_model(random, seed, method)
    plan, parts = _plan(random, seed, method, devices, model)
    _shard_replicas(random, seed, plan, parts)
    model = replace(model, batch=12, statistics=())
    precisions = _real_precisions(seed, method, model, cluster)
    workload = _workload(random, model, plan, parts, precisions, thresholds=False)
    if plan.get("ep"):  # else the router's load is another
        workload["expert_routing"] = "load"
    if workload["precision"] == "fp16" and REGISTRY[method].partition == "data":  # else a real run refuses it
        workload.setdefault("loss_scale", 1024.0)
    _sum_experts(random, seed, workload, plan)
    if seed >= LATER:
        _later_keys(random, model, workload, plan)
        if workload.get("autocast") == "fp16":
            workload["autocast"] = "bf16"
    _recompute_keys(random, seed, workload, plan)
    if seed >= COMBINED:
        _combined_keys(random, workload, plan)
    if plan.get("push") is not None and method in PUSHING and random.random() < 0.5:
        plan["push"] |= random.choice(KNOWN_DENSITIES)
    if seed >= FROZEN_PARTS and "context_exchange" in plan and seed % 3 == 0:
        plan["context_overlap"] = False
    _cast_products(random, seed, cluster, workload, plan)
    _wait_for_copies(workload, plan)
    found = _scenario(random, seed, cluster, workload, plan, parts, devices)
    _leave_out_beside_experts(random, seed, found, parts)
    _foresee_peaks_of_experts(seed, plan, workload)
    for key in ("replan", "replanning"):  # real paces are not those of a made-up device
        plan.get("shares", {}).pop(key, None)
    return found


def _real_model(random: Random, seed: int, method: str) -> Trained:
    """Return a small model for a point's real run."""
    if seed >= UNDER_AUTOCAST:
        return random.choice(_late_models(seed))
    models = [Trained("gpt-byte-1m", 12, (8, 16)), Trained("bert-byte-1m", 12, (8, 16)), RESNET, TIED]
    models += [Trained(MIXTURE.name, 12, (8, 16), 1, experts=12)] * (6 if method in DIVIDING_EXPERTS else 0)
    if seed >= EXPERTS_IN_PARTS and method in _dividing(seed) and random.random() < 0.9:
        models = [Trained(MIXTURE.name, 12, (48, 96), 1, experts=12)]  # so long that no rank of experts is without rows
    return random.choice(models if seed < LATER or len(models) == 1 else [*models, *OTHERS])


def _foresee_peaks_of_experts(seed: int, plan: Table, workload: Table) -> None:
    """Leave out plans in which a rank holds little more than what an exchange of rows leaves for a moment, whether or
    not sequences are divided: there a rank's peak is at times higher by a few percent.
    """
    if seed < EXPERTS_IN_PARTS or "ep" not in plan:
        return
    plan.pop("recompute", None)
    if plan["method"] in ("zero2", "zero3"):
        workload.pop("expert_load", None)


def _real_precisions(seed: int, method: str, model: Trained, cluster: Table) -> list[str]:
    """Return the precisions in which a point's real run is as it is predicted."""
    precisions = _precisions(cluster)
    # torch has no grouped product in fp64: products of experts are other operations than those traced; Llama's norms
    # are in fp32 whatever the precision is
    if model.experts or "llama" in model.name:
        precisions.remove("fp64")
    if seed >= PARTED and method in PUSHING:  # which scale no loss, so that a real run refuses it
        precisions.remove("fp16")
    return precisions


def _wait_for_copies(workload: Table, plan: Table) -> None:
    """Let nothing be computed behind exchanges that take copies: how long these live depends on the real rates."""
    method = REGISTRY[plan["method"]]
    cast = workload.get("reduce_precision") and method.gradients == "all-reduce"
    if method.compress or cast:
        plan["overlap"] = False
    if (
        method.in_fragments and plan.get("outer", {}).get("precision") == "int8"
    ):  # gloo's gathers have some of their own
        plan["streaming"] = plan.get("streaming", {}) | {"delay_steps": 0}


def _scenario(
    random: Random, seed: int, cluster: Table, workload: Table, plan: Table, parts: int, devices: int
) -> Table:
    run: Table = {"steps": random.choice([2, 3, 4]), "warmup_steps": random.choice([0, 1, 2]), "seed": seed % 7}
    if random.random() < 0.95:  # else, at times, nothing is synchronized before the run's end
        run["steps"] = max(run["steps"], plan.get("sync_every_steps", 1))
    if REGISTRY[plan["method"]].compressor and random.random() < 0.95:  # else it begins before gradients are compressed
        run["warmup_steps"] = 2
    devices = plan.get("ranks", devices)
    _divide(random, workload, plan, parts, devices)
    # a pipeline refuses slow-downs
    if random.random() < (0.2 if plan.get("pp", 1) == 1 and plan["method"] != "pipeline" else 0.02):
        run["slowdowns"] = [_slow_down(random, devices, run["steps"]) for _ in range(random.choice([1, 1, 2]))]
        run["steps"] = random.choice([run["steps"], 4 if "gradients" in workload else 12])
    return {"name": f"point-{seed}", "cluster": cluster, "workload": workload, "plan": plan, "run": run}


def _slow_down(random: Random, devices: int, steps: int) -> Table:
    found: Table = {"rank": random.randrange(devices), "first_step": random.randrange(steps)}
    found["compute_ratio"] = random.choice([1.0, 1.3, 2.0, 5.0])
    return found | ({"steps": random.randint(1, 4)} if random.random() < 0.5 else {})


# The plan ------------------------------------------------------------------------------------------------------------


def _plan(random: Random, seed: int, method: str, devices: int, model: Trained) -> tuple[Table, int]:
    """Return a method with its axes and policies, and into how many parts the batch is divided if all devices work."""
    plan: Table = {"method": method}
    if method != "single" and devices > 1 and random.random() < 0.05:
        devices = plan["ranks"] = random.randint(1, devices)
    parts = _all_axes(random, seed, plan, devices, model)
    _take_in_parts(random, plan, devices)
    if random.random() < 0.35:
        plan["recompute"] = random.choice(
            ["full", "selective", "every-second-product"] if method != "gs_wgrad" else ["none"]
        )
    if random.random() < 0.3:
        plan["bucket_bytes"] = random.choice([100_000, "1 MiB", "5 MB", "200 MiB"])
        if method in ("gs", "gs_hier"):
            plan["first_bucket_bytes"] = random.choice([10_000, "1 MiB"])
    if random.random() < 0.15:
        plan["overlap"] = False
    if random.random() < 0.15 and (method not in ("gs_z3", "gs_hier") or random.random() < 0.1):
        plan["exchange"] = "backend"
    if random.random() < 0.03:  # what seldom goes together
        plan["exchange"] = "point-to-point"
        plan["parameters"] = random.choice(["replicated", "gathered", "sharded"])
    if method in PUSHING:
        plan["push"] = {}
    plan |= _own_options(random, method)
    if SPLIT_BACKWARDS <= seed < FROZEN_PARTS:
        _split_backwards(random, plan)
    return plan, parts


def _all_axes(random: Random, seed: int, plan: Table, devices: int, model: Trained) -> int:
    """Set a plan's axes, some of them; return how many parts of the batch there are if all devices work."""
    if SPLIT_BACKWARDS <= seed < FROZEN_PARTS:
        return _axes_of_stages(random, plan, devices)
    if seed >= EXPERTS_IN_PARTS and model.experts and plan["method"] in SEQUENCES:
        of_tensor_ranks = seed >= EXPERTS_OF_TENSOR_RANKS and (seed < ADAPTED_PARTS or seed % 4 == 0)
        if of_tensor_ranks and devices % 2 == 0:
            return _axes_of_tensor_experts(random, plan, devices, model)
        return _axes_of_experts(random, plan, devices, model)
    if plan["method"] in ("single", "gs_wgrad"):
        return 1
    if plan["method"] in ("pipeline", "tensor", "gs_tp"):
        _only_axis(random, seed, plan, devices)
        return 1
    return _axes(random, seed, plan, devices, model)


def _only_axis(random: Random, seed: int, plan: Table, devices: int) -> None:
    """Set the axis of a method that has no replicas, at times; late models are of few heads and stages."""
    if seed >= FROZEN_PARTS and devices > 4 and random.random() < 0.9:
        devices = plan["ranks"] = 4 if plan["method"] != "pipeline" else 2
    if random.random() < 0.3:
        plan["pp" if plan["method"] == "pipeline" else "tp"] = devices


def _axes_of_stages(random: Random, plan: Table, devices: int) -> int:
    """Set a pipeline of few stages for each replica, mostly on all devices; return as `_all_axes` does."""
    depths = [n for n in (2, 2, 3) if n <= devices and (plan["method"] == "pipeline" or 2 * n <= devices)]
    if not depths:  # too few devices for replicas
        plan["method"], depths = "pipeline", [devices]
    plan["pp"] = random.choice(depths)
    parts = 1 if plan["method"] == "pipeline" else devices // plan["pp"]
    if plan["pp"] * parts < devices:
        plan["ranks"] = plan["pp"] * parts
    return parts


def _split_backwards(random: Random, plan: Table) -> None:
    """Split the backwards of a pipeline, mostly, and leave out what does not go with that."""
    if plan["pp"] == 1 or random.random() < 0.1:
        return
    plan["schedule"] = "interleaved_zero_bubble"
    plan["micro_batches"] = random.choice([plan["pp"], plan["pp"], 2 * plan["pp"], 3 * plan["pp"], 1, 2])
    if random.random() < 0.95:
        for key in ("recompute", "exchange", "parameters"):
            plan.pop(key, None)


def _shard_replicas(random: Random, seed: int, plan: Table, parts: int) -> None:
    """Shard replicas that synchronize periodically, mostly."""
    if seed < SHARDED_REPLICAS or plan["method"] not in PERIODIC or random.random() < 0.1:
        return
    shards = random.choice([n for n in range(1, parts + 1) if parts % n == 0])
    plan["dp_shard"] = shards
    if "dp_replicate" in plan:
        plan["dp_replicate"] = parts // shards
    if shards > 1 and random.random() < 0.2:
        plan["parameters"] = "gathered"


def _own_options(random: Random, method: str) -> Table:
    """Return what only some methods have: compression, or periods."""
    found: Table = {}
    if REGISTRY[method].sync_every_steps:
        found["sync_every_steps"] = random.choice([1, 2, 2, 3, 4])
        if REGISTRY[method].outer_optimizer == "sparse":
            found["sparse_outer"] = {
                "chunk_elements": random.choice([8, 100, 4096]),
                "chunk_entries": random.choice([1, 7]),
            }
            found["sparse_outer"]["precision"] = random.choice(["fp32", "int2"])
        elif REGISTRY[method].outer_optimizer and random.random() < 0.5:
            found["outer"] = {"learning_rate": random.choice([0.5, 1.0]), "momentum": random.choice([0.0, 0.5, 0.9])}
    if REGISTRY[method].in_fragments:
        found |= _fragments(random, found)
    if REGISTRY[method].compressor == "powersgd" and random.random() < 0.7:
        found["powersgd"] = {"rank": random.choice([1, 3, 4]), "min_compression_ratio": random.choice([0.5, 2.0, 10.0])}
        found["powersgd"] |= {key: random.random() < 0.5 for key in ("error_feedback", "warm_start")}
    if REGISTRY[method].compressor == "topk" and random.random() < 0.7:
        found["topk"] = {"density_ratio": random.choice([1e-4, 0.1, 1.0]), "error_feedback": random.random() < 0.5}
    if REGISTRY[method].compress and random.random() < 0.5:
        found["compress"] = random.choice(["bf16", "fp16"])
    return found


def _fragments(random: Random, found: Table) -> Table:
    """Return how parameters are cut, and how long their exchanges are under way: mostly so that it can be."""
    if random.random() < 0.98:  # else what goes on behind steps is refused
        found["overlap"] = True
    if random.random() < 0.3:
        found["outer"] = found.get("outer", {}) | {"precision": "int8"}
    if random.random() < 0.1:
        return found | {"sync_every_steps": random.choice([4, 8])}  # and two fragments
    every = random.choice([2, 3, 4, 5, 7])
    count = min(random.choice([1, 2, 2, 3]), every)
    longest = every // count - (random.random() < 0.98)
    streaming = {"fragments": count, "delay_steps": random.randint(0, longest)}
    streaming["local_ratio"] = random.choice([0.0, 0.25, 0.5])
    return found | {"sync_every_steps": every, "streaming": streaming}


def _take_in_parts(random: Random, plan: Table, devices: int) -> None:
    """Set micro-batches, and what goes with them, at times."""
    if "pp" in plan or plan["method"] == "pipeline":
        plan["micro_batches"] = random.choice([1, 2, 3, 4])
        if random.random() < 0.5:
            plan["schedule"] = random.choice(["gpipe", "1f1b", "interleaved"])
            plan["micro_batches"] = random.choice([1, 2]) * plan.get("pp", devices)
    elif random.random() < 0.4:
        plan["micro_batches"] = random.choice([1, 2, 3, 4])
        if random.random() < 0.3:
            plan["gradient_sync"] = random.choice(["step", "micro-batch"])


def _axes(random: Random, seed: int, plan: Table, devices: int, model: Trained) -> int:
    """Set the axes of a plan with replicas, some of them; return as `_all_axes` does."""
    method = plan["method"]
    left = _inner_axes(random, seed, plan, devices, model)
    deep = [n for n in (2, 3, 4) if left % n == 0 and n < left and ("cp" not in plan or random.random() < 0.05)]
    in_stages = REGISTRY[method].in_pipelines and (method != "gs_z3" or seed >= SHARDED_STAGES)
    if deep and random.random() < (0.4 if in_stages else 0.02):
        plan["pp"] = random.choice(deep)
        left //= plan["pp"]
    if method in ("hsdp", "gs_hier"):
        if random.random() < 0.7:
            shard = random.choice([n for n in range(1, left + 1) if left % n == 0])
            plan |= {"dp_shard": shard, "dp_replicate": left // shard}
    elif random.random() < 0.5:
        plan[REGISTRY[method].axis] = left
    elif random.random() < 0.15:
        plan[random.choice(["dp_replicate", "dp_shard"])] = random.choice([1, 2, left])
    divisors = [n for n in range(2, model.experts + 1) if left % n == 0 and model.experts % n == 0]
    divides = method in (*DIVIDING_EXPERTS, *_dividing_late(seed))
    if divisors and random.random() < (0.8 if divides else 0.1):
        plan["ep"] = random.choice(divisors)
    return left


def _leave_out_beside_experts(random: Random, seed: int, point: Table, parts: int) -> None:
    """Leave out what divided experts do not go with, mostly."""
    plan, workload = point["plan"], point["workload"]
    if "ep" not in plan or random.random() < 0.1:
        return
    pushes = seed >= PUSHED_EXPERTS and plan["method"] in ("gs", "gs_z3", "gs_hier")
    for key in ("shares", *([] if pushes else ["gradient_sync"]), "offload", "parameters", "gathered_inputs"):
        dropped = plan.pop(key, {})
        if key == "shares" and pushes and dropped.get("shards") not in (None, "memory", "cost"):
            plan["shares"] = {"shards": dropped["shards"]}
    if plan.get("zero1_implementation") == "deepspeed":
        plan["zero1_implementation"] = "megatron"
    if "pp" in plan and plan["method"] in ("zero1", "zero3"):
        plan.pop("schedule", None)
    sharded = REGISTRY[plan["method"]].gradients == "reduce-scatter"
    cut = plan.get("tp", 1) > 1 and "etp" not in plan
    left_out = [
        *("gradient_precision", "frozen", *(["adapters"] if seed < ADAPTED_PARTS else [])),
        *(["autocast"] if seed < UNDER_AUTOCAST else []),
        *(["clip_norm"] if cut else []),
        *(["loss_scale"] if cut or (seed < SUMMED_EXPERTS and plan["method"] == "zero1") else []),
        *(["reduce_precision"] if seed < SUMMED_EXPERTS and (cut or not sharded) else []),
    ]
    for key in left_out:
        workload.pop(key, None)
    if workload["precision"] == "fp16" and "loss_scale" not in workload:  # which real runs need
        workload["precision"] = "fp32"
    least = plan.get("micro_batches", 1) * parts
    workload["global_batch_size"] = least * max(1, workload["global_batch_size"] // least)
    point["run"].pop("slowdowns", None)


def _axes_of_experts(random: Random, plan: Table, devices: int, model: Trained) -> int:
    """Set axes of a mixture on which sequences and experts are divided, mostly; return as `_all_axes` does."""
    parts = devices
    among = [n for n in (2, 4) if devices % n == 0]
    if among and random.random() < 0.9:
        plan["cp"] = random.choice(among)
        if random.random() < 0.4:
            plan |= {"context_exchange": "ring", "context_split": random.choice(["zigzag", "plain"])}
        parts //= plan["cp"]
    if parts % 2 == 0 and random.random() < 0.3:
        plan["pp"] = 2
        parts //= 2
    alike = parts * plan.get("cp", 1)
    divisors = [n for n in range(2, model.experts + 1) if alike % n == 0 and model.experts % n == 0]
    if divisors and random.random() < 0.9:
        plan["ep"] = random.choice(divisors)
    return parts


def _axes_of_tensor_experts(random: Random, plan: Table, devices: int, model: Trained) -> int:
    """Set axes of a mixture whose experts are divided among the ranks of tensor groups; return as `_all_axes` does."""
    plan["tp"] = random.choice([n for n in (2, 4) if devices % n == 0])
    parts = devices // plan["tp"]
    if plan["tp"] == 2 and parts % 2 == 0 and random.random() < 0.4:
        plan["cp"] = 2
        if random.random() < 0.5:
            plan |= {"context_exchange": "ring", "context_split": random.choice(["zigzag", "plain"])}
        parts //= 2
    if parts % 2 == 0 and random.random() < 0.3:
        plan["pp"] = 2
        parts //= 2
    alike = parts * plan["tp"] * plan.get("cp", 1)
    divisors = [n for n in range(plan["tp"], model.experts + 1, plan["tp"]) if alike % n == model.experts % n == 0]
    plan["ep"] = random.choice(divisors)
    if random.random() < 0.97:  # else it is refused
        plan["etp"] = 1
    if random.random() < 0.97:
        plan["sequence_parallel"] = True
    return parts


def _divide(random: Random, workload: Table, plan: Table, parts: int, devices: int) -> None:
    """Set the shares of batch and shards, at times."""
    shares: Table = {}
    method, total = plan["method"], workload["global_batch_size"]
    if parts > 1 and random.random() < 0.45:
        least = plan.get("micro_batches", 1) if random.random() < 0.9 else 0
        shares["batch"] = "throughput"
        if random.random() < 0.5 and parts * least <= total:
            whole = plan["micro_batches"] if plan.get("schedule") == "interleaved_zero_bubble" else 1
            counts = composition(random, total // whole, parts, least=math.ceil(least / whole))
            shares["batch"] = [n * whole / total for n in counts]
    if method in (*PUSHING, *DEALING) and random.random() < 0.6:
        shares["shards"] = random.choice(["compute", "memory", "cost", "explicit"])
        if shares["shards"] in ("memory", "cost") and (plan.get("tp", 1) > 1 or method not in ("gs", "gs_z3")):
            shares["shards"] = "compute"
        owners = devices if method in DEALING else parts * plan.get("cp", 1)
        if shares["shards"] == "explicit":
            shares["shards"] = [n / 64 for n in composition(random, 64, owners, least=int(method in DEALING))]
    apart = REGISTRY[method].sync_every_steps and random.random() < 0.9
    if random.random() < 0.15 and not apart and parts > 1 and (parts == devices or random.random() < 0.1):
        shares["replan"] = True
        if random.random() < 0.5:
            shares["replanning"] = {"minimum_steps": random.choice([1, 2]), "drift_limit": random.choice([0.1, 1.0])}
    if shares:
        plan["shares"] = shares


def _inner_axes(random: Random, seed: int, plan: Table, devices: int, model: Trained) -> int:
    """Set the axes of ranks that divide sequences or blocks, at times; return the number of such groups of ranks."""
    method, left = plan["method"], devices
    whole = REGISTRY[method].sync_every_steps or REGISTRY[method].compressor
    apart = whole and random.random() < 0.9
    among = [n for n in (2, 4) if left % n == 0 and n <= model.heads and model.lengths]
    divides = method in SEQUENCES or (seed >= PARTED and method in PUSHING)
    if among and random.random() < (0.4 if divides else 0.02):
        plan["cp"] = random.choice(among)
        left //= plan["cp"]
        if random.random() < 0.5:
            plan["context_exchange"] = "ring"
            if random.random() < 0.4:
                plan["context_split"] = "plain"
        apart = apart or random.random() < (0.95 if seed < ADAPTED_PARTS else 0.3)
    inner = [n for n in (2, 4, 8) if left % n == 0 and n < left and n <= model.heads]
    if inner and not apart and random.random() < (0.3 if seed < FROZEN_PARTS else 0.8):
        plan["tp"] = random.choice(inner)
        left //= plan["tp"]
        if model.lengths and random.random() < (0.6 if method not in PUSHING or seed >= PARTED else 0.05):
            plan["sequence_parallel"] = True
    return left


def composition(random: Random, total: int, parts: int, *, least: int = 0) -> list[int]:
    """Return whole numbers, each at least `least`, that sum to `total`."""
    free = total - parts * least
    cuts = sorted(random.randint(0, free) for _ in range(parts - 1))
    return [right - left + least for left, right in zip([0, *cuts], [*cuts, free], strict=True)]


# The workload --------------------------------------------------------------------------------------------------------


def _workload(
    random: Random, model: Trained, plan: Table, parts: int, precisions: list[str], *, thresholds: bool
) -> Table:
    """Return what is trained; with thresholds, also what is sent and published, at times."""
    file = SCENARIOS / "models" / f"{model.name}.toml"
    found: Table = {"model": str(file if file.exists() else model.name)}
    least = plan.get("micro_batches", 1) * parts
    found["global_batch_size"] = least * max(1, round(model.batch / least)) + (random.random() < 0.03)
    if model.lengths:
        found["sequence_length"] = random.choice(model.lengths)
    found["precision"] = random.choice(precisions)
    found["optimizer"] = random.choice(OPTIMIZERS)
    if random.random() < 0.25:
        found["optimizer_implementation"] = random.choice(["for-loop", "foreach", "fused"])
    if random.random() < 0.2:
        found["weight_decay"] = 0.01
    found |= _numbers(random, plan, found["precision"])
    if plan.get("ep") and random.random() < 0.7:
        found["expert_load"] = {"skew": random.choice([0.3, 1.0])}
    usable = [each for each in model.statistics if each["global_batch_size"] % least == 0]
    if thresholds and usable and random.random() < 0.6:
        statistics = random.choice(usable)
        found |= statistics | {"gradients": str(SCENARIOS / f"gradients/{statistics['gradients']}.json")}
        if random.random() < 0.85:
            plan["push"] = _push(random)
        if random.random() < 0.4 and plan["method"] != "gs_z3":
            plan["publish"] = _publish(random)
            plan.pop("exchange", None)
    if plan.get("push") == {} and random.random() < 0.2:
        plan["push"] = {"encoding": random.choice(["auto", "coo", "dense"])}
    return found


def _numbers(random: Random, plan: Table, precision: str) -> Table:
    """Return how gradients are summed, scaled and clipped, at times."""
    method, divides = REGISTRY[plan["method"]], plan.get("ep") and random.random() < 0.9
    found: Table = {}
    sums = method.gradients in ("all-reduce", "reduce-scatter") and not (
        method.compress or method.compressor or divides
    )
    if random.random() < (0.25 if sums else 0.02):
        found["reduce_precision"] = random.choice(["fp32", "fp32", "bf16", "fp16"])
    whole = method.gradients != "push" and method.partition == "data"
    if precision == "fp16" and whole and random.random() < 0.8 and not method.compressor:
        found["loss_scale"] = random.choice(["dynamic", 1024.0])
    if random.random() < (0.2 if not divides and (whole or plan.get("tp", 1) == 1) else 0.02):
        found["clip_norm"] = random.choice([0.05, 1.0, 100.0])
    return found


@lru_cache(maxsize=16)
def _file(path: str) -> tuple[Table, str]:
    """Return a model file's tables, which nothing changes, and these as a text."""
    tables = tomllib.loads(Path(path).read_text())
    return tables, str(tables)


def _later_keys(random: Random, model: Trained, workload: Table, plan: Table) -> None:
    """Set what is trained, and which products run in 16 bits, at times; and what goes with axes and methods."""
    traced, text = _file(workload["model"])
    method = REGISTRY[plan["method"]]
    divided = plan["method"] in ONE_AXIS or any(plan.get(axis, 1) > 1 for axis in ("tp", "pp", "cp", "ep"))
    kinds = ("local", "all-reduce", "reduce-scatter")
    whole = method.gradients in kinds and method.partition == "data" and not method.compressor
    layers = [each["modules"][0] for each in traced["layers"] if each.get("modules") and each.get("parameters")]
    whole = whole or plan["method"] == "gs"
    if random.random() < (0.5 if whole and not divided and "'frozen'" in text else 0.02):
        first = random.randint(1, len(layers) - 1)
        chosen = random.choice([layers[:first], layers[first:], random.sample(layers, first), [random.choice(layers)]])
        workload["frozen"] = sorted(chosen)
        plan.pop("recompute", None)
    elif random.random() < (0.4 if method.gradients in kinds else 0.02):
        if random.random() < 0.4 and "adapters" in text and not divided:
            workload["adapters"] = {"rank": random.choice([1, 4]), "alpha": random.choice([4.0, 16.0])}
            workload["adapters"]["targets"] = random.choice(["query-value", "all-linear"])
        elif workload["precision"] == "fp32" and "autocast" in text and (not divided or random.random() < 0.05):
            autocast = random.choice(["bf16", "fp16"])
            if whole or random.random() < 0.1:
                workload["autocast"] = autocast
                plan.pop("recompute", None)
    if plan.get("tp", 1) > 1 and model.lengths and random.random() < 0.5:
        plan["loss_parallel"] = True
        if random.random() < 0.6:
            plan["embedding_parallel"] = True
    if workload["precision"] == "fp32" and random.random() < 0.03:
        workload["tf32"] = True
    if method.gradients == "reduce-scatter" and random.random() < 0.15:
        plan["offload"] = "parameters"


def _recompute_keys(random: Random, seed: int, workload: Table, plan: Table) -> None:
    """Checkpoint blocks of what is partly frozen or under autocast, at times."""
    varies = seed >= RECOMPUTING and any(key in workload for key in ("frozen", "adapters", "autocast"))
    if varies and plan["method"] != "gs_wgrad" and random.random() < 0.6:
        plan["recompute"] = random.choice(RECOMPUTED)


def _combined_keys(random: Random, workload: Table, plan: Table) -> None:
    """Freeze layers, add adapters or cast beside pushes and in stages, and checkpoint `gs_wgrad`, at times."""
    if plan["method"] == "gs_wgrad" and random.random() < 0.5:
        plan["recompute"] = random.choice(RECOMPUTED)
    divided = any(plan.get(axis, 1) > 1 for axis in ("tp", "cp", "ep"))
    combines = plan["method"] in (*PUSHING, "pipeline") or plan.get("pp", 1) > 1
    if not combines or divided or random.random() < 0.3:
        return
    traced, text = _file(workload["model"])
    layers = [each["modules"][0] for each in traced["layers"] if each.get("modules") and each.get("parameters")]
    for key in ("frozen", "adapters", "autocast"):
        workload.pop(key, None)
    if "autocast" in text and workload["precision"] == "fp32" and random.random() < 0.5:
        workload["autocast"] = "bf16"
    elif "adapters" in text:
        workload["adapters"] = {"rank": random.choice([1, 4]), "targets": random.choice(["query-value", "all-linear"])}
    elif "'frozen'" in text:
        workload["frozen"] = sorted(random.sample(layers, random.randint(1, len(layers) - 1)))
    if "autocast" not in workload and random.random() < 0.9:  # thresholds are refused
        for key in ("push", "publish"):
            plan.pop(key, None)


def _cast_products(random: Random, seed: int, cluster: Table, workload: Table, plan: Table) -> None:
    """Set autocast in late points, and leave out what does not go with it, mostly."""
    precisions = [each for each in ("bf16", "fp16") if each in _precisions(cluster)]
    if seed >= SUMS_BESIDE_PRODUCTS:
        _sum_beside_products(random, seed, workload, plan)
        return
    if seed >= SPLIT_BACKWARDS and seed < ADAPTED_LOSSES:
        _train_parts(random, seed, workload, plan)
        return
    if seed >= ADAPTED_PARTS:
        _adapt_parts(random, workload, plan, precisions)
        if seed >= ADAPTED_LOSSES and plan.get("tp", 1) > 1 and "adapters" in workload:
            plan |= {"sequence_parallel": random.random() < 0.9, "loss_parallel": random.random() < 0.9}
        return
    if seed < UNDER_AUTOCAST or not precisions or random.random() < 0.03:
        return
    method = REGISTRY[plan["method"]]
    fp16 = "fp16" in precisions and workload["model"].endswith(("gpt.toml", "llama.toml")) and random.random() < 0.3
    workload |= {"precision": "fp32", "autocast": "fp16" if fp16 and method.gradients != "push" else "bf16"}
    workload.pop("loss_scale", None)
    if workload["autocast"] == "fp16":
        workload["loss_scale"] = 1024.0
    if random.random() < 0.97:
        for key in ("frozen", "adapters", "tf32", "gradient_precision"):
            workload.pop(key, None)
        for key in ("loss_parallel", "embedding_parallel", "gathered_inputs"):
            plan.pop(key, None)


def _sum_beside_products(random: Random, seed: int, workload: Table, plan: Table) -> None:
    """Sum gradients of inputs, or from some seed on exchange parts of sequences, beside products where ranks divide
    blocks, and leave out what does not go with it.
    """
    for key in ("frozen", "adapters", "autocast"):
        workload.pop(key, None)
    divides = plan.get("tp", 1) > 1 or plan["method"] in ("tensor", "gs_tp")
    if random.random() < (0.95 if divides else 0.02):
        plan["async_input_gradients"] = True
    if divides and random.random() < 0.3:
        plan |= {"loss_parallel": True, "embedding_parallel": True}
    if seed < PRODUCTS_BESIDE_EXCHANGES or not divides or random.random() < 0.05:
        return
    plan.pop("async_input_gradients", None)
    plan |= {"sequence_parallel": True, "tp_overlap": True}
    if random.random() < 0.95:
        plan.pop("gathered_inputs", None)
        if plan.get("recompute") in ("selective", "every-second-product"):
            plan["recompute"] = "full"


def _train_parts(random: Random, seed: int, workload: Table, plan: Table) -> None:
    """Freeze layers, and leave out what does not go with that or with split backwards, mostly."""
    for key in ("frozen", "adapters", "autocast", "tf32"):
        workload.pop(key, None)
    if seed < FROZEN_PARTS:
        if random.random() < 0.95:
            workload.pop("reduce_precision", None)
            for key in ("receive_buffers", "offload", *(("push", "publish") if plan["method"] == "pipeline" else ())):
                plan.pop(key, None)
        return
    traced, _ = _file(workload["model"])
    names = [each["modules"][0] for each in traced["layers"] if each.get("modules") and each.get("parameters")]
    first = random.randint(1, len(names) - 1)
    chosen = random.choice([names[:first], names[first:], random.sample(names, first), [random.choice(names)]])
    workload["frozen"] = sorted(chosen)
    if plan["method"] in PUSHING and random.random() < 0.9:  # thresholds are refused
        for key in ("push", "publish"):
            plan.pop(key, None)
    if plan.get("tp", 1) > 1 and random.random() < 0.5:
        plan["loss_parallel"] = True


def _adapt_parts(random: Random, workload: Table, plan: Table, precisions: list[str]) -> None:
    """Add adapters, or scale the loss of pushed gradients; leave out what does not go with either."""
    for key in ("frozen", "adapters", "autocast", "tf32"):
        workload.pop(key, None)
    pushes = REGISTRY[plan["method"]].gradients == "push"
    if pushes and "fp16" in precisions and random.random() < 0.5:
        workload |= {"precision": "fp16", "loss_scale": random.choice([1024.0, "dynamic"])}
    if not pushes or random.random() < 0.6:
        workload["adapters"] = {"rank": random.choice([1, 4]), "targets": random.choice(["query-value", "all-linear"])}
        plan.get("push", {}).clear()
        plan.pop("gathered_inputs", None)


def _sum_experts(random: Random, seed: int, workload: Table, plan: Table) -> None:
    """Let replicas sum gradients of divided experts in another precision, mostly."""
    if seed >= SUMMED_EXPERTS and "ep" in plan and plan["method"] in ("ddp", "zero1") and random.random() < 0.7:
        workload["reduce_precision"] = random.choice(["fp32", "bf16", "fp16", "fp64"])


def _predicted_keys(random: Random, cluster: Table, workload: Table, plan: Table) -> None:
    """Set what no real run has, at times."""
    method = REGISTRY[plan["method"]]
    servers = cluster.get("topology", {}).get("servers", [])
    kept = method.gradients in ("local", "all-reduce", "reduce-scatter") and servers
    if random.random() < (0.3 if kept else 0.01):
        plan["offload"] = "optimizer"
    whole = method.partition == "data" and method.parameters == "replicated" and method.gradients != "push"
    whole = whole and not (method.compressor or method.compress or method.sync_every_steps or plan.get("ep", 1) > 1)
    if plan.get("offload") and random.random() < 0.8:
        cluster["host"] = {"memory_bytes": "100 GB", "memory_bandwidth_bytes_per_s": 10 ** random.uniform(9, 12)}
        cluster["host"]["source"] = "random"
        for server in servers if random.random() < 0.9 else ():
            server["host_memory"] = True
    if plan["method"] == "zero1" and random.random() < 0.4:
        plan["zero1_implementation"] = random.choice(["deepspeed", "megatron"])
    if workload["global_batch_size"] % 3:  # not drawn, so that all other points stay as they are
        _keys_of_other_programs(cluster, plan)
    if workload["precision"] in ("bf16", "fp16") and random.random() < (0.2 if whole else 0.01):
        workload["gradient_precision"] = "fp32"
    if plan.get("pp", 1) > 1 and random.random() < 0.3:
        plan["receive_buffers"] = "in-flight"


def _keys_of_other_programs(cluster: Table, plan: Table) -> None:
    """Set what DeepSpeed or Megatron-LM does, and not torch."""
    if plan["method"] == "zero2" and not plan.keys() & {"pp", "ep"}:
        plan["zero2_implementation"] = "deepspeed"
    if plan.get("schedule") == "1f1b":
        plan["schedule"] = "deepspeed"
    if plan.get("zero1_implementation") == "megatron" and cluster["backend"] == "nccl":
        plan["publish"] = {"overlap": plan.get("overlap", True)}
    if "backend_cost" in cluster:
        cluster["backend_cost"] |= {"unpacking_s": 1e-4, "unpacking_byte_s": 1e-9}
        cluster["backend_cost"] |= {"following_saving_s": {"default": 3e-5}, "queued_s": {"default": 5e-6}}


def _precisions(cluster: Table) -> list[str]:
    """Return the precisions in which all devices have a stated rate; the usual one twice."""
    rates = [
        {**presets("devices").get(kind.get("preset", ""), {}), **kind}["peak_flop_per_s"]
        for kind in cluster["device_types"].values()
    ]
    return ["fp32", *(name for name in ("fp32", "bf16", "fp16", "fp64") if all(name in each for each in rates))]


def _push(random: Random) -> Table:
    kind = random.choice(["absolute", "absolute", "relative", "target-density"])
    threshold = {
        "absolute": random.choice([0.0, math.inf, 10 ** random.uniform(-5, -1), 10 ** random.uniform(-5, -1)]),
        "relative": 2 ** random.uniform(-2, 4),
        "target-density": 10 ** random.uniform(-3, 0),
    }[kind]
    found: Table = {"kind": kind, "threshold": threshold, "encoding": random.choice(["auto", "coo", "bitmap", "dense"])}
    if random.random() < 0.6:
        found["error_feedback"] = random.random() < 0.6
    if found.get("error_feedback") and random.random() < 0.4:
        found["error_feedback_precision"] = "bf16"
    if random.random() < 0.3:
        found["aggregate"] = "received-weight"
    if random.random() < 0.3:
        found["warmup_steps"] = random.choice([1, 2])
    if kind == "target-density" and random.random() < 0.4:
        found["reestimate_steps"] = random.choice([1, 2, 8])
    return found


def _publish(random: Random) -> Table:
    found: Table = {"encoding": random.choice(["auto", "coo", "bitmap", "dense"])}
    if random.random() < 0.8:
        found["kind"] = random.choice(["absolute", "relative"])
        scale = 1.0 if found["kind"] == "relative" else 1e-3
        found["threshold"] = random.choice([0.0, scale * 10 ** random.uniform(-2, 1)])
    if random.random() < 0.3:
        found["overlap"] = random.random() < 0.7
    return found


# The cluster ---------------------------------------------------------------------------------------------------------


def _cluster(random: Random, devices: int) -> Table:
    """Return a cluster of `devices` devices, equal or not, wired in any way."""
    found: Table = {"name": "random", "source": "random"}
    if random.random() < 0.35:
        return found | _gpus(random, devices)
    types = {name: _cpu(random) for name in random.choice([("one",), ("one", "two")])}
    found |= {"backend": random.choice(["gloo", "gloo", "gloo", "nccl"]), "device_types": types}
    if random.random() < 0.5:
        found["backend_cost"] = {
            "source": "random",
            "overhead_s": {"default": random.choice([0.0, 1e-5])},
            "message_s": random.choice([0.0, 2e-5]),
            "posting_s": random.choice([0.0, 5e-6]),
            "posting_message_s": random.choice([0.0, 2e-6]),
            "posting_byte_s": random.choice([0.0, 1e-10]),
        }
    if devices <= 4 and random.random() < 0.01:
        types["one"]["step_jitter_ratio"] = 0.05
    names = _names(random, list(types), devices)
    if found["backend"] == "gloo" and random.random() < 0.1 and devices > 1:
        found["algorithms"] = {"all-reduce": "best"}
    return found | random.choice([_switch, _ring, _tree, _star, _sites])(random, names)


def _names(random: Random, types: list[str], devices: int) -> list[str]:
    """Return the type of every device: the first ones alike, and the others."""
    first = random.randint(1, devices)
    return [types[0]] * first + [types[-1]] * (devices - first)


def _groups(names: list[str]) -> list[Table]:
    return [{"device": name, "count": names.count(name)} for name in dict.fromkeys(names)]


def _cpu(random: Random) -> Table:
    rate = 10 ** random.uniform(9, 13)
    found: Table = {
        "kind": "cpu",
        "memory_bytes": random.choice(["1 GiB", "16 GiB", "80 GiB"]),
        "peak_flop_per_s": {
            "fp32": rate,
            "fp64": rate / 2,
            **dict.fromkeys(("bf16", "fp16"), rate * random.choice([1, 2])),
        },
        "efficiency_ratio": random.choice([1.0, 0.6]),
        "memory_bandwidth_bytes_per_s": 10 ** random.uniform(9, 12),
        "operation_overhead_s": random.choice([0.0, 1e-6, 1e-5]),
        "source": "random",
    }
    if random.random() < 0.3:
        found["communicating_slowdown_ratio"] = random.choice([1.25, 2.0])
    if random.random() < 0.3:
        found["neighbour_slowdown_ratio"] = random.choice([1.25, 2.0])
    if random.random() < 0.2:
        found["gradient_hook_s"] = 1e-5
    if random.random() < 0.1:
        found |= {"price_usd_per_h": 1.0, "busy_power_w": 100.0, "idle_power_w": 20.0}
    return found


def _link(random: Random) -> Table:
    rate, latency_s = 10 ** random.uniform(6.5, 11), random.choice([0.0, 1e-6, 1e-4, 2e-3])
    return {"bandwidth_bytes_per_s": rate, "latency_s": latency_s, "source": "random"}


def _switch(random: Random, names: list[str]) -> Table:
    per_host = random.choice([n for n in (1, 2, 3, 4, 8) if len(names) % n == 0])
    kind = random.choice(["switch", "switch", "fully-connected"])
    topology = {"kind": kind, "devices": _groups(names), "devices_per_host": per_host, "link": _link(random)}
    return {"topology": topology}


def _ring(random: Random, names: list[str]) -> Table:
    return {"topology": {"kind": "ring", "devices": _groups(names), "link": _link(random)}}


def _devices(names: list[str], hosts: int) -> list[Table]:
    return [{"name": f"d{i}", "type": name, "host": f"h{i * hosts // len(names)}"} for i, name in enumerate(names)]


def _star(random: Random, names: list[str]) -> Table:
    """Return devices around one switch, each with a link of its own kind."""
    kinds = [_link(random) for _ in range(random.choice([1, 2, 3]))]
    links = [{"between": [f"d{i}", "s"], **random.choice(kinds)} for i in range(len(names))]
    return {"devices": _devices(names, random.choice([1, len(names)])), "switches": ["s"], "links": links}


def _tree(random: Random, names: list[str]) -> Table:
    """Return hosts behind leafs behind a root."""
    leafs, kinds = random.choice([1, 2, 4]), [_link(random) for _ in range(3)]
    links = [{"between": [f"d{i}", f"leaf{i * leafs // len(names)}"], **kinds[0]} for i in range(len(names))]
    links += [{"between": [f"leaf{i}", "root"], **kinds[1 + i % 2]} for i in range(leafs)]
    switches = [*(f"leaf{i}" for i in range(leafs)), "root"]
    return {"devices": _devices(names, len(names)), "switches": switches, "links": links}


def _sites(random: Random, names: list[str]) -> Table:
    if len(names) < 2:
        return _switch(random, names)
    cut = random.randint(1, len(names) - 1)
    parts = (names[:cut], names[cut:])
    sites = [
        {"name": f"site{i}", "topology": {"kind": "switch", "devices": _groups(part), "link": _link(random)}}
        for i, part in enumerate(parts)
    ]
    return {"topology": {"kind": "sites", "link": _link(random), "sites": sites}}


def _gpus(random: Random, devices: int) -> Table:
    """Return servers with GPUs of the presets."""
    each = random.choice([n for n in (1, 2, 4, 8) if devices % n == 0])
    kinds = random.choice([(random.choice(GPUS),), tuple(random.sample(GPUS, 2))])
    count = devices // each
    first = random.randint(1, count) if len(kinds) > 1 else count
    nics = random.choice([n for n in (1, 2, 4, 8) if each % n == 0])
    servers = []
    for kind, number in zip(kinds, (first, count - first), strict=False):
        if not number:
            continue
        server: Table = {"count": number, "device": kind, "devices": each, "nics": nics}
        server |= {"inside": random.choice(["nvswitch", "pcie"] if each > 1 else ["none"])}
        if each > 1:
            server["inside_link"] = "pcie4x16" if server["inside"] == "pcie" else random.choice(NVLINKS)
        server |= {"nic_link": random.choice(NETWORKS), "pcie_link": "pcie4x16"}
        servers.append(server)
    fabric: Table = {"kind": "switch"}
    if random.random() < 0.3:
        fabric = {"kind": "leaf-spine", "servers_per_leaf": random.choice([1, 2, 4]), "spines": random.choice([1, 2])}
        fabric["oversubscription"] = random.choice([1.0, 2.0])
    types = {name: {"preset": name} if random.random() < 0.8 else _smaller(random, name) for name in kinds}
    topology = {"kind": "servers", "servers": servers, "fabric": fabric}
    found: Table = {"backend": random.choice(["nccl", "nccl", "gloo"]), "device_types": types, "topology": topology}
    return found | ({"nccl": random.choice(["volta", "ampere", "hopper"])} if found["backend"] == "nccl" else {})


def _smaller(random: Random, name: str) -> Table:
    return {"preset": name, "memory_bytes": random.choice(["1 GB", "4 GB"]), "source": "random"}


NVLINKS = ("nvlink2-v100", "nvlink3-a100", "nvlink4-h100")
NETWORKS = ("ib-hdr-200", "roce-100", "tcp-25g")
