"""Every rank makes the same batch from (seed, step) and takes its own rows; the loss is torch's own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from data_files import global_batch
from strategies import star
from torch.nn import functional as F

from gsreal.data import sources as data
from gsreal.measure import Timeline
from gsreal.model_files.build import build_module, example_batch, import_factory, logits_of, loss_of, set_trust
from gsreal.models import gpt
from gsreal.run.feed import Feed
from gsreal.run.worker import build
from gssim.errors import UserError
from gssim.scenario import Scenario, load_model, single_device
from gssim.units import validated
from gssim.workload import Module, Workload

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
DEVICE = torch.device("cpu")


def workload_of(name, **changes):
    model = load_model(MODELS / f"{name}.toml")
    tokens = {"sequence_length": 32} if model.input.kind == "tokens" else {}
    return validated(Workload, {"model": model, "global_batch_size": 12} | tokens | changes, file="made")


def scenario_for(workload, *, batch, precision="fp32"):
    """Return a scenario on as many equal devices as there are entries in `batch` (samples of each rank)."""
    plan = {"method": "ddp", "shares": {"batch": [samples / sum(batch) for samples in batch]}}
    cluster = star(len(batch))
    chosen = replace(workload, global_batch_size=sum(batch), precision=precision)
    return validated(Scenario, {"name": "made", "cluster": cluster, "workload": chosen, "plan": plan}, file="made")


GPT, BERT, RESNET = "gpt-byte-1m", "bert-byte-1m", "resnet-digits"

# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [GPT, BERT, RESNET])
def test_the_same_seed_and_step_give_the_same_batch_and_others_another(name):
    workload = workload_of(name)
    first = global_batch(workload, seed=3, step=4)
    assert all(torch.equal(a, b) for a, b in zip(first, global_batch(workload, seed=3, step=4), strict=True))
    assert not torch.equal(first[0], global_batch(workload, seed=3, step=5)[0])
    assert not torch.equal(first[0], global_batch(workload, seed=4, step=4)[0])


def test_the_corpus_is_the_standard_library_by_file_name():
    import abc
    import zipimport

    corpus = data.standard_library_bytes().tobytes()
    start, end = Path(abc.__file__).read_bytes(), Path(zipimport.__file__).read_bytes()
    assert 0 <= corpus.find(start) < corpus.find(end)


def test_next_token_targets_are_the_inputs_one_further():
    inputs, targets = global_batch(workload_of(GPT), seed=0, step=0)
    assert inputs.shape == targets.shape == (12, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    corpus = data.standard_library_bytes().tobytes()
    for row, target in zip(inputs, targets, strict=True):
        assert bytes([*row.tolist(), int(target[-1])]) in corpus


def test_masked_tokens_are_the_targets_and_all_else_is_left_out():
    workload = workload_of(BERT, global_batch_size=64, sequence_length=128)
    inputs, targets = global_batch(workload, seed=0, step=0)
    masked = targets != data.IGNORED
    assert torch.equal(masked, inputs == 256)
    assert masked[:, 0].all()  # every sample has a loss term
    assert 0.13 < masked[:, 1:].double().mean() < 0.17  # 8,128 draws at 0.15: five standard deviations
    assert (targets[masked] < 256).all()
    whole = torch.where(masked, targets, inputs)
    corpus = data.standard_library_bytes().tobytes()
    assert all(bytes(row.tolist()) in corpus for row in whole)
    assert data.loss_terms(targets) == int(masked.sum())


def test_digits_are_images_of_8_by_8_between_0_and_1():
    images, classes = global_batch(workload_of(RESNET, global_batch_size=200), seed=0, step=0)
    assert images.shape == (200, 1, 8, 8)
    assert images.dtype == torch.float32
    assert float(images.min()) == 0.0
    assert float(images.max()) == 1.0
    assert classes.dtype == torch.int64
    assert set(classes.tolist()) == set(range(10))
    assert data.loss_terms(classes) == 200


@pytest.mark.parametrize("batch", [(6, 6), (9, 3), (0, 5, 7), (1, 1, 1, 9)])
@pytest.mark.parametrize("name", [GPT, BERT, RESNET])
def test_the_rows_of_the_ranks_are_the_whole_batch_in_order(name, batch):
    scenario = scenario_for(workload_of(name), batch=batch)
    assert scenario.batch_sizes == batch
    inputs, targets = global_batch(scenario.workload, seed=0, step=2)
    own = [Feed(scenario, rank, DEVICE).at(2) for rank in range(len(batch))]
    assert [len(rows) for rows, _, _ in own] == list(batch)
    assert torch.equal(torch.cat([rows for rows, _, _ in own]), inputs)
    assert torch.equal(torch.cat([rows for _, rows, _ in own]), targets)


@pytest.mark.parametrize("name", [GPT, BERT])
def test_every_rank_knows_all_parts_of_the_loss_terms(name):
    """BERT's ranks mask different numbers of tokens, so that their parts are not those of their samples."""
    scenario = scenario_for(workload_of(name), batch=(9, 3))
    feeds = [Feed(scenario, rank, DEVICE).at(1) for rank in range(2)]
    terms = [data.loss_terms(targets) for _, targets, _ in feeds]
    for _, _, weights in feeds:
        assert weights.ranks == pytest.approx([n / sum(terms) for n in terms])
        assert sum(weights.ranks) == pytest.approx(1)
    assert (feeds[0][2].ranks == pytest.approx([0.75, 0.25])) == (name == GPT)


