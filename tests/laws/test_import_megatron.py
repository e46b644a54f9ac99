"""Import of the arguments of Megatron-LM and Megatron-DeepSpeed: what each becomes, and what is refused."""

import json
import re
import tomllib

import pytest
from importing import MEGATRON, ROOT, imported, refused

from gssim.errors import UserError
from gssim.interop import import_scenario
from gssim.interop.arguments import arguments_in
from gssim.scenario import load_scenario
from gssim.simulation import simulate

pytestmark = pytest.mark.usefixtures("in_the_repository")


def test_swifts_command_is_no_training_by_megatrons_defaults(tmp_path):
    """It was read with Megatron-LM's: in fp32, with whole optimizer states on every rank."""
    text = (
        "NPROC_PER_NODE=8 \\\nmegatron sft \\\n  --load mcore --micro_batch_size 1 --global_batch_size 16 --lr 1e-5\n"
    )
    with pytest.raises(UserError, match=r"runs ms-swift's `megatron sft`, whose options have other defaults"):
        imported(tmp_path, text, name="a.sh")


@pytest.mark.parametrize(("more", "size"), [("", "1.00 GiB"), (" --context-parallel-size 2", "512.00 MiB")])
def test_large_masks_that_megatrons_loader_makes_are_noted(tmp_path, more, size):
    """pretrain_gpt.py, get_batch: a byte for each pair of positions, unless the loader is told not to make them."""
    text = f"torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 32768 --bf16{more}\n"
    _, found = imported(tmp_path, text, name="a.sh", model="llama3.1-8b")
    noted = [line for line in found.listed if "dataloader is not given" in line]
    assert [f"approximated: a mask of {size}, " in line for line in noted] == [True]
    for other in ("--no-create-attention-mask-in-dataloader --bf16", "--bf16 --seq-length 8192"):
        text = f"torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 {other}{more}"
        text += "" if "seq" in other else " --seq-length 32768"
        _, found = imported(tmp_path, text + "\n", name="a.sh", model="llama3.1-8b")
        assert not any("dataloader is not given" in line for line in found.listed)


def test_deepeps_buffers_are_noted_as_not_counted(tmp_path):
    text = (
        "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 1024 --bf16 --num-experts 8 "
    )
    text += "--moe-router-topk 2 --expert-model-parallel-size 8 --moe-token-dispatcher-type flex --moe-enable-deepep\n"
    _, found = imported(tmp_path, text, name="a.sh", model="mixtral-8x7b")
    (line,) = [line for line in found.listed if line.startswith("moe-enable-deepep")]
    assert "approximated: DeepEP's kernels send and permute in one, and keep buffers outside the allocator" in line


def test_megatron_script(tmp_path):
    tables, found = imported(tmp_path, MEGATRON, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"] == {
        "method": "zero1",
        "zero1_implementation": "megatron",
        "micro_batches": 4,
        "recompute": "full",
        "bucket_bytes": 80_000_000,
    }
    assert tables["workload"]["gradient_precision"] == tables["workload"]["reduce_precision"] == "fp32"
    assert tables["workload"]["learning_rate"] == 1.5e-4
    assert not found.defaults


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--use-distributed-optimizer --overlap-grad-reduce", 2 * 40_000_000),
        ("--overlap-grad-reduce --ddp-bucket-size 1000000", 2 * 1_000_000),
        ("--overlap-grad-reduce --ddp-num-buckets 8", 2 * (1_315_723_264 // 8)),
        ("--use-distributed-optimizer", "1024 TiB"),
        ("", "1024 TiB"),
    ],
)
def test_megatrons_buckets_are_of_so_many_parameters_and_one_without_overlap(tmp_path, words, expected):
    text = MEGATRON.replace("--use-distributed-optimizer --overlap-grad-reduce", words)
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["bucket_bytes"] == expected
    assert ("overlap" in tables["plan"]) == (expected == "1024 TiB")
    many = text.replace("--nnodes 1", "--nnodes 8").replace("size 64", "size 128")
    tables, _ = imported(
        tmp_path, many, name="train.sh", model="gpt3-1.3b", cluster="scenarios/clusters/dgx-a100-128.toml"
    )
    assert tables["plan"]["bucket_bytes"] == (2 * 64_000_000 if expected == 2 * 40_000_000 else expected)


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("", True),
        ("--pipeline-model-parallel-size 2", True),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", True),
        ("--optimizer muon", "approximated: beside Muon"),
    ],
)
def test_megatron_gathers_parameters_beside_the_next_forward(tmp_path, words, beside):
    text = f"{MEGATRON.rstrip()} --overlap-param-gather {words}"
    tables, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"].get("publish") == ({"overlap": True} if beside is True else None)
    for override in ("plan.overlap=false", "plan.zero1_implementation=torch", "plan.method=ddp"):  # take it along
        other, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b", overrides=[override])
        assert "publish" not in other["plan"]
    said = [line for line in found.listed if line.startswith("overlap-param-gather")]
    assert len(said) == (beside is not True)
    assert all(str(beside) in line for line in said)


