"""Import of shell scripts: variables, conditions, included files, and standard input."""

import io
import json
import re
import tomllib
from pathlib import Path

import commands
import pytest
from importing import DEEPSPEED, EIGHT, FSDP, ROOT, imported, refused

from gssim.errors import UserError
from gssim.interop import import_scenario
from gssim.interop import reading as limits
from gssim.interop.arguments import arguments_in

pytestmark = pytest.mark.usefixtures("in_the_repository")


def test_a_flag_that_is_given_anyway_hangs_on_no_condition(tmp_path):
    """Scripts of Pai-Megatron-Patch: it was `given or not given, as it is given twice`."""
    text = "PR=$1\nif [ $PR = bf16 ]; then MORE=--bf16; fi\n"
    text += "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --seq-length 128 $MORE --bf16\n"
    tables, _ = imported(tmp_path, text, name="a.sh")
    assert tables["workload"]["precision"] == "bf16"


@pytest.mark.parametrize("program", ["tools/run_text_generation_server.py", "tools/checkpoint/convert.py"])
def test_a_program_that_trains_no_model_is_refused(tmp_path, program):
    """Scripts that serve a model were predicted as trainings of it."""
    arguments = "--micro-batch-size 1 --seq-length 128 --tensor-model-parallel-size 1 --num-layers 32 --bf16"
    with pytest.raises(UserError, match=rf"runs {program.rpartition('/')[2]}, which trains no model"):
        imported(tmp_path, f"torchrun --nproc_per_node 8 {program} {arguments}\n", name="a.sh")
    trains = f"torchrun {program} {arguments}\ntorchrun pretrain_gpt.py {arguments}\n"
    assert imported(tmp_path, trains, name="a.sh")[0]["workload"]["precision"] == "bf16"


def test_an_open_value_of_a_refused_key_is_said_in_a_sentence(tmp_path):
    text = "torchrun pretrain_gpt.py --micro-batch-size 1 --seq-length 128 --bf16 --out-seq-length $1\n"
    said = refused(tmp_path, text.replace("--out", "$MORE --out"), name="a.sh")
    assert "$MORE: the file does not say what this variable is, which may hold arguments" in said
    assert "out-seq-length = $1: generation cannot be simulated; the file does not say what this variable is" in said


def test_options_behind_a_chain_of_eight_conditions_are_read(tmp_path):
    """They were one key named after the variable: `$AC = not given or not given or ...`."""
    sizes = "".join(f"elif [ $SIZE = {n} ]; then N={n}\n" for n in range(1, 7))
    text = f"AC=''\nif [ $SIZE = 0 ]; then N=0\n{sizes}elif [ $SIZE = 7 ]; then\nAC='--recompute-activations'\nfi\n"
    text += "torchrun pretrain_gpt.py --micro-batch-size 1 --seq-length 128 --bf16 $AC\n"
    said = refused(tmp_path, text, name="a.sh")
    assert said.startswith("recompute-activations = ")
    assert "$AC" not in said


BRANCHES = """#!/bin/bash
usage() { echo "usage: $0 --tensor-model-parallel-size N  # of ranks"; exit 1; }
[ "$1" = "-h" ] && usage
SIZE=$1
TP=${TP:-2}
# --tensor-model-parallel-size 8
if [ $SIZE = 1.3B ]; then
    NUM_LAYERS=24; HIDDEN=2048
elif [ $SIZE = 6.7B ]; then
    NUM_LAYERS=32; HIDDEN=4096
fi
options="--bf16"
if [[ $FLASH == true ]]; then options="$options --use-flash-attn"; fi
if [ "${RECOMPUTE:-full}" = full ]; then
    options="$options --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
fi
case $SHARD in
    yes) options+=" --use-distributed-optimizer --overlap-grad-reduce" ;;
    *) ;;
esac
cat > notes.txt <<EOF
--micro-batch-size 16 is too large for $SIZE
EOF
nvidia-smi --query-gpu=name --format=csv
torchrun --nproc_per_node 8 --rdzv_backend c10d pretrain_gpt.py --num-layers $NUM_LAYERS --hidden-size $HIDDEN \\
    --num-attention-heads 16 --seq-length $((1024 * 2)) --micro-batch-size 2 --global-batch-size 64 \\
    --tensor-model-parallel-size $TP $options 2>&1 | tee log.txt
"""


