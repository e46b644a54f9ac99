"""Headline figures of BERT-large on sixteen Cloud TPUs: four days, about 7,000 dollars."""

from analysis.literature.headlines.headline import Headline, Simulations
from gssim.workload import Model, unrolled

TEXT = "Efficient distributed training"
SCENARIO = "bert-large-tpu"
HOURS = 96.0
PHASES = ((128, 900_000), (512, 100_000))
"""Sequence length and steps: Devlin et al. 2019, section A.2 (a million steps of 256 sequences, 90 % of them short)."""
CHIP_FLOP_PER_S, CHIPS = 180e12 / 4, 64
"""Stated in the text: 180 TFLOP/s for each of sixteen TPUs of four chips."""
STATED_PARAMETERS = 340e6


def headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of parameters, time and cost."""
    model = simulations.model("bert-large")
    results = {length: simulations.run(SCENARIO, f"workload.sequence_length={length}") for length, _ in PHASES}
    hours = sum(results[length].step_time_s * steps for length, steps in PHASES) / 3600
    first = results[PHASES[0][0]]
    assert first.cost_usd_per_step is not None  # the cluster's devices have prices
    usd_per_h = first.cost_usd_per_step / first.step_time_s * 3600
    work = sum(step_flop(model, length, 256) * steps for length, steps in PHASES)
    used = work / (CHIPS * CHIP_FLOP_PER_S * HOURS * 3600)
    return [
        Headline(
            TEXT,
            "parameters of BERT-large",
            "340 million",
            f"{model.elements / 1e6:.1f} million",
            "counted in models/bert-large.toml (encoder and the head of masked tokens)",
            "consistent",
            "to the two digits stated",
            {"parameters": model.elements},
        ),
        Headline(
            TEXT,
            "time of BERT-large on 64 TPU v2 chips",
            "4 days",
            f"{hours:.0f} h simulated; 4 days are {100 * used:.0f} % of peak",
            f"{SCENARIO}: 900,000 steps at s = 128 and 100,000 at s = 512, {first.step_time_s * 1e3:.0f} and "
            f"{results[512].step_time_s * 1e3:.0f} ms; utilisation: {work:.2e} FLOP / (64 x 45 TFLOP/s x 96 h)",
            "consistent",
            f"{HOURS / hours:.1f} times what the chips need at the assumed efficiency: slow, not impossible",
            {"simulated_h": hours, "utilisation_ratio": used, "work_flop": work},
        ),
        Headline(
            TEXT,
            "cost of BERT-large",
            "about $7,000",
            f"${usd_per_h * HOURS:,.0f}",
            f"{CHIPS} chips x ${usd_per_h / CHIPS:.3f}/h x 96 h (list price of a v2-8: $4.50/h)",
            "consistent",
            f"it is the rent of the stated four days; the simulated {hours:.0f} h would cost ${usd_per_h * hours:,.0f}",
            {"cost_usd": usd_per_h * HOURS, "simulated_cost_usd": usd_per_h * hours},
        ),
    ]


def step_flop(model: Model, sequence_length: int, batch_size: int) -> float:
    """Return the FLOP of one step's forward and backward, as traced."""
    shape = {"b": batch_size, "s": sequence_length}
    layers = [instance.layer for instance in unrolled(model)]
    return float(sum(layer.forward_flop.at(**shape) + layer.backward_flop.at(**shape) for layer in layers))
