"""Import of torchtitan's files: what each key becomes, and what is refused."""

import json

import pytest
from importing import TITAN, imported, refused

pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.mark.parametrize(
    ("replicate", "shard", "reshard", "method"),
    [
        (1, -1, "default", "zero3"),
        (1, 8, "always", "zero3"),
        (1, -1, "never", "zero2"),
        (2, -1, "default", "hsdp"),
        (8, 1, "default", "ddp"),
    ],
)
def test_torchtitan(tmp_path, replicate, shard, reshard, method):
    text = TITAN.format(batch=16, replicate=replicate, shard=shard, reshard=reshard, mode="full")
    tables, found = imported(tmp_path, text, name="t.toml")
    assert tables["plan"]["method"] == method
    assert (tables["plan"]["micro_batches"], tables["plan"]["recompute"]) == (2, "full")
    assert tables["workload"]["optimizer_implementation"] == "fused"
    assert tables["workload"].get("reduce_precision") == (None if method == "ddp" else "fp32")
    assert any("autocast" in line for line in found.listed) == (method == "ddp")


@pytest.mark.parametrize(
    ("name", "flavor"),
    [("deepseek_v3", "671B"), ("deepseek_v3", "16B"), ("llama4", "17bx16e"), ("llama2", "13B"), ("a_new_one", "70B")],
)
def test_torchtitans_flavor_must_be_of_the_models_size(tmp_path, name, flavor):
    """Sizes of Llama 3 and Qwen 3 were known alone: other files were predicted with the model of the command."""
    text = TITAN.format(batch=16, replicate=1, shard=-1, reshard="always", mode="full")
    text = text.replace('"8B"', f'"{flavor}"').replace('"llama3"', f'"{name}"')
    assert f'"{flavor}"' in text
    assert "give the right one by --model" in refused(tmp_path, text, name="train.toml")


@pytest.mark.parametrize(
    ("pp", "more", "stages"),
    [
        (4, "", [10, 9, 8, 9]),  # 32 blocks and two: 9, 9, 8, 8, of which embedding and head take one each
        (2, "pipeline_parallel_first_stage_less_layers = 0\n", [19, 17]),
        (2, "pipeline_parallel_last_stage_less_layers = 3\n", [19, 17]),
        (4, 'pipeline_parallel_schedule = "Interleaved1F1B"\n', [6, 5, 4, 4, 4, 4, 4, 5]),
        (2, 'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 9\n', None),
    ],
)
def test_torchtitans_stages_count_embedding_and_head_as_blocks(tmp_path, pp, more, stages):
    """As its generate_llm_fqn_per_model_part divides 32 blocks, before and behind which are two layers each."""
    text = TITAN.format(batch=64, replicate=1, shard=-1, reshard="default", mode="none")
    text = text.replace("local_batch_size = 1", "local_batch_size = 8").replace("batch_size = 64", "batch_size = -1")
    text = text.replace("fsdp_reshard", f"pipeline_parallel_degree = {pp}\n{more}fsdp_reshard")
    tables, _ = imported(tmp_path, text, name="t.toml")
    assert tables["plan"]["stages"] == (stages or [10, 9, 8, 9])
    blocks = [f"layers.{number}" for number in range(32)]
    parts = [["tok_embeddings", *blocks[:20]], [*blocks[20:], "norm", "output"]]
    named = text.replace(f"_degree = {pp}\n{more}", f"_degree = 2\nmodule_fqns_per_model_part = {json.dumps(parts)}\n")
    assert imported(tmp_path, named, name="t.toml")[0]["plan"]["stages"] == [22, 14]
    other = named.replace('"norm", ', "")
    assert "must be the 32 blocks of 'llama3-8b'" in refused(tmp_path, other, name="t.toml")
    assert "the model 'llama3-8b' has width" in refused(tmp_path, text.replace('"8B"', '"70B"'), name="t.toml")


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "interleavedzerobubble"])
def test_torchtitans_zero_bubble_schedule_has_two_stages_a_rank(tmp_path, name):
    text = TITAN.format(batch=64, replicate=1, shard=-1, reshard="default", mode="none")
    text = text.replace("local_batch_size = 1", "local_batch_size = 8").replace("batch_size = 64", "batch_size = -1")
    schedule = f'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "{name}"\n'
    titan = text.replace("fsdp_reshard", f"{schedule}fsdp_reshard")
    same = ["workload.reduce_precision=bf16"]  # torchtitan's is fp32: when FSDP2 casts its gradients is not modelled
    tables, _ = imported(tmp_path, titan, name="t.toml", overrides=same)
    plan = tables["plan"]
    assert (plan["method"], plan["pp"], plan["schedule"]) == ("zero2", 4, "interleaved_zero_bubble")
    assert plan["stages"] == [6, 5, 4, 4, 4, 4, 4, 5]
    other = text.replace("fsdp_reshard", schedule.replace(name, "ZBVZeroBubble") + "fsdp_reshard")
    assert "allowed: 1f1b, gpipe, interleaved1f1b" in refused(tmp_path, other, name="t.toml")