def test_branches_of_a_script_are_asked_for_or_given(tmp_path):
    said = refused(tmp_path, BRANCHES, name="train.sh", model="gpt3-1.3b")
    assert "num-layers = 24 or 32 or not given: is 24, 32 or not given, by `if [ $SIZE = 1.3B ] in line 7`" in said
    assert "--variable SIZE=... decides" in said
    assert "use-distributed-optimizer" in said
    assert "by `case $SHARD in line 17`; --variable SHARD=... decides" in said
    assert "flash" not in said  # of no effect either way
    tables = {}
    for sharded in ("yes", "no"):
        (tmp_path / "train.sh").write_text(BRANCHES)
        found = import_scenario(
            tmp_path / "train.sh",
            model="gpt3-1.3b",
            cluster=Path(EIGHT),
            variables=["1=1.3B", f"SHARD={sharded}"],
        )
        tables[sharded] = tomllib.loads(found.text)
        assert any(line.startswith("launcher: rdzv-backend") for line in found.listed)
    assert [tables[each]["plan"]["method"] for each in ("yes", "no")] == ["zero1", "ddp"]
    plan = tables["yes"]["plan"]
    assert (plan["tp"], plan["micro_batches"], plan["recompute"]) == (2, 8, "full")
    assert tables["no"]["workload"]["sequence_length"] == 2048
    with pytest.raises(UserError, match=r"--variable 1\.3B: must be NAME=VALUE"):
        import_scenario(tmp_path / "train.sh", model="gpt3-1.3b", cluster=Path(EIGHT), variables=["1.3B"])
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    with pytest.raises(UserError, match="is for scripts"):
        import_scenario(tmp_path / "ds.json", model="llama3-8b", cluster=Path(EIGHT), variables=["A=1"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "torchrun pretrain_gpt.py --micro-batch-size 2 $MORE",
            r"\$MORE: the file does not say what this variable",
        ),
        ("pretrain_gpt.py --micro-batch-size 2 --seq-length 1024\npretrain_gpt.py --micro-batch-size 4", "lines 1, 2"),
        ("pretrain_gpt.py --micro-batch-size 2 --seq-length `cat x`", "seq-length = `cat x`"),
        (
            "pretrain_gpt.py --micro-batch-size 2 $tokenizer_moe_options",
            r"\$tokenizer_moe_options: the file does not say",
        ),
        ("pretrain_gpt.py --micro-batch-size 2 --moe-layer-recompute", "recomputed alone"),
        ("pretrain_gpt.py --micro-batch-size 2 --overlap-moe-expert-parallel-comm", "overlap their messages"),
        ("pretrain_gpt.py --micro-batch-size 2 --megatron-fsdp-main-params-dtype bf16", "in 16 bits"),
        ("pretrain_gpt.py --micro-batch-size 2 --use-mp-args-from-checkpoint-args", "parallel sizes of a checkpoint"),
        ("if true; then pretrain_gpt.py --micro-batch-size 2", "line 1: 'fi' is missing"),
        ("pretrain_gpt.py --micro-batch-size '2", "line 1: a quotation has no end"),
        ("f() { f; }\nf\npretrain_gpt.py --micro-batch-size 2", "nested too deep"),
        ("A=1\n" + "A=$A$A\n" * 60 + "pretrain_gpt.py --micro-batch-size $A", "micro-batch-size"),
        ("for i in 1 2 3; do " * 12 + "x;" + "done; " * 12 + "\npretrain_gpt.py --micro-batch-size 2", "too long"),
    ],
)
def test_scripts_that_cannot_be_followed_are_refused_in_a_line(tmp_path, text, said):
    with pytest.raises(UserError, match=said) as caught:
        imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert "\n" not in str(caught.value)