def test_images_come_in_the_workloads_precision_and_token_ids_stay_whole():
    for name, kind in ((RESNET, torch.float64), (GPT, torch.int64)):
        inputs, targets, _ = Feed(scenario_for(workload_of(name), batch=(4, 8), precision="fp64"), 0, DEVICE).at(0)
        assert inputs.dtype == kind
        assert targets.dtype == torch.int64


def test_weighted_means_of_the_ranks_are_the_whole_batchs_loss():
    scenario = scenario_for(workload_of(BERT), batch=(9, 3), precision="fp64")
    module = build_module(scenario.workload.model.module, where="made").double()
    inputs, targets = global_batch(scenario.workload, seed=0, step=0)
    parts = [Feed(scenario, rank, DEVICE).at(0) for rank in range(2)]
    with torch.no_grad():
        whole = float(loss_of(module(inputs), targets))
        by_rank = [float(loss_of(module(x), y)) * weights.ranks[rank] for rank, (x, y, weights) in enumerate(parts)]
    assert sum(by_rank) == pytest.approx(whole, rel=1e-12)


# Data that a model cannot read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            GPT,
            {"data": "digits"},
            "vocabulary of 256 cannot read 'digits'; bytes need a vocabulary of 256",
        ),
        (
            RESNET,
            {"data": "stdlib-bytes"},
            "the digits are 1x8x8 images of 10 classes, which are not what the model takes",
        ),
    ],
)
def test_a_model_cannot_be_trained_on_the_other_kind_of_data(name, changes, message):
    with pytest.raises(UserError, match=r"^made: workload\.data: ") as refused:
        data.check_data(workload_of(name, **changes), where="made")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (GPT, {"vocabulary": 255}),
        (BERT, {"vocabulary": 256}),  # the mask needs an id of its own
        (RESNET, {"shape": (3, 8, 8)}),
        (RESNET, {"shape": (1, 28, 28)}),
        (RESNET, {"classes": 9}),
    ],
)
def test_a_model_of_another_input_is_refused(name, changes):
    workload = workload_of(name)
    model = replace(workload.model, input=replace(workload.model.input, **changes))
    with pytest.raises(UserError, match=r"^made: workload\.data: "):
        data.check_data(replace(workload, model=model), where="made")


@pytest.mark.parametrize("name", [GPT, BERT, RESNET])
def test_shipped_models_can_be_trained(name):
    workload = workload_of(name)
    for kind in ("auto", data.default_data(workload.model)):
        data.check_data(replace(workload, data=kind), where="made")


# Modules and losses --------------------------------------------------------------------------------------------------


def test_loss_is_the_cross_entropy_over_the_last_dimension():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(7, (3, 5))
    targets[0, :3] = data.IGNORED
    expected = F.cross_entropy(logits.transpose(1, 2), targets)
    assert torch.allclose(loss_of(logits, targets), expected, rtol=1e-12)
    kept = targets != data.IGNORED
    by_hand = -torch.log_softmax(logits, -1)[kept].gather(1, targets[kept][:, None]).mean()
    assert torch.allclose(loss_of(logits, targets), by_hand, rtol=1e-12)


def test_logits_are_found_in_what_models_return():
    logits, other = torch.ones(2, 3), torch.zeros(1)
    for output in (logits, SimpleNamespace(logits=logits), (logits, other), [logits, other]):
        assert logits_of(output) is logits


@pytest.mark.parametrize("name", [GPT, BERT, RESNET])
def test_example_batches_have_the_shape_and_type_of_real_ones(name):
    workload = workload_of(name)
    real = global_batch(workload, seed=0, step=0)
    example = example_batch(workload.model, batch_size=12, sequence_length=workload.sequence_length)
    assert [(t.shape, t.dtype) for t in example] == [(t.shape, t.dtype) for t in real]


def test_a_factory_is_named_with_dots_or_a_colon():
    assert import_factory(Module(factory="gsreal.models.gpt"), where="here") is gpt
    assert import_factory(Module(factory="gsreal.models:gpt"), where="here") is gpt
    with pytest.raises(UserError, match=r"^here: module\.factory = 'gsreal\.models\.gtp': cannot be imported: "):
        import_factory(Module(factory="gsreal.models.gtp"), where="here")
    set_trust(True)
    try:
        with pytest.raises(UserError, match="No module named 'nowhere_at_all'; PYTHONPATH names the folders"):
            import_factory(Module(factory="nowhere_at_all.model"), where="here")
    finally:
        set_trust(False)


def test_a_module_whose_import_fails_is_the_users_to_mend(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_a_user.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot be imported: not today"):
        build_module(Module(factory="broken_module_of_a_user.make"), where="made")


def test_a_model_file_of_another_module_is_refused():
    scenario = single_device(scenario_for(workload_of(RESNET), batch=(4, 4)))
    layers = scenario.workload.model.layers[1:]
    other = replace(scenario.workload, model=replace(scenario.workload.model, layers=layers))
    with pytest.raises(UserError, match=r"the file lists 695306 parameters, but the module has 695594; trace it"):
        build(replace(scenario, workload=other), Timeline(0, DEVICE), DEVICE)


def test_the_same_seed_makes_the_same_module_on_every_rank():
    scenario = single_device(scenario_for(workload_of(RESNET), batch=(4, 4)))
    built = [build(scenario, Timeline(0, DEVICE), DEVICE).module for _ in range(2)]
    for first, second in zip(built[0].parameters(), built[1].parameters(), strict=True):
        assert torch.equal(first, second)