def test_gathers_that_megatron_does_not_align_are_listed_as_an_approximation(tmp_path):
    words = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --no-align-param-gather"
    text = f"{MEGATRON.rstrip()} --overlap-param-gather {words}"
    tables, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["publish"] == {"overlap": True}
    (said,) = [line for line in found.listed if line.startswith("no-align-param-gather")]
    assert "begin on all ranks at once" in said


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ("--optimizer muon --use-distributed-optimizer --muon-momentum 0.95", {"zero1_implementation": "megatron"}),
        ("--optimizer dist_muon --muon-momentum 0.95", {"zero1_implementation": "megatron"}),
        ("--optimizer muon --muon-momentum 0.95", None),
    ],
)
def test_megatrons_muon_is_read_with_the_plan_of_its_layer_wise_optimizer(tmp_path, words, plan):
    text = MEGATRON.replace("--use-distributed-optimizer", words)
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert (tables["workload"]["optimizer"], tables["workload"]["momentum"]) == ("muon", 0.95)
    assert tables["plan"]["method"] == ("ddp" if plan is None else "zero1")
    assert tables["plan"].get("zero1_implementation") == (plan or {}).get("zero1_implementation")


def test_megatron_yaml_is_the_script(tmp_path):
    arguments = {f"--{key}": value for key, value in arguments_in(MEGATRON, file="x").items()}
    table = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in arguments.items())
    by_yaml, _ = imported(tmp_path, f"ENV_VARS:\n  A: 1\nMODEL_ARGS:\n{table}", name="m.yaml", model="gpt3-1.3b")
    by_script, _ = imported(tmp_path, MEGATRON, name="train.sh", model="gpt3-1.3b")
    assert by_yaml == by_script


def test_megatron_pipelines_of_few_micro_batches_are_gpipe(tmp_path):
    """Its 1f1b then runs all forwards first, for which the schedule is named gpipe here."""
    sizes = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --pipeline-model-parallel-size 3 --nproc-per-node 3"
    for batch, schedule in ((2, "gpipe"), (3, "1f1b")):
        text = f"{sizes} --global-batch-size {batch}"
        tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
        assert tables["plan"]["schedule"] == schedule


