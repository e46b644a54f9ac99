"""Adapters of low rank: FLOP, saved bytes, memory of states and traffic against torch, closed forms and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import star
from test_trace import UNCOUNTED

import gssim
from gssim.errors import UserError
from gssim.scenario import load_model, load_scenario
from gssim.scenario.tensor_slices import context_part, model_slice
from gssim.workload import Adapters, Model, sliced_layer, unrolled
from gssim.workload.model import with_adapters

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gsreal.methods.tensor_slices import TensorExchanges, slice_block  # noqa: E402
from gsreal.model_files.build import build_module, loss_of  # noqa: E402
from gsreal.model_files.layers import layer_modules  # noqa: E402
from gsreal.model_files.trace import with_traced_adapters, write_model  # noqa: E402

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SMALL = SCENARIOS.parent / "tests/helpers/models/of_tests"
RANK, BATCH, LENGTH = 5, 3, 24


@pytest.fixture(scope="module", params=["gpt-query-value", "llama-query-value", "llama-all-linear"])
def adapted(request: pytest.FixtureRequest) -> Model:
    family, targets = request.param.split("-", 1)
    return with_adapters(load_model(SMALL / f"adapters-{family}.toml"), Adapters(rank=RANK, targets=targets))


def test_flop_of_forward_and_backward_are_torchs(adapted: Model) -> None:
    module = build_module(adapted.module, where="test")
    tokens = torch.zeros((BATCH, LENGTH), dtype=torch.int64)
    counted = []
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        loss = loss_of(module(tokens), tokens)
        counted.append(counter.get_total_flops())
        loss.backward()
    counted.append(counter.get_total_flops() - counted[0])
    layers = [each.layer for each in unrolled(adapted)]
    ours = [sum(getattr(x, f"{way}_flop").at(b=BATCH, s=LENGTH) for x in layers) for way in ("forward", "backward")]
    assert ours == counted


def test_saved_bytes_are_torchs_and_less_than_of_a_training_of_all_parameters(adapted: Model) -> None:
    module = build_module(adapted.module, where="test")
    tokens = torch.zeros((BATCH, LENGTH), dtype=torch.int64)
    known = {t.untyped_storage()._cdata for t in [*module.parameters(), *module.buffers(), tokens]}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(module(tokens), tokens)
    ours = sum(each.layer.saved_bytes.at(b=BATCH, s=LENGTH) for each in unrolled(adapted))
    assert ours == sum(storage.nbytes() for storage in saved.values())
    assert loss.requires_grad
    whole = sum(layer.repeats * layer.saved_bytes.at(b=BATCH, s=LENGTH) for layer in adapted.whole_layers)
    assert ours < whole


def test_only_adapters_are_trained_and_all_else_is_there(adapted: Model) -> None:
    module = build_module(adapted.module, where="test")
    trained = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    ours = {
        name: parameter.shape
        for each in unrolled(adapted)
        for name, parameter in zip(each.parameter_names, each.layer.parameters, strict=True)
    }
    assert ours == trained
    assert adapted.elements + adapted.frozen_elements == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_divide_sequences_have_equal_parts_of_the_flop_and_all_parameters(
    adapted: Model, ranks: int
) -> None:
    parts = context_part(adapted, LENGTH // ranks)
    for whole, part in zip(unrolled(adapted), unrolled(parts), strict=True):
        assert whole.parameter_names == part.parameter_names
        assert [p.shape for p in whole.layer.parameters] == [p.shape for p in part.layer.parameters]
        for way in ("forward", "backward"):
            flop, of_part = (getattr(each.layer, f"{way}_flop").at(b=BATCH, s=LENGTH) for each in (whole, part))
            assert flop == ranks * of_part


def test_only_inputs_of_the_attention_that_get_a_gradient_are_exchanged_in_the_backward() -> None:
    model = load_model(SMALL / "adapters-llama.toml")
    backward: dict[str, list[int]] = {}
    for targets in ("query-value", "all-linear", ("down_proj",)):
        blocks = [layer for layer in with_adapters(model, Adapters(rank=RANK, targets=targets)).context_layers]
        counts = [sum(each.moment.phase == "b" for each in layer.reductions) for layer in blocks if layer.block]
        backward[str(targets)] = [counts[0], counts[-1]]
    # of the output, values, keys and queries; the first block's input has no gradient
    assert backward == {"query-value": [3, 4], "all-linear": [4, 4], "('down_proj',)": [0, 4]}


@pytest.mark.parametrize("targets", ["query-value", "all-linear"])
@pytest.mark.parametrize("divided", [False, True])
def test_slices_with_adapters_add_up_to_the_whole_and_have_parts_of_gradients_of_what_is_whole(
    targets: str, divided: bool
) -> None:
    adapters = Adapters(rank=RANK, targets=targets)
    model = with_adapters(load_model(SMALL / "sliced-adapters-llama.toml"), adapters)
    held = model_slice(model, (0.5, 0.5), 1, positions=LENGTH // 2 if divided else None)
    for whole, part in zip(unrolled(model), unrolled(held), strict=True):
        for kind in ("parameters", "frozen_parameters"):
            pairs = list(zip(getattr(whole.layer, kind), getattr(part.layer, kind), strict=True))
            for one, of_rank in pairs:
                cut = of_rank.sliced_dimension
                assert of_rank.shape == tuple(n // (2 if d == cut else 1) for d, n in enumerate(one.shape))
                assert of_rank.summed == (kind == "parameters" and cut is None)
                if ".adapter." in one.name:
                    row = "o_proj" in one.name or "down_proj" in one.name
                    assert cut == ((1 if row else None) if one.name.endswith("down") else (None if row else 0))


def test_slices_of_adapters_multiply_as_torch_does() -> None:
    model = with_adapters(load_model(SMALL / "adapters-gpt.toml"), Adapters(rank=RANK, targets="all-linear"))
    held = model_slice(model, (0.5, 0.5), 0)
    module = build_module(model.module, where="test")
    for path, is_block in layer_modules(module).items():
        if is_block:
            slice_block(module.get_submodule(path), range(2), TensorExchanges(2, torch.clone))
    tokens = torch.zeros((BATCH, LENGTH), dtype=torch.int64)
    counted = []
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        loss = loss_of(module(tokens), tokens)
        counted.append(counter.get_total_flops())
        loss.backward()
    counted.append(counter.get_total_flops() - counted[0])
    layers = [each.layer for each in unrolled(held)]
    ours = [sum(getattr(x, f"{way}_flop").at(b=BATCH, s=LENGTH) for x in layers) for way in ("forward", "backward")]
    assert ours == counted


GPT_FILE = f"workload.model={SMALL / 'adapters-gpt.toml'}"
WHOLE = ["plan.method=ddp", "plan.tp=2"]


def test_adapters_beside_parts_of_sequences_and_of_layers_need_one_sequence_length() -> None:
    base = [GPT_FILE, "workload.sequence_length=24", "workload.adapters={rank=4}", "run.steps=3"]
    message = r"plan\.cp = 2 beside plan\.tp = 2: .* at one sequence length alone"
    with pytest.raises(UserError, match=message) as refused:
        load_scenario(SCENARIOS / "demo.toml", [star(4), *base, *WHOLE, "plan.cp=2"])
    assert "\n" not in str(refused.value)


def test_a_file_without_slices_with_adapters_is_refused_there_alone(tmp_path: Path) -> None:
    model = load_model(SMALL / "adapters-gpt.toml")
    older = replace(model, adapted=tuple(replace(each, sliced_layers=(), sequence_layers=()) for each in model.adapted))
    write_model(tmp_path / "older.toml", older)
    assert load_model(tmp_path / "older.toml") == older
    changes = [f"workload.model={tmp_path / 'older.toml'}", "workload.sequence_length=24", "plan.method=tensor"]
    load_scenario(SCENARIOS / "demo.toml", changes)
    with pytest.raises(UserError, match=r"no slices of its blocks with these adapters .* trace it again with .*--ad"):
        load_scenario(SCENARIOS / "demo.toml", [*changes, "workload.adapters={rank=4}"])


MIXTURE = SMALL / "expert-adapters-mixtral.toml"


@pytest.mark.parametrize("targets", ["query-value", "all-linear"])
def test_divided_experts_beside_adapters_are_frozen_and_only_gradients_of_rows_are_exchanged(targets: str) -> None:
    model = with_adapters(load_model(MIXTURE), Adapters(rank=RANK, targets=targets))
    held = unrolled(replace(model, layers=tuple(sliced_layer(each, 2, 0, 48) for each in model.expert_layers)))
    for whole, part in zip(unrolled(model), held, strict=True):
        shapes = [[(p.name, p.shape) for p in each.layer.parameters] for each in (whole, part)]
        assert shapes[0] == shapes[1]
        assert all(".adapter." in name for name, _ in shapes[0])
        for of_all, own in zip(whole.layer.frozen_parameters, part.layer.frozen_parameters, strict=True):
            assert own.sliced == (".experts." in own.name)
            assert own.shape == ((2, *of_all.shape[1:]) if own.sliced else of_all.shape)
        found = [(each.moment.phase, each.kind) for each in part.layer.reductions]
        exchanged = [("f", "counts"), *((way, kind) for way in "fb" for kind in ("dispatch", "combine"))]
        assert found == (exchanged if whole.layer.block else [])


def test_divided_experts_beside_adapters_multiply_as_whole_ones_and_give_no_gradients_of_weights() -> None:
    trained = load_model(MIXTURE)
    model = with_adapters(trained, Adapters(rank=RANK))
    every = unrolled(replace(trained, layers=trained.expert_layers))
    for whole, part, full in zip(
        unrolled(model), unrolled(replace(model, layers=model.expert_layers)), every, strict=True
    ):
        held = sliced_layer(part.layer, 8, 0, 2 * LENGTH)  # all experts, and two rows of each token
        for way in ("forward_flop", "backward_flop"):
            ours, others = (getattr(each, way).at(b=BATCH, s=LENGTH) for each in (held, whole.layer))
            assert ours == others
        of_rows = [each.layer.backward_flop.row_terms for each in (part, full)]
        if whole.layer.block:
            (((coefficient, *powers),), ((of_all, *others),)) = of_rows
            assert (2 * coefficient, powers) == (of_all, others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["plan.cp=2"], r"plan\.cp = 2 beside plan\.ep = 2: .* at one sequence length alone"),
        (["plan.tp=2"], r"plan\.etp = 2: experts that tensor ranks cut besides are not known"),
        (
            [
                f"workload.model={SMALL / 'expert-adapters-mixture.toml'}",
                *("workload.adapters.targets=all-linear", "plan.tp=2", "plan.etp=1", "plan.sequence_parallel=true"),
            ],
            r"no layers with cut blocks and divided experts with these adapters .* its blocks cannot be cut so, .* 1,",
        ),
    ],
)
def test_what_divided_experts_beside_adapters_cannot_do_is_refused_in_one_line(
    changes: list[str], message: str
) -> None:
    """Routers of our mixture have adapters too, whose costs grow with positions of a part times the adapter's rank."""
    base = [f"workload.model={MIXTURE}", "workload.sequence_length=24", "workload.adapters={rank=4}", "run.steps=3"]
    with pytest.raises(UserError, match=message) as refused:
        load_scenario(SCENARIOS / "demo.toml", [star(4), *base, "plan.method=ddp", "plan.ep=2", *changes])
    assert "\n" not in str(refused.value)


