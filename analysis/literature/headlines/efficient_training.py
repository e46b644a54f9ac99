"""Headline figures of `Efficient distributed training in deep learning`.

BERT-large on sixteen Cloud TPUs: four days, about 7,000 dollars. GPT-3: 175 billion parameters, 5 to 12 million
dollars. Megatron-Turing NLG: 530 billion parameters; 60.1, 50.2, 44.4 s a step on 2240 to 3360 A100.
"""

from collections.abc import Iterable

from analysis.literature.headlines.headline import Headline, Simulations, peak_bytes
from analysis.literature.runs import Run, Shape, Software
from analysis.literature.scenarios import Prediction, predict
from gssim.workload import Model, unrolled

TEXT = "Efficient distributed training"


def headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of BERT-large, GPT-3 and Megatron-Turing NLG."""
    return [*bert_headlines(simulations), *gpt3_headlines(simulations), *megatron_headlines(simulations)]


# BERT-large ----------------------------------------------------------------------------------------------------------

BERT_SCENARIO = "bert-large-tpu"
BERT_HOURS = 96.0
BERT_PHASES = ((128, 900_000), (512, 100_000))
"""Sequence length and steps: Devlin et al. 2019, section A.2 (a million steps of 256 sequences, 90 % of them short)."""
CHIP_FLOP_PER_S, CHIPS = 180e12 / 4, 64
"""Stated in the text: 180 TFLOP/s for each of sixteen TPUs of four chips."""


def bert_headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of parameters, time and cost."""
    model = simulations.model("bert-large")
    results = {
        length: simulations.run(BERT_SCENARIO, f"workload.sequence_length={length}") for length, _ in BERT_PHASES
    }
    hours = sum(results[length].step_time_s * steps for length, steps in BERT_PHASES) / 3600
    first = results[BERT_PHASES[0][0]]
    assert first.cost_usd_per_step is not None  # the cluster's devices have prices
    usd_per_h = first.cost_usd_per_step / first.step_time_s * 3600
    work = sum(step_flop(model, length, 256) * steps for length, steps in BERT_PHASES)
    used = work / (CHIPS * CHIP_FLOP_PER_S * BERT_HOURS * 3600)
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
            f"{BERT_SCENARIO}: 900,000 steps at s = 128 and 100,000 at s = 512, {first.step_time_s * 1e3:.0f} and "
            f"{results[512].step_time_s * 1e3:.0f} ms; utilisation: {work:.2e} FLOP / (64 x 45 TFLOP/s x 96 h)",
            "consistent",
            f"{BERT_HOURS / hours:.1f} times what the chips need at the assumed efficiency: slow, not impossible",
            {"simulated_h": hours, "utilisation_ratio": used, "work_flop": work},
        ),
        Headline(
            TEXT,
            "cost of BERT-large",
            "about $7,000",
            f"${usd_per_h * BERT_HOURS:,.0f}",
            f"{CHIPS} chips x ${usd_per_h / CHIPS:.3f}/h x 96 h (list price of a v2-8: $4.50/h)",
            "consistent",
            f"it is the rent of the stated four days; the simulated {hours:.0f} h would cost ${usd_per_h * hours:,.0f}",
            {"cost_usd": usd_per_h * BERT_HOURS, "simulated_cost_usd": usd_per_h * hours},
        ),
    ]


def step_flop(model: Model, sequence_length: int, batch_size: int, *, forwards_of_blocks: int = 1) -> float:
    """Return the FLOP of one step's forward and backward, as traced.

    `forwards_of_blocks`: how often blocks run their forward; 2 if their activations are recomputed.
    """
    shape = {"b": batch_size, "s": sequence_length}
    layers = [instance.layer for instance in unrolled(model)]
    forwards = (forwards_of_blocks if layer.block else 1 for layer in layers)
    parts = zip(forwards, layers, strict=True)
    return float(sum(n * layer.forward_flop.at(**shape) + layer.backward_flop.at(**shape) for n, layer in parts))


# GPT-3 ----------------------------------------------------------------------------------------------------------------

GPT3_SCENARIO = "gpt3-1024-a100"
GPT3_TOKENS = 300e9
"""Brown et al. 2020, table 2.1."""
GPT3_STATED_USD = (5e6, 12e6)
V100_FLOP_PER_S, V100_USD_PER_H = 28e12, 1.50
"""Rate and rent of one V100 in the estimate of $4.6 million: Li 2020, OpenAI's GPT-3 language model: a technical
overview."""
GPT3_STEP_TOKENS = 1024 * 2048