def test_megatron_pipelines_have_equal_stages(tmp_path):
    sizes = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 --clip-grad 0"
    text = f"{sizes} --nproc-per-node 4 --pipeline-model-parallel-size 2"
    tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
    # the embedding before six blocks, a norm and a head behind
    assert tables["plan"]["stages"] == [4, 5]
    assert (tables["plan"]["method"], tables["plan"]["schedule"]) == ("ddp", "1f1b")
    assert tables["plan"]["receive_buffers"] == "in-flight"
    more = f"{text} --num-layers-per-virtual-pipeline-stage 1"
    tables, _ = imported(tmp_path, more, name="args.txt", model="gpt-byte-10m")
    assert (tables["plan"]["stages"], tables["plan"]["schedule"]) == ([2, 1, 1, 1, 1, 3], "interleaved")
    last = f"{text} --decoder-last-pipeline-num-layers 2"
    tables, _ = imported(tmp_path, last, name="args.txt", model="gpt-byte-10m")
    assert tables["plan"]["stages"] == [5, 4]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*2|ttt,tL", [3, 6]),  # before six blocks the embedding, behind them a norm and a head
        ("E|t*6L", [1, 8]),
        ("Et|(t|)*4tL", [2, 1, 1, 1, 1, 3]),
        ("Et*5|t|L", None),  # three stages on two ranks
        ("Et*7|L", None),
        ("Et*3|t*3mL", None),
        ("Et*6||L|", None),
        ("E(t*9999)*9999|L", None),
    ],
)
def test_megatrons_stages_by_letters(tmp_path, layout, stages):
    text = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 --nproc-per-node 2 "
    text += f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '{layout}'"
    if stages is None:
        assert "pipeline-model-parallel-layout" in refused(tmp_path, text, name="args.txt", model="gpt-byte-10m")
        return
    tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
    schedule = "interleaved" if len(stages) > 2 else "1f1b"
    assert (tables["plan"]["stages"], tables["plan"]["schedule"]) == (stages, schedule)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--fsdp-double-buffer", "keeps two buffers of gathered parameters and gradients all the time"),
        ("--use-nccl-ub", "buffers that are registered with NCCL take fewer of the GPU's multiprocessors"),
    ],
)
def test_megatron_names_what_permanent_and_registered_buffers_change(tmp_path, word, said):
    _, found = imported(tmp_path, f"{MEGATRON.rstrip()} {word}", name="train.sh", model="gpt3-1.3b")
    (line,) = [each for each in found.listed if word.removeprefix("--") in each]
    assert said in line


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--num-layers 32", "is given twice"),
        ("--context-parallel-size 3", "context ranks are"),
        ("--num-experts 8", "has no routed experts"),
        ("--num-moe-experts 8", "has no routed experts"),
        ("--activations-checkpoint-method block", "only the first layers"),
        ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2", "units of several layers"),
        ("--activations-checkpoint-granularity full", "recomputation that is not known"),
        ("--moe-expert-capacity-factor 1.5", "a capacity, which drop tokens"),
        ("--moe-expert-rank-capacity-factor 1.5", "a capacity, which drop tokens"),
        ("--moe-dispatch-fwd-dtype fp8", "rows of experts in 8 bits"),
        ("--moe-latent-size 512", "another width"),
        ("--moe-paged-stash", "in pages"),
        ("--expert-tensor-parallel-num-weight-shards 2", "sharded further"),
        ("--fp32-residual-connection", "residuals and messages"),
        ("--optimizer muon --muon-num-ns-steps 6", "other numbers of Muon"),
        ("--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", "stages on ranks side by side"),
        ("--untie-embeddings-and-output-weights", "has the token embedding's weight"),
        ("--context-parallel-size 2 --cp-comm-type allgather", "allowed: p2p, a2a"),
        ("--tensor-model-parallel-size $TENSOR", "does not say what this variable is"),
        ("--tensor-model-parallel-size 3", "does not divide 8 ranks"),
        ("--recompute-activations --recompute-modules core_attn", "selective"),
        ("--fp8-format hybrid", "fp8"),
        ("--tensor-modle-parallel-size 2", "unknown key"),
    ],
)
def test_megatron_refusals(tmp_path, argument, said):
    text = MEGATRON.replace("--recompute-granularity full", "") if "activations" in argument else MEGATRON
    with pytest.raises(UserError, match=said):
        imported(tmp_path, f"{text.rstrip()} {argument}", name="train.sh", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("kind", "exchange"), [("p2p", "ring"), ("a2a", None), ("all_gather", "gather"), (None, "ring")]
)
def test_megatron_says_how_sequences_are_exchanged(tmp_path, kind, exchange):
    said = "--context-parallel-size 2" + (f" --cp-comm-type {kind}" if kind else "")
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["cp"] == 2
    assert tables["plan"].get("context_exchange") == exchange


