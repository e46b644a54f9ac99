"""Image models of Hugging Face whose layers permute dimensions, or are stacks in parts, run as they are predicted.

Their convolutions take scratch that a profile of the processor tells, so that peaks are not compared here.
"""

from pathlib import Path

import pytest
from real_runs import SGD, TrainsAsOneDevice, run_cases, scenario_file, star

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

pytestmark = pytest.mark.real

CONFIGS: dict[str, dict[str, object]] = {
    # its norms of channels permute dimensions: a stage's gradient of its input is not contiguous
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 8},
    # a list of stages, each a list of blocks; embeddings run between them
    "poolformer": {
        "hidden_sizes": [8, 8, 16],
        "depths": [1, 2, 1],
        "num_encoder_blocks": 3,
        "patch_sizes": [3, 3, 3],
        "strides": [2, 2, 1],
        "padding": [1, 1, 1],
        "drop_path_rate": 0.0,
    },
}
PIPELINE = ["plan.method=pipeline", "plan.micro_batches=4"]
CASES = {
    "convnext-1f1b-sgd": ("convnext", [*PIPELINE, "plan.schedule=1f1b"]),
    "convnext-gpipe-full-sgd": ("convnext", [*PIPELINE, "plan.schedule=gpipe", "plan.recompute=full"]),
    "poolformer-zero3-full-sgd": ("poolformer", ["plan.method=zero3", "plan.recompute=full"]),
}
"""Model and plan by name of the case."""


def traced(kind: str) -> Path:
    """Return the file of a small model of that type."""
    from small_models import Request, kept

    settings = CONFIGS[kind] | {"num_channels": 1}
    return kept(
        Request(
            model=f"hf:{kind}",
            arguments=tuple(f"{key}={value}" for key, value in settings.items()),
            name=f"image-{kind}",
            image="1x8x8",
            classes=10,
        )
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Run all cases in one launch of two ranks; return (cases, what they showed)."""
    cases = {
        name: {
            "scenario": scenario_file("resnet-digits.toml"),
            "overrides": [star(2), f"workload.model={traced(kind)}", "workload.global_batch_size=16", *SGD, *plan],
        }
        for name, (kind, plan) in CASES.items()
    }
    return cases, run_cases(tmp_path_factory.mktemp("images"), cases, ranks=2)


class TestTraining(TrainsAsOneDevice):
    """Training equals one device's, with the predicted collectives."""

    def peak_error(self, name: str, case: dict) -> float | None:
        """Return None: peaks are not compared."""
        return None
