"""A training script for torchrun that executes a plan with PyTorch's wrappers, or with Gradient Sharding's library."""

from collections import Counter
from textwrap import indent

from gssim.errors import UserError, one_line
from gssim.scenario import Scenario, reduce_precision
from gssim.workload import TokenInput, unrolled

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
"""torch's names of precisions."""
SCRIPT = '''\
"""{title}

Written by gssim export; {launch}
"""

import os

import torch
import torch.distributed as dist
{imports}
SEQUENCE_LENGTH, VOCABULARY, MICRO_BATCH, MICRO_BATCHES = {sequence}, {vocabulary}, {micro}, {many}
STEPS = int(os.environ.get("STEPS", "{steps}"))
BLOCKS = {blocks}


def batches(rank):
    """Yield (inputs, targets) of a micro-batch: random tokens, to be replaced by your data."""
    random = torch.Generator().manual_seed({seed} + rank)
    while True:
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE_LENGTH + 1), generator=random)
        yield tokens[:, :-1], tokens[:, 1:]


dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
assert ranks == {ranks}, f"the plan is for {ranks} ranks, started are {{ranks}}"
local = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.manual_seed({seed})
{model}
model = model.to(device)
{wrap}
data = batches(rank)
for step in range(STEPS):
    total = 0.0
    for micro in range(MICRO_BATCHES):
        inputs, targets = (part.to(device) for part in next(data))
{sync}        logits = model(inputs)
        logits = getattr(logits, "logits", logits)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / MICRO_BATCHES
{backward}
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {{step}}: loss {{total:.3f}}")
dist.destroy_process_group()
'''

OPTIMIZERS = {
    "sgd": "torch.optim.SGD({parameters}, lr={lr}, weight_decay={decay}{kind})",
    "sgd-momentum": "torch.optim.SGD({parameters}, lr={lr}, momentum={momentum}, weight_decay={decay}{kind})",
    "adam": "torch.optim.Adam({parameters}, lr={lr}, weight_decay={decay}{kind})",
    "adamw": "torch.optim.AdamW({parameters}, lr={lr}, weight_decay={decay}{kind})",
}
KINDS = {"default": "", "for-loop": ", foreach=False", "foreach": ", foreach=True", "fused": ", fused=True"}

CHECKPOINT = """\
for name, block in list(model.named_modules()):
    if name in BLOCKS:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, checkpoint_wrapper(block))
"""
FSDP2 = """\
mesh = init_device_mesh(device.type, {shape}, mesh_dim_names={names})
options = dict(mesh=mesh, reshard_after_forward={reshard}{precision})
for name in BLOCKS:
    fully_shard(model.get_submodule(name), **options)
fully_shard(model, **options)
"""


def training_script(scenario: Scenario, micro: int, many: int) -> str:
    """Return a script that torchrun starts, with `many` micro-batches of `micro` samples on each rank."""
    workload, plan, policies = scenario.workload, scenario.plan, scenario.policies
    source = workload.model.input
    if not isinstance(source, TokenInput) or source.task != "next-token":
        raise UserError(f"workload.model = '{workload.model.name}': scripts are for models of the next token")
    hosts = Counter(device.host for device in scenario.cluster.devices[: scenario.ranks])
    if len(set(hosts.values())) > 1:
        raise UserError(
            f"cluster: hosts have {sorted(set(hosts.values()))} ranks; torchrun starts equally many on each"
        )
    each = next(iter(hosts.values()))
    nodes = f"on each of {len(hosts)} hosts: " if len(hosts) > 1 else "start it: "
    where = f"--nnodes {len(hosts)} --rdzv-backend c10d --rdzv-endpoint HEAD:29500 " if len(hosts) > 1 else ""
    blocks = [instance.module for instance in unrolled(workload.model) if instance.layer.block]
    imports, wrap = _wrapping(scenario)
    backward = "        loss.backward()"
    sync = ""
    if policies.gradients != "local" and many > 1 and policies.gradient_sync == "step":
        if plan.method == "gs":
            backward = (
                "        with optimizer.no_sync() if micro < MICRO_BATCHES - 1 else nullcontext():\n"
                "            loss.backward()"
            )
        elif plan.method == "ddp":
            sync = "        model.require_backward_grad_sync = micro == MICRO_BATCHES - 1\n"
        else:
            sync = "        model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)\n"
    return SCRIPT.format(
        title=one_line(f"{scenario.name}: {plan.method} on {scenario.ranks} ranks."),
        launch=f"{nodes}torchrun {where}--nproc-per-node {each} train.py",
        imports=imports,
        sequence=workload.sequence_length,
        vocabulary=source.vocabulary,
        micro=micro,
        many=many,
        steps=scenario.run.warmup_steps + scenario.run.steps,
        blocks="[\n" + indent("".join(f'"{name}",\n' for name in blocks), "    ") + "]",
        seed=scenario.run.seed,
        ranks=scenario.ranks,
        model=_model(scenario),
        wrap=wrap,
        sync=sync,
        backward=backward,
    )