@pytest.mark.parametrize("stages", [1, 2])
def test_megatron_divides_sequences_beside_blocks_and_stages(tmp_path, stages):
    """Its ranks are in the order of the mesh's axes: tp within cp within dp within pp."""
    said = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    said += f" --pipeline-model-parallel-size {stages}" if stages > 1 else ""
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    plan = {"method": "zero1", "cp": 2, "tp": 2, "sequence_parallel": True, "context_exchange": "ring"}
    assert plan.items() <= tables["plan"].items()
    mesh = load_scenario(tmp_path / "s.toml", tables=tables).scenario.policies.mesh
    assert mesh.sizes == (stages, 2 // stages, 1, 2, 2)


def test_the_switch_of_recomputation_up_to_megatron_3_0_is_read(tmp_path):
    """It was taken for a key of checkpoints on disks, and nothing was recomputed."""
    text = MEGATRON.replace("--recompute-granularity full", "--activations-checkpoint-method uniform")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["recompute"] == "full"


@pytest.mark.parametrize(
    ("model", "sizes", "said"),
    [
        ("llama2-7b", "--untie-embeddings-and-output-weights --swiglu", "ffn-hidden-size is not given: 10880"),
        ("llama2-7b", "--ffn-hidden-size 11008", "untie-embeddings-and-output-weights is not given"),
        ("llama3-8b", "--ffn-hidden-size 14336", "group-query-attention is not given: 32"),
        ("llama3-8b", "--ffn-hidden-size 14336 --group-query-attention", "num-query-groups is not given: 1"),
        ("llama3-8b", "--ffn-hidden-size 14336 --num-key-value-heads 8", ""),
    ],
)
def test_sizes_that_megatron_derives_must_be_the_models(tmp_path, model, sizes, said):
    untied = " --untie-embeddings-and-output-weights" * ("embeddings" not in f"{sizes} {said}")
    text = f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 1 {sizes}{untied}"
    if said:
        assert said in refused(tmp_path, text, name="args.txt", model=model)
    else:
        imported(tmp_path, text, name="args.txt", model=model)


def test_a_schedule_of_batches_counts_at_its_end(tmp_path):
    batch = re.search(r"--global-batch-size (\d+)", MEGATRON).group(1)
    text = f"{MEGATRON.rstrip()} --step-batch-size-schedule '0:16 2.4B:32 4.8B:{batch}'"
    tables, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["workload"]["global_batch_size"] == int(batch)
    assert any("schedule's end" in line for line in found.listed)
    alone, _ = imported(tmp_path, text.replace(f"--global-batch-size {batch}", ""), name="train.sh", model="gpt3-1.3b")
    assert alone["workload"]["global_batch_size"] == int(batch)
    other = text.replace(f"4.8B:{batch}", "4.8B:17")
    assert "must end at --global-batch-size" in refused(tmp_path, other, name="train.sh", model="gpt3-1.3b")


ENGINE = """
CONFIG=ds_config.$SLURM_JOBID.json
STAGE=1
LAYERS=24
cat <<EOT > $CONFIG
{{"train_micro_batch_size_per_gpu": 2, "train_batch_size": {batch}, "gradient_clipping": 1.0,
  "zero_optimization": {{"stage": $STAGE}}, "fp16": {{"enabled": true, "loss_scale": 0, "hysteresis": 2}}}}
EOT
srun --jobid $SLURM_JOBID bash -c "python -m torch.distributed.run --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py \
    --num-layers $LAYERS --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 \
    --global-batch-size 64 --rampup-batch-size 16 16 1000 --train-samples 1000 --fp16 --loss-scale 12 \
    --checkpoint-activations --deepspeed-activation-checkpointing --partition-activations {more} \
    --deepspeed --deepspeed_config $CONFIG --zero-stage $STAGE --kill-switch-path /tmp/kill"
"""


def test_megatron_deepspeed(tmp_path):
    text = ENGINE.format(batch=64, more="")
    assert "partition-activations" in refused(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    text = text.replace("--partition-activations", "")
    tables, found = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    assert tables["plan"] == {
        "method": "zero1",
        "zero1_implementation": "deepspeed",
        "bucket_bytes": 10**9,
        "micro_batches": 4,
        "recompute": "full",
        "overlap": False,
    }
    workload = tables["workload"]
    assert (workload["precision"], workload["loss_scale"], workload["clip_norm"]) == ("fp16", "dynamic", 1.0)
    assert any("behind the ramp" in line for line in found.listed)
    assert any(line.startswith("nnodes = $NODES: left open") for line in found.listed)


def test_deepspeeds_pipelines_reduce_gradients_after_all_else(tmp_path):
    more = "--pipeline-model-parallel-size 2"
    text = ENGINE.format(batch=64, more=more).replace("--partition-activations", "")
    text = text.replace('{"stage": $STAGE}', '{"stage": 1, "overlap_comm": true}')
    tables, found = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    assert (tables["plan"]["method"], tables["plan"]["overlap"]) == ("zero1", False)
    assert tables["plan"]["bucket_bytes"] == 10**9  # of reduce_bucket_size, 5e8 elements if it is not given
    assert not any("5e8 elements at a time" in line for line in found.listed)


@pytest.mark.parametrize(("words", "method"), [("", "zero1"), ("--no-pipeline-parallel", "ddp")])
@pytest.mark.parametrize("stages", [1, 2])
def test_deepspeeds_pipelines_in_bf16_divide_the_optimizers_state_without_zero(tmp_path, stages, words, method):
    """Its BF16_Optimizer does; Megatron-DeepSpeed makes a pipeline of one stage too, unless told otherwise."""
    more = f"--pipeline-model-parallel-size {stages} {words}"
    text = ENGINE.format(batch=64, more=more).replace("--partition-activations", "").replace("STAGE=1", "STAGE=0")
    text = text.replace('"fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2}', '"bf16": {"enabled": true}')
    text = text.replace("--fp16 --loss-scale 12", "--bf16")
    tables, _ = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    expected = method if stages == 1 else "zero1"
    assert tables["plan"]["method"] == expected
    assert tables["plan"].get("zero1_implementation") == ("deepspeed" if expected == "zero1" else None)
    kept = [tables["workload"].get(f"{name}_precision") for name in ("gradient", "reduce")]
    assert kept == (["fp32", "fp32"] if stages == 2 else [None, None])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--zero-stage $STAGE", "--zero-stage 2"), 'zero-stage = "2": contradicts zero_optimization.stage = 1'),
        (("--fp16", "--bf16"), "fp16 in DeepSpeed's configuration contradicts bf16"),
        (('64, "gradient', '32, "gradient'), "32 in DeepSpeed's configuration contradicts global-batch-size"),
        (("--deepspeed_config $CONFIG", "--deepspeed_config lost.json"), "no such file"),
        (("--seq-length", "--num-experts 4 --seq-length"), "DeepSpeed's mixtures of experts"),
        (("--checkpoint-activations", "--checkpoint-activations --checkpoint-num-layers 2"), "units of several layers"),
    ],
)
def test_megatron_deepspeed_contradictions(tmp_path, change, said):
    text = ENGINE.format(batch=64, more="").replace("--partition-activations", "")
    assert change[0] in text
    assert said in refused(tmp_path, text.replace(*change), name="job.slurm", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("override", "plan"),
    [
        ("plan.sequence_parallel=false", {"sequence_parallel": False, "zero1_implementation": "megatron"}),
        ("plan.gathered_inputs=kept", {"sequence_parallel": True, "gathered_inputs": "kept"}),
        ("plan.method=zero3", {"method": "zero3", "sequence_parallel": True}),
        ("workload.precision=fp32", {"bucket_bytes": 4 * 40_000_000}),
    ],
)
def test_what_is_set_takes_along_what_megatrons_job_said_with_it(tmp_path, override, plan):
    more = "--tensor-model-parallel-size 2 --sequence-parallel --log-interval"
    text = MEGATRON.replace("--log-interval", more).replace("--bf16", "--bf16 --grad-reduce-in-bf16")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b", overrides=[override])
    assert tables["plan"].items() >= plan.items()
    assert ("gathered_inputs" in tables["plan"]) == tables["plan"]["sequence_parallel"]
    assert ("zero1_implementation" in tables["plan"]) == (tables["plan"]["method"] == "zero1")