ARGUMENTS = b"torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 2 --global-batch-size 16\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "stdin is closed"),
        (b"--bf16 \xff", "stdin: is no UTF-8 text"),
        (ARGUMENTS + b"# " + b"x" * limits.MOST_BYTES, "stdin: is larger than"),
        (b"\xef\xbb\xbf" + ARGUMENTS.replace(b"\n", b"\r\n"), ""),
    ],
)
def test_stdin_is_read_like_a_file(monkeypatch, content, said):
    """A closed one ended in a traceback, and of a long one the first part was taken for the whole."""
    stream = None if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8")
    monkeypatch.setattr("sys.stdin", stream)
    ended = commands.run("gssim", "import", "-", "--model", "gpt3-1.3b", "--cluster", EIGHT)
    assert ended.returncode == (2 if said else 0)
    assert said in ended.stderr
    if said:
        assert len(ended.stderr.splitlines()) == 1
    else:
        assert tomllib.loads(ended.stdout)["workload"]["global_batch_size"] == 16


@pytest.mark.parametrize(
    "folder", ["`pwd`", "$(dirname $0)", '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', "$HERE", "."]
)
def test_a_script_beside_that_is_included_is_read(tmp_path, folder):
    arguments = "--num-layers 24 --micro-batch-size 2 --tensor-model-parallel-size $TP"
    (tmp_path / "config.sh").write_text(f'ARGS="{arguments}"\n')
    text = f'HERE=$(cd "$(dirname "$0")"; pwd)\nTP=4\nEXTRA="--bf16"\n. {folder}/config.sh\n. {folder}/submit.sh\n'
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"]["tp"] == 4
    assert tables["workload"]["precision"] == "bf16"


