"""Headline figures of Gradient Sharding's table 1: 12, 9, 8, 6 GB; 24, 22, 20, 18 h; 90.0, 90.2, 90.5, 90.5 %."""

from dataclasses import dataclass

from analysis.literature.headlines.headline import Headline, Simulations, peak_bytes
from gssim.result import Result

TEXT = "Gradient Sharding, table 1"
SCENARIO = "table1-bert"
ROWS = {
    "standard": ("plan.method=ddp",),
    "checkpointing": ("plan.method=ddp", "plan.recompute=full"),
    "zero": ("plan.method=zero1",),
    "gs": ("plan.method=gs",),
}
"""The table's rows as plans; `matching_conventions` finds the stage of ZeRO and the form of GS."""
MEMORY_GB = {"standard": 12.0, "checkpointing": 9.0, "zero": 8.0, "gs": 6.0}
TIME_H = {"standard": 24.0, "checkpointing": 22.0, "zero": 20.0, "gs": 18.0}
STATES = {
    "fp32, Adam": {"parameters": 4, "gradients": 4, "optimizer": 8},
    "fp32, SGD with momentum": {"parameters": 4, "gradients": 4, "optimizer": 4},
    "fp32, SGD": {"parameters": 4, "gradients": 4, "optimizer": 0},
    "mixed, Adam, 16 B": {"parameters": 2, "gradients": 2, "optimizer": 12},
    "mixed, Adam, 18 B": {"parameters": 6, "gradients": 4, "optimizer": 8},
}
"""Bytes per parameter of the training states, in the usual conventions."""
SHARDED = {"1": ("optimizer",), "2": ("gradients", "optimizer"), "3": ("parameters", "gradients", "optimizer")}
"""States that each stage of ZeRO shards; `gs` shards those of stage 2, `gs_z3` those of stage 3."""
FORMS = {"gs": "2", "gs_z3": "3"}

BERT_LARGE = {"parameters": 340e6, "layers": 24, "width": 1024, "heads": 16}
GPT3_TOKENS, GPT3_PARAMETERS = 300e9, 174.6e9
A100_SUSTAINED_FLOP_PER_S = 140e12
RESNET50_TOP1 = 76.0
"""Top-1 accuracy on ImageNet, per cent: He et al. 2016 and torchvision's first weights (76.1)."""


def headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of memory, of time, and of the averages that the figures are said to be."""
    results = {row: simulations.run(SCENARIO, *overrides) for row, overrides in ROWS.items()}
    return [*_memory(results), *_time(results), *_average(simulations)]


# Memory --------------------------------------------------------------------------------------------------------------


def _memory(results: dict[str, Result]) -> list[Headline]:
    peaks = {row: peak_bytes(result) for row, result in results.items()}
    scaled = scaled_to(peaks, MEMORY_GB)
    instance = mixed_instance_gb()
    return [
        Headline(
            TEXT,
            "which methods: (12 - 8) / (12 - 6) GB saved",
            "2/3",
            "; ".join(matching_conventions()),
            "saved by ZeRO / saved by GS = bytes divided / bytes divided, of all usual counts of bytes per parameter",
            "only if",
            "in all other counts, ratios of what is divided are not 2 : 3",
        ),
        Headline(
            TEXT,
            "memory, ratios",
            _joined(MEMORY_GB.values(), "g") + " GB",
            _joined(scaled.values(), ".2f") + f" x {peaks['standard'] / 12 / 1e9:.2f} GB",
            f"{SCENARIO}: allocated peaks by ddp, ddp with full recomputation, zero1, gs without error feedback",
            "only if",
            "to 4 %, by BERT-large in fp32 with Adam on 64 equal ranks, at one batch size (torch deals ZeRO-1 out by "
            "whole tensors, of which one is 9 % of all); as many GB as stated take half a billion parameters, which "
            "none of the three models has",
            {f"{row}_peak_bytes": size for row, size in peaks.items()},
        ),
        Headline(
            TEXT,
            "memory, absolute",
            _joined(MEMORY_GB.values(), "g") + " GB",
            _joined(instance.values(), ".1f") + " GB",
            "340e6 x 18 B + 6 x 512 x 1024 x 24 x (34 + 5 x 16 x 512 / 1024) B + 0.3 GB; selective recomputation keeps "
            "34 of 74; ZeRO-2 and gs_z3 on 64 ranks divide 12 and 18 B",
            "only if",
            "four figures and as many free choices: it shows that such a run can be, not that it was",
            {f"{row}_bytes": gigabytes * 1e9 for row, gigabytes in instance.items()},
        ),
    ]


def matching_conventions() -> list[str]:
    """Return the conventions of bytes per parameter in which ZeRO and GS save as 4 : 6, for any number of ranks."""
    wanted = (MEMORY_GB["standard"] - MEMORY_GB["zero"]) / (MEMORY_GB["standard"] - MEMORY_GB["gs"])
    return [
        f"{name}: ZeRO-{stage} and {form}"
        for name, states in STATES.items()
        for stage in SHARDED
        for form, like in FORMS.items()
        if abs(divided_bytes(states, stage) / divided_bytes(states, like) - wanted) < 1e-9
    ]


def divided_bytes(states: dict[str, int], stage: str) -> int:
    """Return the bytes per parameter that a stage of ZeRO shards among ranks.

    >>> divided_bytes({"parameters": 2, "gradients": 2, "optimizer": 12}, "2")
    14
    """
    return sum(states[kind] for kind in SHARDED[stage])


def mixed_instance_gb(*, ranks: int = 64) -> dict[str, float]:
    """Return the memory of BERT-large in mixed precision (18 B a parameter, Adam), by row of the table.

    Each rank has 6 samples of 512 tokens, and 0.3 GB besides states and activations.

    States: Rajbhandari et al. 2020 with fp32 gradients. Activations of a transformer: s b h L (34 + 5 a s / h) bytes,
    34 s b h L where attention is recomputed (Korthikanti et al. 2022, equations 2 and 6).

    >>> [round(gigabytes, 1) for gigabytes in mixed_instance_gb().values()]
    [12.0, 9.0, 8.0, 6.0]
    """
    n, layers, width, heads = (BERT_LARGE[key] for key in ("parameters", "layers", "width", "heads"))
    states = STATES["mixed, Adam, 18 B"]
    samples, length, rest_gb = 6, 512, 0.3
    row_bytes = length * samples * width * layers
    whole_gb, kept_gb = (row_bytes * each / 1e9 for each in (34 + 5 * heads * length / width, 34))
    states_gb = n * sum(states.values()) / 1e9
    saved_gb = {stage: n * divided_bytes(states, stage) * (1 - 1 / ranks) / 1e9 for stage in SHARDED}
    standard = states_gb + whole_gb + rest_gb
    return {
        "standard": standard,
        "checkpointing": standard - whole_gb + kept_gb,
        "zero": standard - saved_gb["2"],
        "gs": standard - saved_gb["3"],
    }


def scaled_to(ours: dict[str, float], stated: dict[str, float]) -> dict[str, float]:
    """Return our figures, scaled so that the first equals the first stated one."""
    first = next(iter(stated))
    return {row: stated[first] * value / ours[first] for row, value in ours.items()}


# Time ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedCost:
    """The fixed cost of a step, relative to the compute of its batch, that follows from a stated ratio of times."""

    batch_ratio: float
    """Size of the checkpointed micro-batch relative to the plain one."""
    fixed_ratio: float
    """Fixed cost of a plain micro-step (optimizer, exposed communication, launches) over its compute."""


def fixed_cost(batch_ratio: float, *, again_ratio: float, time_ratio: float) -> FixedCost | None:
    """Return the fixed cost at which checkpointing takes `time_ratio` of the time of plain training, or None.

    A plain micro-step takes 1 + u, in units of its compute; per sample a checkpointed one, whose micro-batch is k times
    larger, takes r + u / k. So (r + u / k) / (1 + u) = t, or u = (r - t) / (t - 1 / k), which must be positive.
    `again_ratio`: r, compute with recomputation over compute without.

    >>> fixed_cost(7, again_ratio=4 / 3, time_ratio=22 / 24).fixed_ratio
    0.5384615384615384
    >>> fixed_cost(1, again_ratio=4 / 3, time_ratio=22 / 24) is None
    True
    """
    room = time_ratio - 1 / batch_ratio
    if room <= 0 or again_ratio <= time_ratio:
        return None
    return FixedCost(batch_ratio, (again_ratio - time_ratio) / room)


def _time(results: dict[str, Result]) -> list[Headline]:
    ratio = TIME_H["checkpointing"] / TIME_H["standard"]
    again = compute_s(results["checkpointing"]) / compute_s(results["standard"])
    region = [each for k in (1, 2, 4, 7, 1e9) if (each := fixed_cost(k, again_ratio=again, time_ratio=ratio))]
    times = scaled_to({row: result.step_time_s for row, result in results.items()}, TIME_H)
    fixed = results["standard"].step_time_s / compute_s(results["standard"]) - 1
    left = {
        row: max(0.0, TIME_H[row] / TIME_H["standard"] * (1 + region[-1].fixed_ratio) - 1) for row in ("zero", "gs")
    }
    return [
        Headline(
            TEXT,
            "time of checkpointing beside standard, same batch",
            "22 : 24 h",
            f"{times['checkpointing']:.1f} : 24 h",
            f"{SCENARIO}: it computes {again:.2f} times as much, and fixed costs are {fixed:.2f} of the compute",
            "impossible",
            "the same work and more cannot take less time",
            {"again_ratio": again, "fixed_ratio": fixed, "checkpointing_h": times["checkpointing"]},
        ),
        Headline(
            TEXT,
            "time of checkpointing beside standard, larger batch",
            "22 : 24 h",
            "; ".join(f"{_times(each.batch_ratio)} batch: {each.fixed_ratio:.2f}" for each in region),
            f"fixed cost u of a plain step over its compute: u = (r - 22/24) / (22/24 - 1/k), r = {again:.2f}",
            "only if",
            "fixed costs are at least that, and the memory that was saved is spent on a batch k times larger",
            {f"fixed_ratio_at_{each.batch_ratio:g}": each.fixed_ratio for each in region},
        ),
        Headline(
            TEXT,
            "time of ZeRO and GS beside standard",
            "20 and 18 : 24 h",
            f"{times['zero']:.1f} and {times['gs']:.1f} : 24 h",
            f"{SCENARIO}; the table needs fixed costs to fall from {region[-1].fixed_ratio:.2f} or more to "
            f"{left['zero']:.2f} and {left['gs']:.2f} of the compute",
            "only if",
            "the network is so slow that exposed communication is most of the fixed cost; dense publications alone are "
            "half of an all-reduce, so that GS can at best halve it",
            {"zero_h": times["zero"], "gs_h": times["gs"]},
        ),
    ]


def _times(batch_ratio: float) -> str:
    return "any" if batch_ratio >= 1e9 else f"{batch_ratio:g} x"


def compute_s(result: Result) -> float:
    """Return the compute time of a step in s, mean over ranks."""
    return result.phases_s["forward"] + result.phases_s["backward"]


# The average ---------------------------------------------------------------------------------------------------------


def _average(simulations: Simulations) -> list[Headline]:
    alone = simulations.run(
        "gpt3-1024-a100", "plan.method=single", "plan.recompute=none", "workload.global_batch_size=1"
    )
    mean_gb = peak_bytes(alone) / 3 / 1e9
    least_gb = 2 * GPT3_PARAMETERS / 3 / 1e9
    rate = 6 * GPT3_PARAMETERS * GPT3_TOKENS / (3 * TIME_H["standard"] * 3600)
    others = 3 * 90.0 - RESNET50_TOP1
    return [
        Headline(
            TEXT,
            "12 GB as the average over ResNet-50, BERT, GPT-3",
            "12 GB",
            f"more than {mean_gb:,.0f} GB",
            f"gpt3-1024-a100 by one device alone: {peak_bytes(alone) / 1e9:,.0f} GB / 3, were the others to take none",
            "impossible",
            f"GPT-3's parameters alone, in two bytes each, make the average {least_gb:.0f} GB",
            {"mean_bytes": mean_gb * 1e9, "least_mean_bytes": least_gb * 1e9},
        ),
        Headline(
            TEXT,
            "24 h as the average over ResNet-50, BERT, GPT-3",
            "24 h",
            f"{rate:.2e} FLOP/s",
            "GPT-3 in 72 h, were the others to take none: 6 x 174.6e9 x 300e9 FLOP / 72 h",
            "impossible",
            f"it takes {rate / A100_SUSTAINED_FLOP_PER_S:,.0f} A100 at 140 TFLOP/s sustained",
            {"flop_per_s": rate},
        ),
        Headline(
            TEXT,
            "90 % as the average over ResNet-50, BERT, GPT-3",
            "90.0 to 90.5 %",
            f"the other two: {others:.0f} % together",
            f"3 x 90 % less {RESNET50_TOP1:.0f} % of ResNet-50 on ImageNet",
            "impossible",
            f"even 100 % of one leaves {others - 100:.0f} % for the other, and GLUE scores of BERT-large are near 80; "
            "WebText is measured by perplexity",
            {"others_percent": others},
        ),
    ]


def _joined(values: object, form: str) -> str:
    return ", ".join(format(value, form) for value in values)  # type: ignore[attr-defined]