@pytest.mark.parametrize(
    ("replicate", "context", "plan"),
    [
        (1, 8, {"method": "zero3", "cp": 8}),
        (4, 2, {"method": "hsdp", "dp_replicate": 4, "dp_shard": 1, "cp": 2}),
        (8, 1, {"method": "ddp"}),
    ],
)
@pytest.mark.parametrize("by_option", [False, True])
def test_torchtitan_shards_over_context_ranks(tmp_path, replicate, context, plan, by_option):
    """Its mesh for FSDP is that of data_parallel_shard_degree times context_parallel_degree."""
    text = TITAN.format(batch=16, replicate=replicate, shard=1, reshard="default", mode="full")
    if not by_option:
        text = text.replace("[parallelism]", f"[parallelism]\ncontext_parallel_degree = {context}")
    overrides = [f"plan.cp={context}"] if by_option else []
    tables, _ = imported(tmp_path, text, name="t.toml", overrides=overrides)
    assert {key: tables["plan"].get(key) for key in plan} == plan
    assert tables["workload"].get("reduce_precision") == (None if context == 1 and not by_option else "fp32")


@pytest.mark.parametrize(
    ("said", "split"),
    [
        ('"context_parallel_load_balancer": "headtail"', None),
        ('"context_parallel_load_balancer": null', "plain"),
        ('"context_parallel_load_balance": false', "plain"),
    ],
)
def test_torchtitan_says_how_sequences_are_divided(tmp_path, said, split):
    text = '{"training": {"local_batch_size": 1, "seq_len": 8192}, "parallelism": {"context_parallel_degree": 2, %s}}'
    tables, _ = imported(tmp_path, text % said, name="t.json")
    assert (tables["plan"]["cp"], tables["plan"].get("context_split")) == (2, split)


def test_torchtitans_compiled_context_parallelism_waits_for_each_exchange(tmp_path):
    """torch 2.6, distributed/_functional_collectives.py: a traced collective is followed by its wait."""
    saved = {"training": {"seq_len": 8192, "local_batch_size": 1}, "compile": COMPILED_TITAN}
    saved |= {"parallelism": {"context_parallel_degree": 2}, "activation_checkpoint": {"mode": "none"}}

    def overlap(said, *overrides):
        options = {"overrides": overrides, "ignored": ["compile.enable"]}
        return imported(tmp_path, said, name="t.json", **options)[0]["plan"].get("context_overlap")

    assert "compiled blocks that ranks divide" in refused(tmp_path, saved, name="t.json")
    assert overlap(saved) is False
    assert overlap(saved, "plan.context_overlap=true") is True
    assert overlap(saved, "plan.context_exchange=all-to-all") is None
    assert overlap(saved | {"compile": COMPILED_TITAN | {"components": ["loss"]}}) is None
    assert overlap(saved | {"compile": {"enable": False}}) is None
    assert overlap(saved | {"parallelism": {}}) is None


@pytest.mark.parametrize(("method", "exchange"), [("", "gather"), ("allgather", "gather"), ("alltoall", "ring")])
def test_torchtitans_context_parallelism_attends_in_blocks_beside_selective_recomputation_too(
    tmp_path, method, exchange
):
    text = TITAN.format(batch=16, replicate=1, shard=-1, reshard="default", mode="selective")
    said = f'\ncontext_parallel_rotate_method = "{method}"' if method else ""
    text = text.replace("[parallelism]", f"[parallelism]\ncontext_parallel_degree = 2{said}")
    tables, _ = imported(
        tmp_path, text.replace('mode = "selective"', 'mode = "selective"\nselective_ac_option = "op"'), name="t.toml"
    )
    plan = {"cp": 2, "context_exchange": exchange, "recompute": "every-second-product"}
    assert {key: tables["plan"].get(key) for key in plan} == plan


OLD_TITAN = """
[optimizer]
name = "AdamW"
lr = 3e-4
{fused}
[training]
batch_size = 4
seq_len = 8192
warmup_steps = 200
{degrees}
enable_loss_parallel = true
compile = false
fp8_linear = ""
checkpoint_interval = 3600
[experimental]
{experimental}
[activation_checkpoint]
mode = "full"
"""