@pytest.mark.parametrize(
    ("folder", "samples"),
    [
        ("$(dirname $0)", 1),
        ('$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd -P)', 1),
        ("$(dirname `readlink -f $0`)", 1),
        ("$(dirname $0)/..", 2),
        (".", 4),
        ('$(dirname "$(dirname $0)")', None),
        ("$(cd $(dirname $0)/.. && pwd)", None),
        ("$(dirname $(pwd))", None),
        ("$(dirname $(which trainer))", None),
    ],
)
def test_only_the_file_that_a_script_names_is_included(tmp_path, monkeypatch, folder, samples):
    places = [tmp_path / "scripts", tmp_path, tmp_path / "elsewhere"]
    for number, place in enumerate(places):
        place.mkdir(exist_ok=True)
        (place / "config.sh").write_text(f'ARGS="--num-layers 24 --micro-batch-size {2**number}"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = f". {folder}/config.sh\n"
    if samples is None:
        with pytest.raises(UserError, match="config\\.sh, which cannot be read"):
            arguments_in(text, file="train.sh", folder=places[0])
    else:
        assert arguments_in(text, file="train.sh", folder=places[0])["micro-batch-size"] == str(samples)


@pytest.mark.parametrize("include", ["`pwd`/config.sh", "$ELSEWHERE/config.sh", "config.sh"])
def test_variables_that_hold_a_part_of_the_arguments_alone_are_no_training(tmp_path, include):
    """They became replicas of the whole cluster in fp32, although the training was in a file that was not read."""
    text = f'EXTRA="--bf16 --recompute-granularity full"\nTP=8\n. {include}\n'
    with pytest.raises(UserError, match=r"no arguments of a training.* includes .*config\.sh, which cannot be read"):
        imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    with pytest.raises(UserError, match="holds no arguments such as --micro-batch-size 1"):
        imported(tmp_path, text.partition("\n. ")[0], name="train.sh", model="gpt3-1.3b")


def test_a_training_script_in_python_is_refused_with_what_is_read_instead(tmp_path):
    with pytest.raises(UserError, match="a Python script is not read; give the configuration"):
        imported(tmp_path, "trainer = Trainer(model, args)\n", name="train.py", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("torchrun --nproc_per_node 4 train.py --batch-size 8 --lr 1e-4 --epochs 3", "train.py"),
        ("srun torchrun --nnodes 2 src/main.py --data /data --amp", "main.py"),
        ("python3 -m verl.trainer.main_ppo data.train_batch_size=1024", "verl.trainer.main_ppo"),
        ("deepspeed --module openrlhf.cli.train_sft --micro_train_batch_size 4 --agent a.py", "openrlhf.cli.train_sft"),
        ("python prepare.py --split 9\npython main.py --workers 8", "prepare.py, main.py"),
        ("python -m torch.distributed.launch --nproc_per_node=8 finetune.py --plugin zero2", "finetune.py"),
    ],
)
def test_a_script_that_runs_a_program_of_its_own_is_refused_by_its_name(tmp_path, command, program):
    """Each option was refused as Megatron-LM's: `batch-size: a retired spelling: see Megatron's own message`."""
    with pytest.raises(UserError, match=f"runs {re.escape(program)}, none of whose options is known") as caught:
        imported(tmp_path, f"#!/bin/bash\nexport OMP_NUM_THREADS=1\n{command}\n", name="train.sh", model="gpt3-1.3b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("program", ["examples/reward_modeling.py", "dpo.py", "train_grpo.py", "scripts/run_dpo.py"])
def test_the_name_of_a_program_that_trains_by_preferences_is_enough(tmp_path, program):
    """LMFlow's reward model became a training of the next token: its options do not tell."""
    text = f"deepspeed {program} --per_device_train_batch_size 1 --block_size 512\n"
    with pytest.raises(UserError, match="trains by preferences or rewards"):
        imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    _, found = imported(tmp_path, text.replace(program, "finetune.py"), name="train.sh", model="gpt3-1.3b")
    assert found.listed


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("srun --gres=gpu:2 --ntasks=4 --ntasks-per-node=2 python -u finetune.py", 4),
        ("srun --ntasks 2 --ntasks-per-node 1 torchrun --nproc_per_node 2 finetune.py", 2),
        ("srun --ntasks 2 accelerate launch finetune.py", 8),
        ("srun --ntasks 4 python finetune.py", 4),
        ("torchrun --nproc_per_node 4 -m package.train", 4),
        ("python -m torch.distributed.run --nproc_per_node=4 -m package.train", 4),
        ("deepspeed --num_gpus 4 --module package.train", 4),
    ],
)
def test_srun_counts_ranks_where_it_starts_the_program_itself(tmp_path, command, ranks):
    """A training on 128 GPUs was one on the eight of the cluster: gradients were accumulated as on 128."""
    text = f"{command} --per_device_train_batch_size 1 --block_size 512\n"
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["plan"].get("ranks", 8) == ranks
    assert tables["workload"]["global_batch_size"] == ranks
    many = text.replace("--ntasks=4", "--ntasks=16").replace("--nproc_per_node 2", "--nproc_per_node 16")
    if many != text:
        with pytest.raises(UserError, match="16"):
            imported(tmp_path, many, name="train.sh", model="gpt3-1.3b")


def test_srun_counts_the_ranks_of_megatron(tmp_path):
    text = (ROOT / "scenarios/imports/megatron.sh").read_text()
    text = text.replace("torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1", "srun --ntasks=4 python")
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert (tables["plan"]["ranks"], tables["plan"]["tp"]) == (4, 4)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun finetune.py --per_device_train_batch_size 1 --block_size 512 --seed $RANDOM\n",
        (ROOT / "scenarios/imports/megatron.sh").read_text().rstrip() + " --seed $RANDOM\n",
    ],
)
def test_a_seed_that_is_left_open_is_not_refused(tmp_path, text):
    _, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert any("seed" in line and "left open" in line for line in found.listed)


def test_a_readme_is_no_script(tmp_path):
    """A quotation in its prose had no end."""
    text = "# Fine-tuning\nIt's easy:\n```\ntorchrun train.py --per_device_train_batch_size 1\n```\n"
    with pytest.raises(UserError, match="is a document, not a script; give the command line in it"):
        imported(tmp_path, text, name="README.md", model="gpt3-1.3b")