def test_frozen_experts_beside_cut_blocks_and_adapters_are_as_many_as_a_rank_holds() -> None:
    """Before, they were counted as units of the cut blocks, and peaks were a sixth too low."""
    model = with_adapters(load_model(MIXTURE), Adapters(rank=RANK))
    layers = unrolled(replace(model, layers=model.expert_sequence_layers))
    frozen = [each for layer in layers for each in layer.layer.frozen_parameters if ".experts." in each.name]
    assert frozen
    assert all(each.held(1, experts=4).shape[0] == 4 for each in frozen)


def test_a_file_without_divided_experts_with_adapters_is_refused_there_alone(tmp_path: Path) -> None:
    model = load_model(MIXTURE)
    older = replace(model, adapted=tuple(replace(each, expert_layers=()) for each in model.adapted))
    write_model(tmp_path / "older.toml", older)
    assert load_model(tmp_path / "older.toml") == older
    changes = [f"workload.model={tmp_path / 'older.toml'}", "workload.sequence_length=24", "plan.method=ddp"]
    load_scenario(SCENARIOS / "demo.toml", [*changes, "workload.adapters={rank=4}"])
    load_scenario(SCENARIOS / "demo.toml", [*changes, "plan.ep=2"])
    with pytest.raises(UserError, match=r"no layers with divided experts with these adapters: .* trace --adapters`"):
        load_scenario(SCENARIOS / "demo.toml", [*changes, "workload.adapters={rank=4}", "plan.ep=2"])


