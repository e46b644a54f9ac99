"""Layers of a workload's own precision and number of samples, and what a model file without them gives instead."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import gssim
from gssim.scenario import Scenario, load_model
from gssim.units import validated
from gssim.workload import Buffer, Layer, Model, for_samples, shipped_models
from gssim.workload.model import FusedKernels, OtherPrecision
from gssim.workload.owned import with_frozen_layers

SCENARIOS = Path(__file__).parents[2] / "scenarios"
BF16 = {"workload.precision": "bf16"}
CPUS = {"cluster": str(SCENARIOS / "clusters" / "two-cores.toml"), "plan.ranks": 2}


@pytest.fixture(scope="module")
def both() -> Scenario:
    """Return a scenario of a model that is traced in fp32 and bf16."""
    return gssim.load(SCENARIOS / "gpt2-half.toml", {"workload.model": "gpt-byte-150k", "workload.sequence_length": 32})


def test_a_workload_has_the_layers_of_its_precision(both):
    both = both.with_({"workload.precision": "fp32"})
    assert both.workload.model.traced_precision == "fp32"
    for precision in ("bf16", "fp16"):
        workload = both.with_({"workload.precision": precision}).workload
        assert workload.model.traced_precision == "bf16"  # of as many bytes
        assert workload.scaled_bytes is None
        assert replace(workload, global_batch_size=8).model is workload.model
        wide = replace(workload, precision="fp32").model
        assert replace(wide, other_precisions=()) == both.workload.model  # whose file was read for fp32 alone


def test_the_identity_is_that_of_the_file_in_its_own_precision(both):
    """Measurements that were made before a file had other precisions are still joined."""
    file = load_model(shipped_models()["gpt-byte-150k"])
    halves = both.with_(BF16)
    before = replace(halves, workload=replace(halves.workload, model=replace(file, other_precisions=())))
    assert before.workload.model.traced_precision == "fp32"
    assert before.scenario_id == halves.scenario_id
    assert "is traced in fp32, not in bf16" in str(before.workload.scaled_bytes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workload.precision": "fp16"},
        {"workload.adapters": {"rank": 2, "alpha": 4}},
        {"workload.frozen": ["blocks.0"]},
        {"workload.fused_loss": True},
        {"plan.method": "ddp", "plan.tp": 2},
    ],
    ids=lambda changes: next(iter(changes), "bf16"),
)
def test_a_stored_scenario_is_the_same_question(both, changes):
    """It had another id in 16 bits: a Result held the layers of that precision alone, of which the id was then made."""
    asked = both.with_({"workload.model": "gpt-byte-1m", **BF16, **changes})
    again = gssim.load(json.loads(json.dumps(asked.resolved())))
    assert again.scenario_id == asked.scenario_id
    assert again.workload.model.layers == asked.workload.model.layers
    assert again.resolved() == asked.resolved()
    wide = [each.with_({"workload.precision": "fp32"}) for each in (asked, again)]
    assert wide[0].workload.model.layers == wide[1].workload.model.layers
    assert wide[0].scenario_id == wide[1].scenario_id


def test_no_file_can_set_the_layers_that_a_result_has_beside_those_in_its_precision(both, tmp_path):
    """`as_filed` was a key of model files: one that set it chose the identities of its scenarios."""
    text = shipped_models()["gpt-byte-1m"].read_text(encoding="utf-8")
    file = tmp_path / "model.toml"
    for key in ("_in_file_precision", "as_filed"):
        file.write_text(f"{key} = {{name = 'another'}}\n{text}", encoding="utf-8")
        with pytest.raises(gssim.UserError, match=rf"model.toml: {key}: unknown key; (?!did you mean _)"):
            load_model(file)
        with pytest.raises(gssim.UserError, match=rf"{key}: unknown key"):
            both.with_({f"workload.model.{key}": {"name": "another"}})
    inline = both.with_({"workload.model": "gpt-byte-1m", **BF16}).resolved()
    assert "_in_file_precision" in inline["workload"]["model"]
    inline["plan"]["unheard"] = 1
    with pytest.raises(gssim.UserError, match=r"plan.unheard: unknown key"):
        gssim.load(inline)


def test_what_was_traced_in_one_precision_alone_is_scaled_and_said(both):
    """Layers without adapters, or without slices, in bf16 are not taken where a workload or a plan may need these."""
    file = load_model(shipped_models()["gpt-byte-1m"])
    (other,) = file.other_precisions
    adapters = {"rank": 2, "alpha": 4}
    workload = both.with_({"workload.model": "gpt-byte-1m", "workload.adapters": adapters, **BF16}).workload
    assert workload.scaled_bytes is None
    without = replace(file, other_precisions=(replace(other, adapted=()),))
    scaled = replace(workload, model=without)
    assert scaled.model.traced_precision == "fp32"
    assert scaled.scaled_bytes is not None
    uncut = replace(file, other_precisions=(replace(other, sliced_layers=()),))
    assert replace(workload, model=uncut, adapters=None).model.traced_precision == "fp32"


def test_only_layers_that_were_not_traced_are_scaled_instead(both, tmp_path):
    """Any error of the layers in the workload's precision was taken for one that they were not traced."""
    text = shipped_models()["gpt-byte-1m"].read_text(encoding="utf-8")
    file = load_model(shipped_models()["gpt-byte-1m"])
    (other,) = file.other_precisions
    frozen = both.with_({"workload.model": "gpt-byte-1m", "workload.frozen": ["blocks.0"], **BF16}).workload
    assert frozen.scaled_bytes is None
    layers = tuple(replace(layer, untrained_buffers=None) for layer in other.layers)
    untraced = replace(file, other_precisions=(replace(other, layers=layers, partly_trained=None),))
    assert replace(frozen, model=untraced).scaled_bytes is not None

    own, header, others = text.partition("[[other_precisions]]\n")
    path = tmp_path / "model.toml"
    others = re.sub(r'(?s)(name = "head"\n.*?)block = false', r"\1block = true", others, count=1)
    path.write_text(own + header + others, encoding="utf-8")
    changes = {"workload.model": str(path), "workload.fused_loss": True, **CPUS}  # GPUs run others in 16 bits
    assert both.with_({**changes, "workload.precision": "fp32"}).workload.model.loss_fused
    with pytest.raises(
        gssim.UserError, match=r"toml: workload.fused_loss = true: the last layer of 'gpt-byte-1m' is no"
    ):
        both.with_({**changes, **BF16})