@pytest.mark.parametrize(
    ("said", "overrides", "beside"),
    [
        ("", [], True),
        ("--no-async-tensor-model-parallel-allreduce", [], False),
        ("--sequence-parallel", [], False),  # what it hides, it loses to slower products
        ("--sequence-parallel", ["plan.sequence_parallel=false"], True),
    ],
)
def test_megatron_sums_gradients_of_inputs_beside_products(tmp_path, said, overrides, beside):
    text = MEGATRON.replace("--log-interval", f"--tensor-model-parallel-size 2 {said} --log-interval")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b", overrides=overrides)
    assert tables["plan"].get("async_input_gradients", False) is beside


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [("llama2-7b", "", True), ("llama2-7b", "--sequence-parallel", False), ("gpt3-1.3b", "", False)],
)
def test_megatrons_fused_maps_are_approximated_by_separate_ones_and_it_says_so(tmp_path, model, more, says):
    """Llama's five maps with a common input make five all-reduces a block in the backward; Megatron-LM has two."""
    text = MEGATRON.replace("--log-interval", f"--tensor-model-parallel-size 2 {more} --log-interval")
    if model == "llama2-7b":
        llama = {"num-layers 24": "num-layers 32", "hidden-size 2048": "hidden-size 4096", "heads 16": "heads 32"}
        for before, after in llama.items():
            text = text.replace(before, after)
        text = text.replace("--log-interval", "--swiglu --untie-embeddings-and-output-weights --log-interval")
        text = text.replace("--swiglu", "--swiglu --ffn-hidden-size 11008")
    _, found = imported(tmp_path, text, name="train.sh", model=model)
    assert any("5 sums of input gradients a block" in line for line in found.listed) is says