def gpt3_headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of parameters, cost and memory."""
    model = simulations.model("gpt3-175b")
    flop = 6 * model.elements * GPT3_TOKENS
    v100_h = flop / V100_FLOP_PER_S / 3600
    implied = [usd / v100_h for usd in GPT3_STATED_USD]
    result = simulations.run(GPT3_SCENARIO)
    assert result.cost_usd_per_step is not None  # the cluster's devices have prices
    steps = GPT3_TOKENS / GPT3_STEP_TOKENS
    usd, days = result.cost_usd_per_step * steps, result.step_time_s * steps / 86400
    owner = simulations.run(GPT3_SCENARIO, "plan.method=gs", "plan.recompute=full")
    return [
        Headline(
            TEXT,
            "parameters of GPT-3",
            "175 billion in 96 layers",
            f"{model.elements / 1e9:.1f} billion",
            "counted in models/gpt3-175b.toml",
            "consistent",
            "",
            {"parameters": model.elements},
        ),
        Headline(
            TEXT,
            "cost of GPT-3",
            "$5 to $12 million",
            f"${v100_h * V100_USD_PER_H / 1e6:.2f} M on V100; ${usd / 1e6:.1f} M simulated on 1,024 A100",
            f"6 x {model.elements / 1e9:.1f}e9 x 300e9 = {flop:.2e} FLOP at 28 TFLOP/s sustained = {v100_h / 8766:.0f} "
            f"GPU-years at $1.50/h; {GPT3_SCENARIO}: {result.step_time_s:.1f} s a step, {days:.0f} days",
            "consistent",
            f"the stated ends are ${implied[0]:.2f} and ${implied[1]:.2f} for such an hour of a V100; of one pass, "
            "without trials and failures",
            {"v100_cost_usd": v100_h * V100_USD_PER_H, "a100_cost_usd": usd, "a100_days": days, "work_flop": flop},
        ),
        Headline(
            TEXT,
            "a model that needs more than one device",
            "the model may not fit a replica",
            f"{peak_bytes(owner) / 1e9:,.0f} GB a rank by gs, {peak_bytes(result) / 1e9:.0f} GB by zero3",
            f"{GPT3_SCENARIO}, allocated peaks of 80 GB devices",
            "consistent",
            "owner-sharded gradients leave every rank a whole replica of the parameters",
            {"gs_peak_bytes": peak_bytes(owner), "zero3_peak_bytes": peak_bytes(result)},
        ),
    ]


# Megatron-Turing NLG --------------------------------------------------------------------------------------------------

PAPER = "Smith et al. 2022 (MT-NLG)"
STEPS_S = {2240: 60.1, 2800: 50.2, 3360: 44.4}
"""Step time in s by number of A100: Smith et al. 2022, section 2.4."""
MEGATRON_BATCH, MEGATRON_LENGTH, TENSOR_RANKS, STAGES = 1920, 2048, 8, 35
PEAK_FLOP_PER_S = 312e12


def megatron_headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of parameters, rate and scaling."""
    model = simulations.model("mt-nlg-530b")
    flop = recomputed_step_flop(model, MEGATRON_BATCH, MEGATRON_LENGTH)
    rates = {gpus: flop / gpus / step_s for gpus, step_s in STEPS_S.items()}
    scaled = scaled_steps_s()
    return [
        Headline(
            TEXT,
            "parameters of Megatron-Turing NLG",
            "530 billion",
            f"{model.elements / 1e9:.1f} billion",
            "counted in models/mt-nlg-530b.toml",
            "consistent",
            "to the digits stated",
            {"parameters": model.elements},
        ),
        Headline(
            PAPER,
            "rate at 60.1, 50.2, 44.4 s a step on 2240, 2800, 3360 A100",
            "126, 121, 113 TFLOP/s",
            ", ".join(f"{rate / 1e12:.1f}" for rate in rates.values()) + " TFLOP/s",
            f"FLOP of {MEGATRON_BATCH} x {MEGATRON_LENGTH} tokens, forward twice and backward, as traced: {flop:.3e} / "
            "(GPUs x step)",
            "consistent",
            f"{100 * rates[2240] / PEAK_FLOP_PER_S:.0f} % of peak at 2240, a quarter of it recomputation",
            {f"flop_per_s_on_{gpus}": rate for gpus, rate in rates.items()},
        ),
        Headline(
            PAPER,
            "step times on 2800 and 3360 A100 beside 2240",
            "50.2, 44.4 s",
            ", ".join(f"{scaled[gpus]:.1f}" for gpus in (2800, 3360)) + " s",
            f"60.1 s x (m + {STAGES} - 1) / (m' + {STAGES} - 1): the bubble of a 1F1B pipeline of {STAGES} stages with "
            "m = 1920 / replicas micro-batches (240, 192, 160), all else scaling freely",
            "consistent",
            "measured is "
            + " and ".join(f"{100 * (STEPS_S[gpus] / scaled[gpus] - 1):.0f} %" for gpus in (2800, 3360))
            + " slower than that: the bubble alone explains "
            + " and ".join(f"{100 * share:.0f} %" for share in explained_by_bubble().values())
            + " of the loss",
            {f"step_s_on_{gpus}": step_s for gpus, step_s in scaled.items()},
        ),
    ]