def test_a_variable_among_the_launchers_options_has_its_name(tmp_path):
    text = 'ARGS="--master_port=11000"\nif [ $# -ge 1 ]; then\n  ARGS="$1"\nfi\n'
    text += "deepspeed ${ARGS} finetune.py --per_device_train_batch_size 1 --block_size 512\n"
    _, found = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert not any("\x00" in line or "\\x00" in line for line in found.listed)
    assert any("$ARGS" in line for line in found.listed)


@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_autocast_of_fp16_has_no_effect_where_fp16_is_off(tmp_path, precision):
    """InternVL's files have it beside "auto", and their scripts train in bf16: they were refused."""
    fp16 = {"enabled": "auto", "auto_cast": True, "loss_scale": 0}
    (tmp_path / "zero1.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "fp16": fp16}))
    text = f"torchrun finetune.py --per_device_train_batch_size 1 --block_size 512 {precision} --deepspeed zero1.json\n"
    tables, _ = imported(tmp_path, text, name="train.sh", model="gpt3-1.3b")
    assert tables["workload"]["precision"] == ("bf16" if precision else "fp32")
    with pytest.raises(UserError, match="autocast inside fp16"):
        imported(tmp_path, text.replace(f"512 {precision}", "512 --fp16"), name="train.sh", model="gpt3-1.3b")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ('{"pipe-parallel-size": 1, "model-parallel-size": 8, "zero_optimization": {"stage": 1}}', "GPT-NeoX"),
        ("pipe_parallel_size: 1\nmodel_parallel_size: 1\nzero_optimization: {stage: 1}\n", "GPT-NeoX"),
        ("model: {dim: 1}\noptim: {lr: 1}\ndata: {root_dir: a}\ndistributed: {fsdp_type: full_shard}\n", "Lingua"),
        ("actor_rollout_ref: {}\ndata: {}\ntrainer: {}\n", "verl"),
        ("data: {}\nmodel: {}\noptim: {}\ntrainer: {}\n", "verl's supervised"),
        ("system: {tensor_model_parallel_size: 2}\nmodel: {num_layers: 2}\n", "FlagScale"),
        ("model: {}\noptim: {}\ndata: {}\nstep_scheduler: {}\nflow_matching: {}\n", "NeMo Automodel's diffusion"),
        ("_wandb: {value: {}}\nmodel_type: {value: llama}\narchitectures: {value: []}\n", "Weights & Biases"),
        ("trainer: {path: train.py}\nmodel: {path: a}\nmethods: []\n", "NeMo, or of another program"),
        ("train: {}\noptimizer: {}\nscheduler: {}\ncheckpoint: {}\nmodel: {}\n", "Megatron-Bridge's recipes"),
    ],
)
def test_files_of_other_programs_have_their_own_name(tmp_path, text, program):
    """GPT-NeoX's were DeepSpeed's, Lingua's PRIME-RL's, verl's NeMo's."""
    name = "config.json" if text.startswith("{") else "config.yaml"
    with pytest.raises(UserError, match=f"is a configuration of {program}"):
        imported(tmp_path, text, name=name, model="gpt3-1.3b")