def test_a_file_without_parts_of_sequences_with_adapters_is_refused_there_alone(tmp_path: Path) -> None:
    model = load_model(SMALL / "adapters-gpt.toml")
    older = replace(model, adapted=tuple(replace(each, context_layers=()) for each in model.adapted))
    write_model(tmp_path / "older.toml", older)
    assert load_model(tmp_path / "older.toml") == older
    changes = [f"workload.model={tmp_path / 'older.toml'}", "workload.sequence_length=24", "plan.method=ddp"]
    load_scenario(SCENARIOS / "demo.toml", [*changes, "workload.adapters={rank=4}"])
    load_scenario(SCENARIOS / "demo.toml", [*changes, "plan.cp=2"])
    with pytest.raises(UserError, match=r"parts of sequences with these adapters; trace it again with .*--adapters`"):
        load_scenario(SCENARIOS / "demo.toml", [*changes, "workload.adapters={rank=4}", "plan.cp=2"])


def loaded(*changes: str):  # type: ignore[no-untyped-def]
    return load_scenario(SCENARIOS / "llama3-8b-fsdp.toml", ["plan.recompute=none", *changes]).scenario


def test_states_and_collectives_of_an_adapted_llama_are_the_closed_form() -> None:
    scenario = loaded("workload.adapters={rank=16}", "plan.method=ddp")
    model = scenario.workload.model
    # queries 4096 -> 4096, values 4096 -> 1024: rank x (inputs + outputs) each, in 32 blocks
    elements = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    assert model.elements == elements
    assert model.frozen_elements == sum(layer.repeats * layer.elements for layer in model.whole_layers)
    result = gssim.simulate(scenario)
    size = scenario.workload.precision
    assert size == "bf16"
    reduced = sum(each.bytes * each.count for each in result.collectives if each.kind == "all-reduce")
    assert reduced == pytest.approx(2 * elements)
    peak = result.ranks[0].peak_by_category_bytes
    assert peak["optimizer"] == pytest.approx(2 * 4 * elements, rel=1e-3)
    assert peak["parameters"] == 2 * (elements + model.frozen_elements)