@pytest.mark.parametrize(
    ("degrees", "experimental", "fused", "plan"),
    [
        ("data_parallel_degree = -1\nsequence_parallel_degree = 2", "", "", {"method": "zero3", "tp": 2}),
        ("data_parallel_degree = 1\ntensor_parallel_degree = 8", "", "", {"method": "tensor", "tp": 8}),
        (
            "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4",
            "",
            "fused = true",
            {"method": "hsdp", "dp_shard": 4},
        ),
        ("data_parallel_shard_degree = 1", "context_parallel_degree = 8", "", {"method": "zero3", "cp": 8}),
        (
            "data_parallel_shard_degree = -1",
            "pipeline_parallel_degree = 4\npipeline_parallel_schedule = '1f1b'",
            "",
            {"method": "zero2", "pp": 4, "micro_batches": 4},
        ),
        (
            "tensor_parallel_degree = 1",
            "pipeline_parallel_degree = 4\npipeline_parallel_microbatches = 2\npipeline_parallel_schedule = 'gpipe'",
            "",
            {"pp": 4, "micro_batches": 2},
        ),
        ("tensor_parallel_degree = 1", "pipeline_parallel_degree = 1\npipeline_parallel_microbatches = 2", "", {}),
    ],
)
def test_torchtitan_before_its_table_of_parallelism(tmp_path, degrees, experimental, fused, plan):
    text = OLD_TITAN.format(degrees=degrees, experimental=experimental, fused=fused)
    tables, _ = imported(tmp_path, text, name="t.toml")
    assert {key: tables["plan"].get(key) for key in plan} == plan
    assert tables["workload"]["optimizer_implementation"] == ("fused" if fused else "foreach")
    assert tables["plan"].get("loss_parallel") == (True if plan.get("tp") else None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("compile = false", "compile = true"), "training.compile"),
        (('fp8_linear = ""', 'fp8_linear = "dynamic"'), "training.fp8_linear"),
        (("[experimental]", "[float8]\nenable_float8_linear = true\n[experimental]"), "float8.enable_float8_linear"),
        (("[experimental]", "[experimental]\npipeline_parallel_split_points = ['layers.4']"), "plan.stages"),
        (("[experimental]", "[experimental]\nexpert_parallel_degree = 2"), "experimental.expert_parallel_degree"),
        (("[experimental]", "[parallelism]\ntensor_parallel_degree = 2\n[experimental]"), "training.tensor_parallel"),
    ],
)
def test_older_torchtitan_drops_nothing(tmp_path, change, said):
    text = OLD_TITAN.format(degrees="tensor_parallel_degree = 1", experimental="", fused="")
    assert said in refused(tmp_path, text.replace(*change), name="t.toml")


@pytest.mark.parametrize(
    ("model", "said", "divided"),
    [
        ("llama3-8b", "", (True, True)),
        ("llama3-8b", "disable_loss_parallel = true", (True, None)),
        ("gpt3-1.3b", "", (True, True)),
        ("gpt3-1.3b", "disable_loss_parallel = true", (None, None)),  # its head has the embedding's weight
    ],
)
def test_torchtitans_divided_vocabulary(tmp_path, model, said, divided):
    text = TITAN.format(batch=16, replicate=1, shard=-1, reshard="default", mode="full").replace("8192", "2048")
    text = text.replace("[parallelism]", f"[parallelism]\ntensor_parallel_degree = 2\n{said}")
    tables, found = imported(tmp_path, text, name="t.toml", model=model, ignored=["model.*"])
    assert (tables["plan"].get("embedding_parallel"), tables["plan"].get("loss_parallel")) == divided
    assert any("the token embedding of tensor-parallel ranks is whole" in line for line in found.listed) == (
        divided == (None, None)
    )


def test_torchtitan_selects_by_operation_or_by_layer(tmp_path):
    text = TITAN.format(batch=-1, replicate=1, shard=-1, reshard="default", mode="selective")
    tables, _ = imported(tmp_path, f'{text}selective_ac_option = "op"', name="t.toml")
    assert (tables["plan"]["recompute"], tables["workload"]["global_batch_size"]) == ("every-second-product", 8)
    for by_layer in (text, f'{text}selective_ac_option = "2"'):
        said = refused(tmp_path, by_layer, name="t.toml")
        assert "every second layer" in said
        assert "--set plan.recompute" in said
    tables, _ = imported(tmp_path, text, name="t.toml", overrides=["plan.recompute=selective"])
    assert tables["plan"]["recompute"] == "selective"