HEADER = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n"


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("srun -n 4 python finetune.py", 4),
        ("srun -n4 python finetune.py", 4),
        ("srun -N 2 --ntasks-per-node 2 python finetune.py", 4),
        ("srun -N 2 torchrun --nnodes 2 --nproc_per_node 1 finetune.py", 2),
        ("srun -n 4 bash -c 'python finetune.py --seed 1 {}'", 4),
        (f"{HEADER}srun python finetune.py", 4),
        (f"{HEADER}srun -n 2 python finetune.py", 2),
        (f"{HEADER}srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 2 finetune.py", 4),
        ("#SBATCH -n 4\nsrun python finetune.py", 4),
        ("#SBATCH -N 2\nsrun python finetune.py", 2),
        ("#SBATCH -N 2\nexport SLURM_NNODES=1\ntorchrun --nnodes $SLURM_NNODES --nproc_per_node 4 finetune.py", 4),
        ("mpirun -np 4 -hostfile hosts python finetune.py", 4),
        ("mpiexec -n 4 --bind-to none python finetune.py", 4),
        ("mpirun -H a:2,b:2 python finetune.py", 4),
        ("printf 'a slots=2\\nb slots=2\\n' > hosts\nmpirun --hostfile hosts python finetune.py", 4),
        ("printf 'a:2\\nb:2\\n' > hosts\nmpiexec -f hosts python finetune.py", 4),
        ("printf 'a slots=8\\nb slots=8\\n' > hosts\nmpirun --hostfile hosts -npernode 2 python finetune.py", 4),
        ("mpirun -H a:8,b:8 --map-by ppr:1:node python finetune.py", 2),
        ("mpirun -H a,a,b,b python finetune.py", 4),
        (
            "printf 'a max_slots=9 slots=2\\nb slots=2 # two\\n' > hosts\nmpirun --hostfile hosts python finetune.py",
            4,
        ),
        ("#PBS -l select=2:mpiprocs=8\nmpiexec -ppn 1 python finetune.py", 2),
        ("#SBATCH --nodes=2 --ntasks-per-node=2\nsrun python finetune.py", 4),
        ("#SBATCH -J name -N 2 -n 4\nsrun python finetune.py", 4),
        ("#PBS -l select=2:ncpus=32:mpiprocs=2\nmpiexec python finetune.py", 4),
        ("#BSUB -n 4\nmpirun python finetune.py", 4),
        ("jsrun -n 2 -a 2 python finetune.py", 4),
        ("deepspeed --include localhost:0,1,4,5 finetune.py", 4),
        ("deepspeed --include='a:0,1@b:0,1' finetune.py", 4),
        ("cat > hosts <<EOF\na slots=2\nb slots=2\nEOF\ndeepspeed --hostfile hosts finetune.py", 4),
        ("cat > hosts <<EOF\na slots=2\nb slots=2\nEOF\ndeepspeed --hostfile=hosts --include b finetune.py", 2),
        ("deepspeed --hostfile unreadable --num_gpus 2 --num_nodes 2 finetune.py", 4),
        ("accelerate launch --num_processes 4 --num_machines 2 finetune.py", 4),
        ("accelerate launch --num-processes=4 finetune.py", 4),
        ("torchrun --nnodes=2:2 --nproc_per_node 2 finetune.py", 4),
        ("torchrun --nproc_per_node=gpu finetune.py", 8),
        ("torchrun finetune.py", 8),
        ("deepspeed --hostfile unreadable finetune.py", 8),
        ("deepspeed --include localhost:0-3 finetune.py", 8),  # no number, as of all that is not known
        ("#PBS -l select=1:mpiprocs=2+1:mpiprocs=6\nmpiexec python finetune.py", 8),
        ("#SBATCH -N 2\nsrun --gpus-per-node=4 --ntasks-per-gpu=1 python finetune.py", 8),
        ("mpirun -H $HOSTS python finetune.py", 8),
        ("mpirun -H a:auto,b:2 python finetune.py", 8),
    ],
)
def test_launchers_and_jobs_count_the_ranks(tmp_path, command, ranks):
    """Where a launcher or a job gives fewer ranks, they were eight, those of the cluster, or refused."""
    arguments = "--per_device_train_batch_size 1 --block_size 512"
    text = command.format(arguments) if "{}" in command else f"{command} {arguments}"
    tables, found = imported(tmp_path, f"{text}\n", name="train.sh", model="gpt3-1.3b")
    assert tables["plan"].get("ranks", 8) == ranks
    assert tables["workload"]["global_batch_size"] == ranks
    assert any("torchrun starts one process" in line for line in found.listed) == (command == "torchrun finetune.py")