def test_layers_in_other_precisions_are_read_where_they_are_needed(both, tmp_path):
    """Reading them took as long as reading all else."""
    text = shipped_models()["gpt-byte-150k"].read_text(encoding="utf-8")
    file = tmp_path / "model.toml"
    head, header, tail = text.partition("[[other_precisions]]\n")

    def others(content: str, precision: str) -> int:
        file.write_text(content, encoding="utf-8")
        changes = {"workload.model": str(file), "workload.precision": precision}
        model = both.with_(changes).workload.model
        return len(model.in_file_precision.other_precisions)

    assert [others(text, precision) for precision in ("fp32", "bf16", "fp16", "fp64")] == [0, 1, 1, 1]
    assert len(load_model(file).other_precisions) == 1
    quoted = re.sub(r'^source = "(.*)"', r'source = """\1"""', text, count=1, flags=re.MULTILINE)
    for content in (quoted, head + " " + header + tail):  # of which it cannot be told by its lines
        assert others(content, "fp32") == 1
    with pytest.raises(gssim.UserError, match="unknown: unknown key"):
        others(text + "\n[unknown]\n", "fp32")
    wrong = text.replace(header, header + "precision\n")
    assert others(wrong, "fp32") == 0
    with pytest.raises(gssim.UserError, match=rf"line {head.count(chr(10)) + 2}\b"):
        others(wrong, "bf16")


def test_layers_of_gpus_are_read_where_they_are_needed(both):
    """Heads of 36 elements are padded in 16 bits alone: a workload in fp32, or of CPUs, needs no layers of GPUs."""
    gpus = both.with_({"workload.model": "gpt-byte-1m"})
    cpus = both.with_({"workload.model": "gpt-byte-1m", **CPUS})
    file = load_model(shipped_models()["gpt-byte-1m"])
    assert file.fused_kernels is not None
    assert not file.fused_kernels.layers
    assert [each.precision for each in file.fused_kernels.other_precisions] == ["bf16"]
    wide, autocast = {"workload.precision": "fp32"}, {"workload.precision": "fp32", "workload.autocast": "fp16"}
    for changes in (wide, autocast, BF16):
        found = cpus.with_(changes).workload.model
        assert found.in_file_precision.fused_kernels == FusedKernels()
        assert not found.runs_fused_kernels
        of_gpus = gpus.with_(changes).workload.model
        assert (of_gpus.layers == found.layers) == (changes is wide)
        assert of_gpus.runs_fused_kernels == (changes is not wide)
        assert (
            gpus.with_(changes).scenario_id
            == replace(gpus.with_(changes), workload=cpus.with_(changes).workload).scenario_id
        )
    narrow = cpus.with_(wide)  # a Result is the same of a file that was read as a whole
    assert replace(narrow, workload=replace(narrow.workload, model=file)).resolved() == narrow.resolved()
    assert gpus.with_(wide).workload.model == replace(file, fused_kernels=FusedKernels(), other_precisions=())
    assert gpus.with_(BF16).workload.model.layers == file.fused_kernels.other_precisions[0].layers
    assert gpus.with_(autocast).workload.model.layers == file.fused_kernels.autocast[1].layers