def test_a_base_model_costs_a_backward_of_half_its_weight_gradients_less() -> None:
    model = loaded("workload.adapters={rank=1}").workload.model
    whole = sum(layer.repeats * layer.backward_flop.at(b=1, s=512) for layer in model.whole_layers)
    ours = sum(layer.repeats * layer.backward_flop.at(b=1, s=512) for layer in model.layers)
    assert 0.45 < ours / whole < 0.55  # gradients of inputs remain, those of weights do not


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["workload.adapters={rank=4, targets=['k_proj']}"],
            r"^[^:]*: workload\.adapters\.targets = \['k_proj'\]: .* is not traced .* FILE --adapters k_proj --out NEW",
        ),
        (
            ['workload.adapters={rank=4, targets=["a", "b\\nc"]}'],
            r"targets = \['a', 'b\\nc'\]: .* FILE --adapters NAME,\.\.\. --out NEW",
        ),
        (
            [f"workload.adapters={{rank=4, targets={[f'map_{number}' for number in range(100)]}}}"],
            r"^.{1,400} FILE --adapters NAME,\.\.\. --out NEW.{1,50}$",
        ),
        (
            ["workload.adapters={rank=4}", "plan.method=gs_wgrad"],
            r"cannot run yet with method 'gs_wgrad'; allowed: methods",
        ),
    ],
)
def test_what_adapters_cannot_do_is_refused_in_one_line(changes: list[str], message: str) -> None:
    base = ["plan.method=ddp", "plan.dp_replicate=8"] if "method" not in "".join(changes) else []
    with pytest.raises(UserError, match=message) as refused:
        loaded(*base, *changes)
    assert "\n" not in str(refused.value)


def test_the_same_names_mean_the_role_and_rank_changes_the_identity() -> None:
    role = loaded("workload.adapters={rank=4}")
    names = loaded("workload.adapters={rank=4, targets=['v_proj', 'q_proj']}")
    assert role.workload.model.layers == names.workload.model.layers
    assert role.scenario_id != loaded("workload.adapters={rank=8}").scenario_id


def test_a_trace_finds_the_layers_with_adapters_that_its_file_has_whole_and_in_parts_of_all_kinds() -> None:
    model = load_model(SMALL / "adapters-gpt.toml")
    kept = next(each for each in model.adapted if each.role == "all-linear")
    again = with_traced_adapters(replace(model, adapted=()), ["all-linear"], where="here").adapted
    assert again == (kept,)
    assert all((kept.layers, kept.sliced_layers, kept.sequence_layers, kept.context_layers))