def test_deepspeeds_zero1_beside_megatrons_sequence_parallelism_is_approximated_and_says_so(tmp_path):
    more = "--tensor-model-parallel-size 2 --sequence-parallel"
    text = ENGINE.format(batch=64, more=more).replace("--partition-activations", "")
    tables, found = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    plan = tables["plan"]
    assert (plan["method"], plan["tp"], plan["sequence_parallel"]) == ("zero1", 2, True)
    assert "zero1_implementation" not in plan
    assert any("broadcasts of parameters, not gathers" in line for line in found.listed)


def test_megatron_deepspeeds_sequence_parallelism_is_ulysses(tmp_path):
    text = ENGINE.format(batch=64, more="--ds-sequence-parallel-size 2").replace("--partition-activations", "")
    tables, _ = imported(tmp_path, text, name="job.slurm", model="gpt3-1.3b")
    assert (tables["plan"]["cp"], tables["plan"].get("context_exchange")) == (2, None)
    assert tables["plan"]["micro_batches"] == 8


@pytest.mark.parametrize(
    "more",
    [
        "--pp-partition-method 'type:transformer|embedding'",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ],
)
def test_stages_that_count_embedding_and_loss(tmp_path, more):
    sizes = "--num-layers 6 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 --clip-grad 0"
    text = f"{sizes} --nproc-per-node 4 --pipeline-model-parallel-size 4 {more}"
    tables, _ = imported(tmp_path, text, name="args.txt", model="gpt-byte-10m")
    assert tables["plan"]["stages"] == [2, 2, 2, 3]
    uneven = text.replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 3 --nproc-per-node 3")
    assert "does not divide so" in refused(tmp_path, uneven, name="args.txt", model="gpt-byte-10m")


def test_neutral_numbers_of_scripts_are_texts(tmp_path):
    said = "--expert-tensor-parallel-size 1 --num-distributed-optimizer-instances 1 --moe-layer-freq 1"
    said += " --moe-token-drop-policy probs --muon-num-ns-steps 5 --moe-router-dtype fp32"
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["method"] == "zero1"
    other = f"{MEGATRON.rstrip()} --num-distributed-optimizer-instances 2"
    assert "beside the distributed one" in refused(tmp_path, other, name="train.sh", model="gpt3-1.3b")