def test_buffers_of_one_sample_replace_those_of_several():
    texts = (
        "f0 f4 temporaries 96*b*s samples>1",
        "f0 b9 activations 96*s samples=1",
        "f2 b9 activations 32*b*s samples>1",
        "f3 b8 activations 32*b*s",
        "f4 b7 activations 8*b*s fixed samples=1",
    )
    assert [str(Buffer.parse(text)) for text in texts] == list(texts)
    costs = dict.fromkeys(("forward_flop", "backward_flop", "forward_bytes", "backward_bytes"), 0)
    sizes = {"saved_bytes": 0, "output_bytes": 0, "forward_operations": 5, "backward_operations": 9}
    data = {"name": "block", "modules": ("block",), "block": True, "buffers": texts, **costs, **sizes}
    layer = validated(Layer, data | {"recompute_releases": (3, 1, 4, 2)}, file="layer.toml")
    one, several = for_samples(layer, 1), for_samples(layer, 2)
    of_one = ["f0 b9 activations 96*b*s samples=1", *texts[3:]]  # sizes of outputs are functions of b too
    assert [str(each) for each in one.buffers] == of_one
    assert one.recompute_releases == (3, 4, 2)
    assert [texts.index(str(each)) for each in several.buffers] == [0, 2, 3]
    assert several.recompute_releases == (1, 4)
    assert sum(each.bytes_at(b=1, s=10, scale=1) for each in layer.buffers) == 960 + 320 + 80
    assert for_samples(several, 2).recompute_releases == (1, 4)
    plain = replace(layer, buffers=layer.buffers[3:4])
    assert for_samples(plain, 1) is plain


def test_every_shipped_model_in_fp32_has_layers_in_bf16():
    models: dict[str, Model] = {name: load_model(path) for name, path in shipped_models().items()}
    for name, model in models.items():
        if model.traced_precision == "fp32":
            assert [each.precision for each in model.other_precisions] == ["bf16"], name
            (other,) = model.other_precisions
            assert isinstance(other, OtherPrecision)
            assert [layer.modules for layer in other.layers] == [layer.modules for layer in model.layers], name


def test_loads_by_layer_are_predicted(tmp_path):
    """`simulate` failed on them, the form of measured loads, as a table is no part of a key of its caches."""
    rows = {f"blocks.{block}": tuple(range(1, 13)) for block in range(4)}
    (tmp_path / "load.json").write_text(json.dumps({"layers": rows}), encoding="utf-8")
    changes = {
        "workload.model": "mixture-byte-1m",
        "workload.sequence_length": 32,
        "workload.expert_load": str(tmp_path / "load.json"),
        "plan.method": "ddp",
        "plan.ep": 2,
    }
    uneven = gssim.load(SCENARIOS / "demo.toml", changes)
    results = [gssim.simulate(each) for each in (uneven, uneven.with_({"workload.expert_load": "balanced"}))]
    rank_0, rank_1 = (next(each for each in results[0].ranks if rank in each.ranks) for rank in (0, 1))
    assert rank_0.peak_allocated_bytes < results[1].ranks[0].peak_allocated_bytes < rank_1.peak_allocated_bytes


def test_frozen_blocks_of_a_file_traced_with_one_sample_are_recomputed_as_others():
    """Their backward is traced with several samples: compared with what one sample has, it was taken for another."""
    model = load_model(shipped_models()["bert-byte-1m"])
    assert any(each.samples for layer in model.sequence_layers for each in layer.buffers)
    frozen = with_frozen_layers(model, ("tokens", "blocks.0"))
    blocks = [each for each in (*frozen.layers, *frozen.sequence_layers) if each.block]
    assert all(each.selective_positions and each.recompute_positions for each in blocks)
    assert any(not each.backward_operations for each in blocks)
