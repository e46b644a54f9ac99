"""Headline figures of GPT-3: 175 billion parameters, 5 to 12 million dollars."""

from analysis.literature.headlines.headline import Headline, Simulations, peak_bytes

TEXT = "Efficient distributed training"
SCENARIO = "gpt3-1024-a100"
TOKENS = 300e9
"""Brown et al. 2020, table 2.1."""
STATED_USD = (5e6, 12e6)
V100_FLOP_PER_S, V100_USD_PER_H = 28e12, 1.50
"""Rate and rent of one V100 in the estimate of $4.6 million: Li 2020, OpenAI's GPT-3 language model: a technical
overview."""
STEP_TOKENS = 1024 * 2048


def headlines(simulations: Simulations) -> list[Headline]:
    """Return the headlines of parameters, cost and memory."""
    model = simulations.model("gpt3-175b")
    flop = 6 * model.elements * TOKENS
    v100_h = flop / V100_FLOP_PER_S / 3600
    implied = [usd / v100_h for usd in STATED_USD]
    result = simulations.run(SCENARIO)
    assert result.cost_usd_per_step is not None  # the cluster's devices have prices
    steps = TOKENS / STEP_TOKENS
    usd, days = result.cost_usd_per_step * steps, result.step_time_s * steps / 86400
    owner = simulations.run(SCENARIO, "plan.method=gs", "plan.recompute=full")
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
            f"GPU-years at $1.50/h; {SCENARIO}: {result.step_time_s:.1f} s a step, {days:.0f} days",
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
            f"{SCENARIO}, allocated peaks of 80 GB devices",
            "consistent",
            "owner-sharded gradients leave every rank a whole replica of the parameters",
            {"gs_peak_bytes": peak_bytes(owner), "zero3_peak_bytes": peak_bytes(result)},
        ),
    ]