def test_launchers_count_the_ranks_of_megatron(tmp_path):
    text = (ROOT / "scenarios/imports/megatron.sh").read_text()
    for command in ("mpirun -np 4 python", "srun -N 2 --ntasks-per-node=2 python"):
        changed = text.replace("torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1", command)
        tables, _ = imported(tmp_path, changed, name="train.sh", model="gpt3-1.3b")
        assert (tables["plan"]["ranks"], tables["plan"]["tp"]) == (4, 4)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("torchrun --nnodes=1:4 --nproc_per_node 8 finetune.py", "nnodes = 1:4: is elastic, from 1 to 4 hosts"),
        ("mpirun -np $NP python finetune.py", "ranks of mpirun -np $NP = $NP: the file does not say"),
        ("srun -n $SLURM_NTASKS python finetune.py", "the file does not say what this variable is"),
    ],
)
def test_a_number_of_ranks_that_a_launcher_leaves_open_is_refused(tmp_path, command, said):
    text = f"{command} --per_device_train_batch_size 1 --block_size 512\n"
    assert said in refused(tmp_path, text, name="train.sh", model="gpt3-1.3b")


def test_the_launchers_precision_counts_where_the_trainer_has_none(tmp_path):
    """`accelerate launch --mixed_precision bf16` was listed as without effect: the training was in fp32."""
    text = "accelerate launch --mixed_precision {} train.py --per_device_train_batch_size 1 --block_size 512 {}\n"
    for precision, own, autocast in (("bf16", "", "bf16"), ("no", "", None), ("fp16", "--bf16", "bf16")):
        tables, _ = imported(tmp_path, text.format(precision, own), name="x.sh")
        assert tables["workload"].get("autocast") == autocast
    assert "this precision" in refused(tmp_path, text.format("fp8", ""), name="x.sh")


LAUNCHED = "accelerate launch --config_file=configs/a.yaml {} a.py --per_device_train_batch_size 1 --block_size 512 "
INSIDE = "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n"


@pytest.mark.parametrize(
    ("file", "options", "plan"),
    [
        (FSDP.format(reshard="true", more=""), "--bf16", {"method": "zero3", "recompute": "full"}),
        (FSDP.format(reshard="false", more=""), "--gradient_accumulation_steps 2", {"gradient_sync": "step"}),
        (INSIDE, "--gradient_accumulation_steps 2", {"method": "zero2", "ranks": 4, "micro_batches": 2}),
        (f"{INSIDE}  gradient_accumulation_steps: 1\n", "--bf16", {"method": "zero2", "ranks": 4}),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", "--bf16", {"method": "ddp", "ranks": 2}),
    ],
)
def test_the_file_that_accelerate_launches_with_is_read(tmp_path, file, options, plan):
    """The scripts of TRL and of many others were refused: "it says how the training is sharded, and is not read"."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/a.yaml").write_text(file)
    tables, _ = imported(tmp_path, f"{LAUNCHED.format('')}{options}\n", name="x.sh")
    assert tables["plan"].items() >= plan.items()
    is_replicated = "MULTI_GPU" in file
    assert tables["workload"].get("autocast" if is_replicated else "precision") == "bf16"
    counted, _ = imported(tmp_path, f"{LAUNCHED.format('--num_processes 2')}{options}\n", name="x.sh")
    assert counted["plan"]["ranks"] == 2


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        (INSIDE, "--fsdp 'full_shard auto_wrap' --bf16", "contradicts the Trainer's own sharding"),
        (f"{INSIDE}  gradient_accumulation_steps: 4\n", "", "contradicts gradient_accumulation_steps is not given: 1"),
        (f"{INSIDE}  unknown_key: 4\n", "", "a.yaml: deepspeed_config.unknown_key"),
        ("name: x\n", "", "it says how the training is sharded, and is not read"),
        (None, "", 'launcher: config_file = "configs/a.yaml": it says how the training is sharded; no such file'),
    ],
)
def test_a_file_of_accelerate_that_contradicts_the_script_is_refused(tmp_path, file, options, said):
    (tmp_path / "configs").mkdir()
    if file is not None:
        (tmp_path / "configs/a.yaml").write_text(file)
    assert said in refused(tmp_path, f"{LAUNCHED.format('')}{options}\n", name="x.sh")