def slow_headlines() -> list[Headline]:
    """Return the headline that takes two minutes: pipelines of 35 stages and 8 tensor ranks, 160 to 240 micro-batches.

    The predicted steps are too short because a micro-batch is predicted to take 0.171 s, against 0.18 to 0.21 s by the
    differences between the published step times.
    """
    predictions = {gpus: simulated(gpus) for gpus in STEPS_S}
    errors = {gpus: predictions[gpus].step_s / step_s - 1 for gpus, step_s in STEPS_S.items()}
    return [
        Headline(
            PAPER,
            "step times on 2240, 2800, 3360 A100",
            _listed(STEPS_S.values()) + " s",
            _listed(prediction.step_s for prediction in predictions.values()) + " s simulated",
            f"8 tensor ranks x {STAGES} stages x 8, 10, 12 replicas, micro-batches of one sample, full recomputation, "
            "on published/platforms.toml's A100; "
            + f"{max(prediction.allocated_bytes for prediction in predictions.values()) / 1e9:.0f} GB a rank",
            "consistent",
            "off by " + ", ".join(f"{100 * error:+.1f} %" for error in errors.values()) + "; it fits 80 GB",
            {f"step_s_on_{gpus}": prediction.step_s for gpus, prediction in predictions.items()},
        )
    ]


def simulated(gpus: int) -> Prediction:
    """Return the prediction of a step on `gpus` A100, made as for the rows of published tables."""
    shape = Shape(
        kind="gpt",
        layers=105,
        hidden=20480,
        heads=128,
        kv_heads=128,
        ffn=4 * 20480,
        vocabulary=51200,
        sequence_length=MEGATRON_LENGTH,
    )
    return predict(
        Run(
            identity=f"mt-nlg-{gpus}",
            source=PAPER,
            gpu="A100-SXM-80GB",
            per_node=8,
            shape=shape,
            software=Software(early_stop=False, partitioned=True),  # Megatron-LM of that year
            method="ddp",
            dp=gpus // (TENSOR_RANKS * STAGES),
            tp=TENSOR_RANKS,
            pp=STAGES,
            micro_batch=1,
            micro_batches=micro_batches(gpus),
            recompute="full",
            overlap=False,
            optimizer="adam",
            step_s=STEPS_S[gpus],
        )
    )


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def recomputed_step_flop(model: Model, batch_size: int, sequence_length: int) -> float:
    """Return the FLOP of one step with full recomputation, counted as Megatron-LM does: blocks run forward twice.

    For a GPT: 96 B s L h^2 (1 + s / (6 h) + V / (16 L h)). Source: Narayanan et al. 2021, appendix.
    """
    return step_flop(model, sequence_length, batch_size, forwards_of_blocks=2)


def micro_batches(gpus: int) -> int:
    """Return the number of micro-batches, of one sample each, in every pipeline."""
    return MEGATRON_BATCH * TENSOR_RANKS * STAGES // gpus


def scaled_steps_s() -> dict[int, float]:
    """Return step times scaled from the fewest GPUs as if the pipeline bubble were the only loss.

    A pipeline of p stages takes (m + p - 1) slots for m micro-batches. Source: Narayanan et al. 2021, section 2.2.

    >>> [round(step_s, 1) for step_s in scaled_steps_s().values()]
    [60.1, 49.6, 42.6]
    """
    fewest = min(STEPS_S)
    slot_s = STEPS_S[fewest] / (micro_batches(fewest) + STAGES - 1)
    return {gpus: slot_s * (micro_batches(gpus) + STAGES - 1) for gpus in STEPS_S}


def explained_by_bubble() -> dict[int, float]:
    """Return, by number of GPUs, the fraction of the scaling loss that the pipeline bubble explains."""
    fewest, scaled = min(STEPS_S), scaled_steps_s()
    ideal = {gpus: STEPS_S[fewest] * fewest / gpus for gpus in STEPS_S if gpus != fewest}
    return {gpus: (scaled[gpus] - ideal_s) / (STEPS_S[gpus] - ideal_s) for gpus, ideal_s in ideal.items()}
