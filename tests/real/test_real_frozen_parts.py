"""Real: models with frozen layers whose blocks, sequences or experts ranks divide, as on one device and as predicted."""

from pathlib import Path

import pytest
from real_runs import (
    ADAMW64,
    SGD,
    TrainsAsOneDevice,
    in_groups,
    scenario_file,
    star,
)

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

from test_real_experts import TINY

pytestmark = pytest.mark.real

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
FROZEN = {
    "lowest": ("{tokens}", "{blocks0}"),  # no backward below the second block
    "between": ("{blocks0}",),  # gradients pass through it
    "embedding": ("{tokens}",),
    "highest": ("{blocks1}", "{norm}"),
    "head": ("{tokens}", "{blocks*}", "{norm}"),
}
"""What is frozen; of the last, all but the head."""
NAMES = {
    "gpt": {"tokens": "tokens", "blocks": "blocks.", "norm": "norm"},
    "llama": {"tokens": "model.embed_tokens", "blocks": "model.layers.", "norm": "model.norm"},
    "mixture": {"tokens": "tokens", "blocks": "blocks.", "norm": "norm"},
}
LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA |= {"intermediate_size": 48, "vocab_size": 256, "max_position_embeddings": 64, "use_cache": "false"}
SOURCES = {"llama": ("hf:llama", LLAMA), "mixture": ("gsreal.models.mixture", TINY)}
TENSOR, UNEVEN = ["plan.method=tensor"], ["plan.method=gs_tp", "plan.shares.shards=[0.7,0.3]"]
SEQUENCE, CLIPPED, TWICE = "plan.sequence_parallel=true", "workload.clip_norm=0.01", "plan.micro_batches=2"
FULL, SELECTIVE, RING = "plan.recompute=full", "plan.recompute=selective", "plan.context_exchange=ring"
VOCABULARY = ["plan.embedding_parallel=true", "plan.loss_parallel=true"]


def under(method: str, *axes: str) -> list[str]:
    return [f"plan.method={method}", *(f"plan.{axis}=2" for axis in axes)]


ON: dict[int, dict[str, list[str]]] = {
    2: {
        **{f"gpt-{name}-tensor-sgd": [*SGD, *TENSOR] for name in FROZEN},
        **{f"gpt-{name}-sequence-sgd": [*SGD, *TENSOR, SEQUENCE] for name in FROZEN},
        **{f"gpt-{name}-context-sgd": [*SGD, *under("ddp", "cp")] for name in FROZEN},
        **{f"gpt-{name}-ring-sgd": [*SGD, *under("ddp", "cp"), RING] for name in FROZEN},
    },
}
FEW: dict[int, tuple[str, ...]] = {2: ()}


def case_of(ranks: int, name: str, changes: list[str], _folder: Path) -> dict[str, object]:
    kind, frozen, *_ = name.split("-")
    names = NAMES[kind]
    places = {"tokens": names["tokens"], "norm": names["norm"]}
    places |= {f"blocks{each}": f"{names['blocks']}{each}" for each in ("0", "1", "*")}
    patterns = [places[each.strip("{}")] for each in FROZEN[frozen]]
    overrides = [star(ranks), f"workload.model={model_of(kind)}", "workload.sequence_length=24"]
    overrides += ["workload.global_batch_size=12", f"workload.frozen={patterns}", *changes]
    return {"scenario": scenario_file("demo.toml"), "overrides": overrides}


def model_of(kind: str) -> Path:
    """Return the file of a small model that is traced with some of its layers frozen too."""
    if kind == "gpt":
        return MODELS / "gpt-byte-150k.toml"
    from small_models import Request, kept

    source, arguments = SOURCES[kind]
    request = Request(
        model=source,
        arguments=tuple(f"{key}={value}" for key, value in arguments.items()),
        name=f"frozen-{kind}",
        vocabulary=256,
        maximum_sequence_length=64,
        frozen=True,
    )
    return kept(request)


world = in_groups(ON, FEW, case_of)


class TestTraining(TrainsAsOneDevice):
    """Which is one device's, with the predicted collectives and peaks."""