def _model(scenario: Scenario) -> str:
    """Return the lines that build the model, from its config or its factory."""
    module = scenario.workload.model.module
    if module.hugging_face is not None:
        source = module.hugging_face
        return (
            f"from transformers import AutoConfig, {source.auto_class}\n\n"
            f"config = AutoConfig.for_model({source.model_type!r}, **{source.settings!r})\n"
            f"model = {source.auto_class}.from_config(config)"
        )
    path, _, name = str(module.factory).rpartition(".")
    return f"from {path} import {name}\n\nmodel = {name}(**{module.arguments!r})"


def _wrapping(scenario: Scenario) -> tuple[str, str]:
    """Return the imports and the lines that wrap the model and make the optimizer."""
    workload, plan, policies = scenario.workload, scenario.plan, scenario.policies
    optimizer = OPTIMIZERS[workload.optimizer].format(
        parameters="{parameters}",
        lr=workload.learning_rate,
        decay=workload.weight_decay,
        momentum=workload.momentum,
        kind=KINDS[workload.optimizer_implementation],
    )
    imports, lines = [], ""
    if plan.recompute == "full":
        wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        imports.append(f"from {wrapper} import checkpoint_wrapper")
        lines += CHECKPOINT
    made = f"optimizer = {optimizer.format(parameters='model.parameters()')}"
    if plan.method == "gs":
        imports.append("from gsreal.gradient_sharding import shard_gradients")
        if plan.micro_batches > 1 and policies.gradient_sync == "step":
            imports.insert(0, "from contextlib import nullcontext")
        options = f"lambda shard: {optimizer.format(parameters='shard')}"
        options += "" if policies.point_to_point else ", point_to_point=False"
        return "\n".join(imports) + "\n", f"{lines}optimizer = shard_gradients(model, {options})"
    if plan.method == "ddp":
        imports.append("from torch.nn.parallel import DistributedDataParallel")
        lines += "model = DistributedDataParallel(model)\n"
    elif plan.method != "single":
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        imports.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
        hybrid = policies.dp_replicate > 1
        precision = ""
        reduced = reduce_precision(workload)
        if workload.precision == "bf16":
            wanted = f"param_dtype=torch.bfloat16, reduce_dtype=torch.{DTYPES[reduced]}"
            precision = f", mp_policy=MixedPrecisionPolicy({wanted})"
        elif reduced != workload.precision:
            precision = f", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{DTYPES[reduced]})"
        lines += FSDP2.format(
            shape=(policies.dp_replicate, policies.dp_shard) if hybrid else (policies.dp_shard,),
            names=("replicate", "shard") if hybrid else ("shard",),
            reshard=plan.method != "zero2",
            precision=precision,
        )
    return "\n".join(imports) + "\n", lines + made