@pytest.mark.parametrize(("dtype", "reduced"), [("bf16", None), ("fp32", "fp32"), ("auto", "fp32")])
def test_megatron_fsdp_says_in_what_gradients_are_reduced(tmp_path, dtype, reduced):
    said = f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --megatron-fsdp-grad-comm-dtype {dtype}"
    tables, _ = imported(tmp_path, f"{MEGATRON.rstrip()} {said}", name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["method"] == "zero2"
    assert tables["workload"].get("reduce_precision") in (reduced, "bf16" if reduced is None else reduced)
    text = f"{MEGATRON.rstrip()} --use-megatron-fsdp"
    _, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    said = [line for line in found.listed if line.startswith("use-megatron-fsdp")]
    assert all(any(each in line for line in said) for each in ("earlier releases take no_shard", "up to 0.18"))


def test_megatrons_torch_fsdp2_reduces_gradients_in_the_precision_of_the_parameters(tmp_path):
    """It passes no MixedPrecisionPolicy to fully_shard (core/distributed/torch_fully_sharded_data_parallel.py)."""
    text = MEGATRON.replace("--use-distributed-optimizer", "--use-torch-fsdp2")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["method"] == "zero3"
    assert not {"reduce_precision", "gradient_precision"} & tables["workload"].keys()


def test_megatrons_offloaded_optimizer(tmp_path):
    said = f"{MEGATRON.rstrip()} --optimizer-cpu-offload"
    tables, _ = imported(tmp_path, f"{said} --optimizer-offload-fraction 1.0", name="train.sh", model="gpt3-1.3b")
    assert (tables["plan"]["method"], tables["plan"]["offload"]) == ("zero1", "optimizer")
    half = f"{said} --optimizer-offload-fraction 0.5"
    assert "a part of the optimizer" in refused(tmp_path, half, name="train.sh", model="gpt3-1.3b")


def test_sizes_of_another_model_are_refused(tmp_path):
    assert "the model 'llama3-8b' has width = 4096" in refused(tmp_path, MEGATRON, name="train.sh")


def test_a_megatron_job_in_three_dimensions_is_imported_and_predicted(tmp_path):
    """Tensor with sequence parallelism, stages that share an embedding, the distributed optimizer: what people run."""
    words = """pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 --lr 1.5e-4
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --tp-comm-overlap"""
    path = tmp_path / "job.sh"
    path.write_text(f"torchrun {' '.join(words.split())}\n")
    found = import_scenario(
        path,
        model="gpt3-1.3b",
        cluster=ROOT / "scenarios/clusters/two-dgx-h100.toml",
        overrides=[],
        out=tmp_path / "job.toml",
    )
    plan = tomllib.loads(found.text)["plan"]
    assert plan["method"] == "zero1"
    assert [plan[key] for key in ("tp", "pp", "micro_batches", "sequence_parallel")] == [2, 2, 8, True]
    assert (plan["zero1_implementation"], plan["gathered_inputs"]) == ("megatron", "gathered-again")
    assert plan["tp_overlap"] is True
    assert tomllib.loads(found.text)["workload"]["clip_norm"] == 1.0
    (tmp_path / "job.toml").write_text(found.text)
    result = simulate(load_scenario(tmp_path / "job.toml", ["plan.micro_batches=2"])).result
    kinds = {entry.kind for entry in result.collectives}
    assert {"all-gather", "reduce-scatter", "all-reduce", "send"} <= kinds


MEGATRON_EXPERTS = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --num-experts 8 --moe-router-topk 2 --seq-length 4096 --micro-batch-size 1 "
    "--global-batch-size 16 --nproc-per-node 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
    "--sequence-parallel --bf16 --use-distributed-optimizer --moe-token-dispatcher-type alltoall "
    "--untie-embeddings-and-output-weights"
)


