"""Model files of small configurations of the families that ship, traced as `gsreal trace` does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from gsreal.model_files import request, trace
from gsreal.model_files.request import Request, traced_model
from gsreal.model_files.trace import write_model
from gssim.execution.files import write_text

LENGTH = 24
FAMILIES = {
    "gpt-tied": ("gsreal.models.gpt", "width=48 heads=4 layers=3 tied=true maximum_length=24"),
    "gpt2": (
        "hf:gpt2",
        "n_embd=48 n_head=4 n_layer=3 n_positions=24 vocab_size=256 resid_pdrop=0.0 embd_pdrop=0.0 attn_pdrop=0.0",
    ),
    "llama": (
        "hf:llama",
        "vocab_size=256 hidden_size=48 intermediate_size=96 num_hidden_layers=3 num_attention_heads=4 "
        "num_key_value_heads=2 max_position_embeddings=24",
    ),
    "mixtral": (
        "hf:mixtral",
        "vocab_size=256 hidden_size=48 intermediate_size=96 num_hidden_layers=3 num_attention_heads=4 "
        "num_key_value_heads=2 max_position_embeddings=24 num_local_experts=4 num_experts_per_tok=2",
    ),
    "bert": (
        "hf:bert",
        "vocab_size=257 hidden_size=48 intermediate_size=96 num_hidden_layers=3 num_attention_heads=4 "
        "max_position_embeddings=24 hidden_dropout_prob=0.0 attention_probs_dropout_prob=0.0",
    ),
    "resnet": ("hf:resnet", "hidden_sizes=[16,32] depths=[1,2] embedding_size=16 layer_type=basic num_channels=1"),
    "vit": (
        "hf:vit",
        "hidden_size=32 intermediate_size=64 num_hidden_layers=3 num_attention_heads=4 image_size=8 "
        "patch_size=2 num_channels=1 hidden_dropout_prob=0.0 attention_probs_dropout_prob=0.0",
    ),
}
"""Models to trace, with their arguments."""
VOCABULARY = 256
"""Bytes; a masked-token model has one token more."""


KEPT = Path(__file__).resolve().parent / "models" / "of_tests"
"""Model files that real tests run, traced when the tests were written; a slow test traces them again."""


@contextmanager
def whole_layers_alone(*, sliced: bool = False, split: bool = True, precisions: bool = True) -> Iterator[None]:
    """Trace layers whole (and, if `sliced`, under tensor parallelism) alone, in a third of the time.

    What divides sequences, contexts and experts is left out, and what ranks do that train only some layers; and, unless
    `split`, a quarter of the rest: the costs of a split backward, which no other quantity of a layer depends on. Unless
    `precisions`, layers are traced in the model's own precision alone, and not in others of its file.
    """
    left_out = [name for name in trace.DIVIDED_STEPS if not (sliced and name == "sliced_layers")]
    nothing = dict.fromkeys(left_out, lambda *_given: None)
    patches = [
        patch.dict(trace.DIVIDED_STEPS, nothing),
        patch.object(trace, "with_partial_costs", lambda _model, layers, *_given, **_where: layers),
    ]
    if not split:
        patches.append(patch.object(trace, "with_split_costs", lambda _model, layers, *_given, **_where: layers))
    if not precisions:
        patches.append(patch.object(request, "_other_precisions", lambda *_given: []))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def kept(request: Request) -> Path:
    """Return the kept model file of a request, named after it.

    It is traced and kept where there is none yet, or one of another request (which its first line holds).
    """
    path, first = KEPT / f"{request.name}.toml", f"# {request}\n"
    if not path.exists() or not path.read_text(encoding="utf-8").startswith(first):
        KEPT.mkdir(exist_ok=True)
        write_model(path, traced_model(request))
        write_text(path, first + path.read_text(encoding="utf-8"))
    return path


def model_file(folder: Path, family: str) -> Path:
    """Trace a family's small configuration; return its model file."""
    model, arguments = FAMILIES[family]
    image = family in ("resnet", "vit")
    request = Request(
        model=model,
        arguments=tuple(arguments.split()),
        name=f"small-{family}",
        vocabulary=None if image else VOCABULARY + (family == "bert"),
        maximum_sequence_length=LENGTH,
        image="1x8x8" if image else None,
        classes=10 if image else None,
        sequence_length=None if image else LENGTH,
        task="masked-token" if family == "bert" else "next-token",
    )
    path = folder / f"{family}.toml"
    write_model(path, traced_model(request))
    return path