def test_what_torchtitan_recomputes_in_compiled_blocks_is_the_compiled_models(tmp_path):
    text = TITAN.format(batch=-1, replicate=1, shard=-1, reshard="default", mode="selective")
    text = f'{text}selective_ac_option = "op"\n[compile]\nenable = true\n'
    tables, _ = imported(tmp_path, text, name="t.toml", model="llama3-8b-compiled-every-second-product")
    assert tables["plan"]["recompute"] == "none"
    for other in ("llama3-8b-compiled", "llama3-8b-compiled-selective"):
        said = refused(tmp_path, text, name="t.toml", model=other)
        assert "--compile --recompute every-second-product" in said
    tables, found = imported(tmp_path, text.replace("selective", "full"), name="t.toml", model="llama3-8b-compiled")
    assert tables["plan"]["recompute"] == "full"
    assert any("whole graphs are recomputed" in line for line in found.listed)


@pytest.mark.parametrize(
    ("checkpointing", "recompute"),
    [
        (None, "none"),
        ({"preserve_rng_state": True}, "full"),
        ({"force_recompute_mm_shapes_by_fqns": []}, "every-second-product"),
        ({"memory_budget": 0.5}, None),
    ],
)
def test_torchtitan_saved_json(tmp_path, checkpointing, recompute):
    training = {"num_tokens_per_microbatch_per_dp_rank": 16384, "num_tokens_per_train_step": 262144}
    saved = {
        "training": training | {"max_context_length": 8192, "mixed_precision_param": "bfloat16"},
        "parallelism": {"data_parallel_shard_degree": -1, "num_pp_microbatches": 1},
        "activation_checkpoint": checkpointing,
        "compile": {"enable": False, "backend": "inductor"},
    }
    if recompute is None:
        assert "memory_budget" in refused(tmp_path, saved, name="t.json")
        return
    tables, _ = imported(tmp_path, saved, name="t.json")
    assert tables["workload"]["global_batch_size"] == 32
    assert (tables["plan"]["micro_batches"], tables["plan"]["recompute"]) == (2, recompute)


COMPILED_TITAN = {"enable": True, "backend": "inductor", "components": ["model", "loss"]}


def test_torchtitan_compiled_blocks_take_a_compiled_model(tmp_path):
    saved = {"training": {"seq_len": 8192}, "activation_checkpoint": {"mode": "none"}, "compile": COMPILED_TITAN}
    tables, found = imported(tmp_path, saved, name="t.json", model="llama3-8b-compiled")
    assert tables["plan"]["method"] == "zero3"
    assert any("loss is not compiled" in each for each in found.listed)
    said = refused(tmp_path, saved, name="t.json")
    assert "compile.enable = true" in said
    assert "'llama3-8b-compiled'" in said
    assert "gsreal trace MODEL_FILE --compile" in said
    divided = refused(
        tmp_path, saved | {"parallelism": {"tensor_parallel_degree": 2}}, name="t.json", model="llama3-8b"
    )
    assert "compiled blocks that ranks divide (parallelism.tensor_parallel_degree = 2)" in divided
    assert "--ignore" in divided
    alone = saved | {"compile": COMPILED_TITAN | {"components": ["loss"]}}
    imported(tmp_path, alone, name="t.json")
    other = saved | {"compile": COMPILED_TITAN | {"backend": "aot_eager"}}
    assert "compile.backend" in refused(tmp_path, other, name="t.json", model="llama3-8b-compiled")
    off = saved | {"compile": {"enable": False}}
    assert "are compiled" in refused(tmp_path, off, name="t.json", model="llama3-8b-compiled")


TITAN_EXPERTS = """
[training]
local_batch_size = 2
seq_len = 4096
[activation_checkpoint]
mode = "none"
[parallelism]
tensor_parallel_degree = 2
expert_parallel_degree = 4
"""


@pytest.mark.parametrize("said", ["", "expert_tensor_parallel_degree = 1\n"])
def test_torchtitans_experts_are_divided_among_tensor_ranks_too(tmp_path, said):
    tables, found = imported(tmp_path, TITAN_EXPERTS + said, name="t.toml", model="qwen3-30b-a3b")
    plan = {"method": "zero3", "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "loss_parallel": True}
    assert plan.items() <= tables["plan"].items()
    assert "approximated: it gathers the tokens of tensor ranks for a router" in found.text
    other = TITAN_EXPERTS + "expert_tensor_parallel_degree = 2\n"
    assert "experts that tensor ranks cut too" in refused(tmp_path, other, name="t.toml", model="qwen3-30b-a3b")


def test_a_diffusion_model_is_refused_by_its_name(tmp_path):
    """FLUX was a Llama, unless the file gave the size of its images."""
    text = "[model]\nname = 'flux'\nflavor = 'flux-dev'\n[training]\nlocal_batch_size = 4\n[parallelism]\n"
    assert 'model.name = "flux": diffusion models' in refused(tmp_path, text, name="x.toml")
