"""Headline figures of Megatron-Turing NLG: 530 billion parameters; 60.1, 50.2, 44.4 s a step on 2240 to 3360 A100."""

from collections.abc import Iterable

from analysis.literature.headlines.headline import Headline, Simulations
from analysis.literature.predict import Prediction, predict
from analysis.literature.runs import Run, Shape, Software
from gssim.workload import Model, unrolled

TEXT = "Efficient distributed training"
PAPER = "Smith et al. 2022 (MT-NLG)"
STEPS_S = {2240: 60.1, 2800: 50.2, 3360: 44.4}
"""Step time in s by number of A100: Smith et al. 2022, section 2.4."""
STATED_FLOP_PER_S = {2240: 126e12, 2800: 121e12, 3360: 113e12}
BATCH, LENGTH, TENSOR_RANKS, STAGES = 1920, 2048, 8, 35
PEAK_FLOP_PER_S = 312e12


def headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of parameters, rate and scaling."""
    model = simulations.model("mt-nlg-530b")
    flop = recomputed_step_flop(model, BATCH, LENGTH)
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
            f"FLOP of {BATCH} x {LENGTH} tokens, forward twice and backward, as traced: {flop:.3e} / (GPUs x step)",
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
        sequence_length=LENGTH,
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
    shape = {"b": batch_size, "s": sequence_length}
    layers = [instance.layer for instance in unrolled(model)]
    return float(
        sum((1 + layer.block) * layer.forward_flop.at(**shape) + layer.backward_flop.at(**shape) for layer in layers)
    )


def micro_batches(gpus: int) -> int:
    """Return the number of micro-batches, of one sample each, in every pipeline."""
    return BATCH * TENSOR_RANKS * STAGES // gpus


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
