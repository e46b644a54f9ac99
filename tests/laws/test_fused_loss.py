"""A loss that is fused with the head: no logits in memory, and the head's product once more."""

from dataclasses import replace
from pathlib import Path

import pytest
from strategies import device_type, loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.simulation import simulate
from gssim.workload.fused_loss import with_fused_loss

MODELS = Path(__file__).resolve().parents[2] / "scenarios/models"
GPT2, LLAMA = (load_model(MODELS / f"{name}.toml") for name in ("gpt2-124m", "llama3-8b"))


@pytest.mark.parametrize(("model", "vocabulary", "width", "value"), [(GPT2, 50257, 768, 4), (LLAMA, 128256, 4096, 2)])
def test_the_head_multiplies_once_more_and_reads_and_writes_no_logits(model, vocabulary, width, value):
    head, loss = with_fused_loss(model).layers[-2:]
    shape = {"b": 3, "s": 128}
    tokens, weight = 3 * 128, vocabulary * width
    assert head.forward_flop.at(**shape) == 2 * weight * tokens
    assert head.backward_flop.at(**shape) == 3 * 2 * weight * tokens
    assert head.forward_bytes.at(**shape) == value * (weight + width * tokens)
    assert head.backward_bytes.at(**shape) == 3 * value * (weight + width * tokens)
    logits_bytes = value * vocabulary * tokens
    assert max(each.size_bytes.at(**shape) for each in loss.buffers) < 16
    assert max(loss.forward_bytes.at(**shape), loss.backward_bytes.at(**shape)) < 0.01 * logits_bytes
    per_token = [each for each in head.buffers if each.category == "activations"]
    assert [each.size_bytes.at(**shape) for each in per_token] == [4 * tokens]


@pytest.mark.parametrize("method", ["single", "ddp", "zero1", "zero3", "gs", "gs_z3", "tensor", "pipeline"])
def test_every_method_peaks_lower_and_sends_the_same(method):
    ranks = 1 if method == "single" else 2
    plan = {"method": method} | ({"micro_batches": 2, "stages": [7, 9]} if method == "pipeline" else {})

    def result_of(**settings):
        shape = {"model": GPT2, "global_batch_size": 4, "sequence_length": 512}
        cluster = star(ranks, types={"fast": device_type(memory_bytes=2**40)})
        return simulate(loaded_of(scenario_of(cluster, plan, **shape, **settings))).result

    whole, fused = result_of(), result_of(fused_loss=True)
    logits_bytes = 4 * 50257 * 512 * (4 if method in ("single", "tensor") else 2)
    peaks = [max(each.peak_allocated_bytes for each in result.ranks) for result in (whole, fused)]
    assert peaks[0] - peaks[1] >= logits_bytes
    assert fused.collectives == whole.collectives


def test_what_is_fused_stays_so_and_what_has_no_head_is_refused():
    fused = with_fused_loss(GPT2)
    assert with_fused_loss(fused) is fused
    made = scenario_of(star(1), {"method": "single"}, model=GPT2, sequence_length=64, fused_loss=True)
    assert replace(made.workload, learning_rate=0.1).model == made.workload.model
    images = load_model(MODELS / "resnet-digits.toml")
    with pytest.raises(UserError, match="predicts no tokens"):
        scenario_of(star(1), {"method": "single"}, model=images, sequence_length=None, fused_loss=True)
    bert = load_model(MODELS / "bert-base.toml")
    with pytest.raises(UserError, match="no head that returns logits"):
        scenario_of(star(1), {"method": "single"}, model=bert, sequence_length=64, fused_loss=True)


def test_owners_of_weight_gradients_cannot_fuse_it():
    with pytest.raises(UserError, match=r"fused_loss = true: cannot run with method 'gs_wgrad'"):
        scenario_of(star(2), {"method": "gs_wgrad"}, model=GPT2, sequence_length=64, fused_loss=True)