def test_megatrons_experts_are_divided_among_tensor_ranks_too(tmp_path):
    given = {"name": "args.txt", "model": "mixtral-8x7b"}
    tables, _ = imported(tmp_path, f"{MEGATRON_EXPERTS} --expert-tensor-parallel-size 1", **given)
    plan = {"method": "zero1", "zero1_implementation": "megatron", "tp": 2, "ep": 4, "etp": 1}
    assert (plan | {"gathered_inputs": "gathered-again"}).items() <= tables["plan"].items()
    assert "expert-tensor-parallel-size, by default as many" in refused(tmp_path, MEGATRON_EXPERTS, **given)
    other = f"{MEGATRON_EXPERTS} --expert-tensor-parallel-size 2"
    assert "experts that tensor ranks cut too" in refused(tmp_path, other, **given)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_megatrons_experts_beside_whole_optimizers_have_gradients_that_are_summed_in_fp32(tmp_path, tensor_ranks):
    """Its DistributedDataParallel alone: bf16 parameters, and by default gradients kept and all-reduced in fp32."""
    text = MEGATRON_EXPERTS.replace("--use-distributed-optimizer ", "")
    text = text.replace("--tensor-model-parallel-size 2", f"--tensor-model-parallel-size {tensor_ranks}")
    text += " --expert-tensor-parallel-size 1" if tensor_ranks > 1 else ""
    tables, found = imported(tmp_path, text, name="args.txt", model="mixtral-8x7b")
    assert {"method": "ddp", "ep": 4}.items() <= tables["plan"].items()
    assert tables["workload"]["gradient_precision"] == tables["workload"]["reduce_precision"] == "fp32"
    (tmp_path / "job.toml").write_text(found.text)
    loaded = load_scenario(tmp_path / "job.toml", ["plan.micro_batches=1", "workload.global_batch_size=8"])
    of_experts = [
        entry.bytes
        for entry in simulate(loaded).result.collectives
        if entry.kind == "all-reduce" and entry.group in {(rank, rank + 4) for rank in range(4)}
    ]
    assert set(of_experts) == {2 * maps * 4096 * 14336 * 4 for maps in (1, 2)}  # of two experts, in fp32


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_sums_beside_products_are_read_for_every_backend(tmp_path, backend):
    """They run over gloo too; an import for such a cluster left them out without a word."""
    text = (ROOT / "scenarios/clusters/dgx-h100.toml").read_text()
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(text.replace('backend = "nccl"', f'backend = "{backend}"'))
    script = MEGATRON.replace("--lr 1.5e-4", "--lr 1.5e-4 --tensor-model-parallel-size 2")
    tables, _ = imported(tmp_path, script, name="train.sh", model="gpt3-1.3b", cluster=cluster)
    assert tables["plan"]["async_input_gradients"]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("--ffn-hidden-size 5504", "ffn-hidden-size = \"5504\": the model 'gpt3-1.3b' has perceptron = 8192"),
        ("--swiglu", "ffn-hidden-size is not given: 5440 with swiglu: the model 'gpt3-1.3b' has perceptron = 8192"),
        ("--num-key-value-heads 4", "the model 'gpt3-1.3b' has key-value heads = 16"),
        ("--group-query-attention --num-query-groups 8", "the model 'gpt3-1.3b' has key-value heads = 16"),
    ],
)
def test_sizes_of_a_gpt_are_those_of_the_file(tmp_path, sizes, said):
    """A Llama's perceptron and grouped heads were listed as without effect beside a GPT of the same width."""
    text = "torchrun pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 512 "
    text += "--micro-batch-size 1 --bf16 "
    tables, _ = imported(tmp_path, f"{text} --ffn-hidden-size 8192\n", name="a.sh", model="gpt3-1.3b")
    assert tables["workload"]["global_batch_size"] == 8
    assert said in refused(tmp_path, f"{text}{sizes}\n", name="a.sh", model="gpt3-1.3b")


def test_a_schedule_of_the_learning_rate_that_is_overridden_changes_no_step(tmp_path):
    text = "torchrun pretrain_gpt.py --micro-batch-size 1 --seq-length 512 --bf16 --override-lr-scheduler\n"
    _, found = imported(tmp_path, text, name="a.sh", model="gpt3-1.3b")
    assert any(line.startswith("override-lr-scheduler") for line in found.listed)


CORE = """
language_model:
  num_layers: 24
  hidden_size: 2048
  num_attention_heads: 16
  seq_length: 512
  num_query_groups: null
  activation_func: gelu
  hidden_dropout: {dropout}
  clone_scatter_output_in_embedding: True
  layernorm_zero_centered_gamma: False
  num_moe_experts: null
  moe_router_topk: 2
  perform_initialization: True
model_parallel:
  tensor_model_parallel_size: 1
  batch_p2p_comm: True
  cpu_offloading: {offloads}
  cpu_offloading_activations: True
  cpu_offloading_num_layers: 1
  barrier_with_L1_time: True
micro_batch_size: 1
global_batch_size: 8
bf16: True
"""


def test_megatrons_own_configuration_in_yaml_is_read(tmp_path):
    """It was refused by what is off there: offloading, and the experts of a token without experts."""
    tables, found = imported(
        tmp_path, CORE.format(offloads=False, dropout=0.1), name="x.yaml", model="gpt3-1.3b", form="megatron"
    )
    assert tables["workload"]["global_batch_size"] == 8
    assert any(line.startswith("hidden-dropout = 0.1: approximated: the masks") for line in found.listed)
    text = CORE.format(offloads=True, dropout=0.0)
    assert "cpu-offloading = true" in refused(tmp_path, text, name="x.yaml", model="gpt3-1.3b", form="megatron")
