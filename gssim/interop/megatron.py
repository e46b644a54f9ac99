"""Importer of Megatron-LM's arguments, including those that Megatron-DeepSpeed adds.

Names are those of Megatron-LM core 0.16, written with hyphens and without the leading ones.
"""

import re

from gssim.interop.deepspeed import OF_ENGINE, deepspeed, deepspeed_file, read_ulysses
from gssim.interop.launchers import launched_ranks
from gssim.interop.reading import LAUNCHER, LOGGING, MODEL, NUMERICS, Keys, Rule, Value, listed, refused
from gssim.interop.training import PRECISIONS, Training, optimizer_in
from gssim.units import human_bytes

KERNELS = "approximated: kernels are those that the model was traced with"
EXPERTS = "mixtures of experts of this kind cannot be simulated"
CAPACITY = "experts of a capacity, which drop tokens or pad them, cannot be simulated"
INFERENCE = "generation cannot be simulated"
UNSHARDED = "of a kind of sharding that is off, or refused above"

MEGATRON: dict[str, Rule] = {
    **listed(LAUNCHER, "launcher:*"),
    **refused("residuals and messages between stages in fp32 cannot be simulated", "fp32-residual-connection"),
    **refused("other numbers of Muon's iterations cannot be simulated", "muon-num-ns-steps", neutral=(5,)),
    **refused(EXPERTS, "moe-use-upcycling moe-layer-freq expert-tensor-parallel-size", neutral=(1,)),
    **refused(CAPACITY, "moe-expert-capacity-factor moe-expert-rank-capacity-factor moe-pad-expert-input-to-capacity"),
    **listed("of experts of a capacity, which are off or refused", "moe-token-drop-policy"),
    **refused("rows of experts in 8 bits cannot be simulated", "moe-*-dtype", neutral=("bf16", "fp32", "fp64")),
    **refused("experts of another width than the model's cannot be simulated", "moe-latent-size"),
    **refused("activations of experts in pages cannot be simulated", "moe-paged-stash"),
    **refused(
        "weights that are sharded further and gathered just in time cannot be simulated",
        "*tensor-parallel-num-weight-shards",
    ),
    **refused(
        "experts that are recomputed alone cannot be simulated", "moe-layer-recompute", or_set=("plan.recompute",)
    ),
    **refused(
        "experts that overlap their messages cannot be simulated",
        "overlap-moe-expert-parallel-comm moe-shared-expert-overlap",
    ),
    **listed("the model's experts are those of --model", "moe-shared-expert-* moe-ffn-hidden-size moe-router-*"),
    **listed(
        "approximated: DeepEP's kernels send and permute in one, and keep buffers outside the allocator, which are not "
        "counted",
        "moe-enable-deepep moe-flex-dispatcher-backend",
    ),
    **listed("of mixtures of experts, whose tokens go by all-to-alls", "moe-* expert-* *-expert-* router-*"),
    **refused("fp4 cannot be simulated", "fp4*"),
    **refused(
        "maps in 8 bits are not read from the file",
        "fp8 fp8-format fp8-hybrid fp8-e4m3",
        or_set=("workload.map_precision",),
    ),
    **listed("of fp8, which is off or refused", "fp8-* *-bf16-layers first-last-layers-bf16 keep-fp8*"),
    **refused(
        "state-space, hybrid and latent-attention models cannot be simulated",
        "multi-latent-attention hybrid-*-pattern hybrid-*-ratio mamba-* experimental-attention-variant mtp-num-layers "
        "is-hybrid-model heterogeneous-layers-config*",
    ),
    **listed(
        "of latent attention or state-space models, which are off or refused",
        "q-lora-rank kv-lora-rank qk-head-dim qk-pos* v-head* mtp-* linear-* mscale*",
    ),
    **refused(
        INFERENCE,
        "perform-rl-step rl-* grpo-* num-tokens-to-generate use-legacy-static-engine inference-dynamic-batching "
        "langrl-* incoming-requests-* prompts prompt-file inference task-list out-seq-length rollout-* num-rollout "
        "advantage-estimator",
    ),
    **listed(
        "of generation",
        "inference-* max-tokens-to-oom temperature top*k top*p flash-decode return-log-probs output-path "
        "enable-chunked-prefill num-speculative-tokens",
    ),
    **refused(
        "a training of several models or stages cannot be simulated",
        "encoder-num-layers decoder-num-layers vision-model-type encoder-tp llm-tp decoder-seq-length "
        "language-model-type",
    ),
    **refused(
        "a training of several models or stages cannot be simulated", "encoder-*-model-parallel-size", neutral=(1,)
    ),
    **listed("of context parallelism, which is off or read by its kind", "cp-comm-type hierarchical-context*"),
    **listed("of pipelines, which send while they compute here", "wgrad-deferral-limit variable-seq-lengths"),
    **refused("knowledge distillation cannot be simulated", "export-kd* logits-* teacher-* modelopt* kd mos"),
    **refused("offloading of activations cannot be simulated", "cpu-offloading* offload-*"),
    **listed(
        "its default, as here",
        "scatter-gather-tensors-in-pipeline clone-scatter-output-in-embedding delay-grad-reduce batch-p2p-*",
    ),
    **refused("offloading cannot be simulated", "fine-grained-activation-offloading use-cpu-initialization-offload"),
    **refused("a part of the optimizer on the host cannot be simulated", "optimizer-offload-fraction", neutral=(1,)),
    **listed("approximated: copies to the host and back do not overlap with its update", "overlap-cpu-* *pin-cpu-*"),
    **listed("which Adam the host runs", "use-torch-optimizer-for-cpu-offload"),
    **refused(
        "16-bit state of the optimizer cannot be simulated",
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype",
        neutral=("fp32",),
    ),
    **listed("approximated: emptying the allocator's cache takes time", "empty-unused-memory-level"),
    **listed(
        "approximated: master copies are whole, where Transformer Engine's Adam keeps the 16 bits alone that bf16 "
        "parameters lack (2 bytes less of each that a rank updates)",
        "use-precision-aware-optimizer store-param-remainders",
    ),
    **refused("CUDA graphs are not modelled", "enable-cuda-graph cuda-graph-impl external-cuda-graph"),
    **listed("of CUDA graphs, which are off or refused", "cuda-graph-* te-rng-tracker inference-rng-tracker"),
    **listed(
        "approximated: exchanges of tensor-parallel ranks overlap in as many parts as there are ranks", "tp-comm-*"
    ),
    **listed("of an overlap that is off or refused", "delay-wgrad-compute overlap-moe*"),
    **refused("pipelines that overlap with updates cannot be simulated", "overlap-param-gather-with-optimizer-step"),
    **refused("stages of embeddings and loss cannot be simulated", "standalone-*"),
    **refused(
        "optimizers beside the distributed one cannot be simulated", "num-distributed-optimizer-instances", neutral=(1,)
    ),
    **refused(
        "sharding at two levels of Megatron-FSDP cannot be simulated",
        "outer-dp-sharding-strategy",
        neutral=("no_shard",),
    ),
    **refused("sharding at two levels of Megatron-FSDP cannot be simulated", "enable-full-sharding-in-hsdp"),
    **listed("approximated: steps are those behind the ramp, of the global batch", "rampup-batch-size"),
    **refused("steps of changing batch cannot be simulated", "decrease-batch-size-if-needed"),
    **refused("frozen layers cannot be simulated", "freeze-* lora-*"),
    **refused(
        "parallel sizes of a checkpoint replace those of the file: --ignore it, and --set plan.tp, plan.pp and plan.ep",
        "use-mp-args-from-checkpoint*",
    ),
    **listed(
        MODEL,
        "use-checkpoint-args use-tokenizer-model-from-checkpoint* max-position-embeddings position-embedding-type",
    ),
    **refused("a retired spelling: see Megatron's own message", "model-parallel-size batch-size"),
    **refused(
        "activations that are divided or offloaded cannot be simulated",
        "distribute-checkpointed-activations partition-activations checkpoint-in-cpu",
    ),
    **listed(
        "how recomputed blocks keep their inputs",
        "contig*ous-checkpointing deepspeed-activation-check* synchronize-each-layer profile-backward",
    ),
    **refused(
        "recomputation that is not known here, or of another program",
        "*activation*-checkpoint*",
        or_set=("plan.recompute",),
    ),
    **refused("DeepSpeed's pipelines of zero bubbles cannot be simulated", "enable-zbh1*"),
    **refused("sequences in chunks on the host cannot be simulated", "ds-sequence-parallel-fpdt*"),
    **refused("parameters of another place cannot be simulated", "remote-device"),
    **refused("layers in tiles cannot be simulated", "memory-centric-tiled-linear"),
    **refused("tokens that layers drop cannot be simulated", "random-ltd"),
    **refused("samples of changing length cannot be simulated", "data-efficiency-curriculum-learning"),
    **listed("of knowledge distillation, which is off or refused", "kd-* *-teacher"),
    **listed(
        "of DeepSpeed, whose configuration says it",
        "zero-* ds-*adam cpu-torch-adam force-ds-sequence-parallel no-pipeline-parallel deepspeed-mpi",
    ),
    **listed(
        "of DeepSpeed's experts, which are off or refused",
        "topk mlp-type *moe* expert-interval use-tutel enable-expert-tensor-parallelism",
    ),
    **refused("arguments in a further file", "yaml-cfg config-file"),
    **listed(
        "approximated: gathers of virtual stages beside forwards begin on all ranks at once", "no-align-param-gather"
    ),
    **listed("approximated: all gradients are reduced in the buckets of this method", "ddp-* no-align-*"),
    **refused(
        "shards of parameters or gradients in 16 bits cannot be simulated",
        "megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype",
        neutral=("fp32", "auto"),
    ),
    **listed(
        "approximated: Megatron-FSDP keeps two buffers of gathered parameters and gradients all the time; here they "
        "are allocated when a block is gathered, and freed after it: the peak may be higher",
        "fsdp-double-buffer",
    ),
    **listed(
        "approximated: collectives on buffers that are registered with NCCL take fewer of the GPU's multiprocessors "
        "from compute, and with Megatron-FSDP two buffers stay allocated: steps may be shorter, the peak higher",
        "use-nccl-ub",
    ),
    **listed(UNSHARDED, "megatron-fsdp-* torch-fsdp2-* fsdp-* data-parallel-sharding-strategy init-model-with*"),
    **listed(
        "approximated: the shards are those of the method",
        "overlap-param-gather align-* suggested-communication-unit-size nccl-* create-all-gather-group "
        "disable-symmetric-registration no-use-layer-wise-param-layout",
    ),
    **listed(
        "approximated: pipelines send while they compute",
        "no-overlap-p2p* overlap-p2p* microbatch-group* deallocate-pipeline-outputs defer-embedding*",
    ),
    **listed(
        "approximated: sums of a micro-batch's gradients are kernels of their own", "*gradient-accumulation-fusion"
    ),
    **listed(
        KERNELS,
        "*-fusion *-fusion-impl transformer-impl attention-backend use-flash-attn no-persist-* use-*fused* "
        "cross-entropy-* use-transformer-engine-op-fuser *flashinfer* batch-invariant-mode no-query-key-layer-scaling "
        "use-flash-attn-* deterministic-mode attention-softmax-in-fp32 apply-query-key-layer-scaling use-te* "
        "fp16-lm-cross-entropy output-logit-dtype fallback-to-eager* disable-jit-fuser enable-experimental "
        "batch-invariant-backend flash-attention-version fused-residual-rmsnorm memory-efficient-layer-norm "
        "disable-bf16-reduced-precision-matmul",
    ),
    **listed(
        MODEL,
        "rotary-* use-rotary* use-rope* *rope* yarn-* no-position-embedding swiglu quick-geglu squared-relu "
        "openai-gelu glu-* normalization norm-epsilon layernorm-epsilon apply-layernorm-1p qk-layernorm qk-l2* "
        "disable-bias-linear add-qkv-bias add-bias-linear untie-embeddings* kv-channels group-query-attention "
        "attention-output-gate make-vocab* vocab-* padded-vocab* hidden-dropout attention-dropout *dropout* "
        "init-method* window-* softmax-type spec tokenizer-* *tokenizer* tiktoken-* merge-file bert-* num-classes "
        "trust-remote-code use-cpu-initialization img-* patch-* extra-vocab-size use-llama2-rotary* "
        "attention-head-type disable-bias-*-fc activation-func-clamp-value apply-residual-connection-post-layernorm "
        "embed-layernorm pad-vocab-size-to glu-activation embedding-weights-in-fp32 mask-factor "
        "disable-mem-efficient-ln sync-tp-duplicated-parameters use-mcore-models use-legacy-models model-provider "
        "export-* onnx-safe model-name layernorm-zero-centered-gamma activation-func",
    ),
    **listed(
        NUMERICS,
        "min-lr lr-* override-opt* override-lr-* adam-* muon-* lion-* decoupled-* use-checkpoint-opt* "
        "start-weight-decay "
        "end-weight-decay weight-decay-incr* apply-wd* no-weight-decay-cond* *loss-scale* hysteresis "
        "calculate-per-token-loss mask-* eod-mask* reset-* accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 "
        "no-gradient-reduce-div* warmup *-initialization use-mup mup-* qk-clip* head-lr-mult "
        "use-same-sampling-seed*",
    ),
    **listed(
        LOGGING,
        "data-* *-data-path split train-iters train-samples eval-* *num-workers mock-data *mmap* *-cache-path fim-* "
        "*attention-mask-in-dataloader dataloader-* sft* skip-train save* load* no-save* no-load* *ckpt* *checkpoint* "
        "async-* exit-* finetune log-* timing-* tensorboard-* wandb-* one-logger* no-one-logger* enable-one-logger "
        "profile* use-pytorch-profiler record-* no-record-* logging-* app-tag-* full-validation run-workload* "
        "straggler-* disable-straggler* inprocess-* *ft-* rerun-* check-* no-check-* verify-integrity result-rejected* "
        "error-injection* adlr-* sample-rate dataset train-data valid-data test-data epochs keep-last "
        "train-data-exact* kill-switch-* *-weighted-split-paths* abort-on-unmet-fused-kernel-constraints train-tokens "
        "codecarbon-dir universal-checkpoint repeated-dataloader aml-* reset-iteration no-data-sharding "
        "use-dataset-only return-data-index eval-only norm-target-loss loss-on-targets-only reweight-loss* "
        "skip-train-iteration-range iterations-to-skip phase-transition* retro-* per-split* test-mode manual-gc* "
        "*barrier-with* retriever-* short-seq-prob nvtx-ranges memory-snapshot-path start-eval-at-iter "
        "multiple-validation-sets "
        "validation-set-names num-dataset-builder-threads otel-* filter-warnings throughput-window-size "
        "pytorch-profiler-* flight-recorder-* config-logger-dir dump-param-to-param-group-map per-dataset-* "
        "allow-ambiguous-pad-tokens chat-template enable-msc disable-msc distrib-optim-fully-reshardable-mem* "
        "replication* train-*-path",
    ),
    **listed(
        LAUNCHER,
        "distributed-* master* node* rdzv* standalone tee local-rank *gloo* high-priority* "
        "use-ring* lazy-mpu-init max-restarts job-name container-* log-dir redirects account p partition time output "
        "error gpus* ntasks* cpus* nodes exclusive mem export mpi no-python m devices num-nodes refit-*",
    ),
}
"""How Megatron's arguments are treated that are not read; the first matching pattern counts."""

STRATEGIES = {"no_shard": "none", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
UNSAID_STRATEGY = (
    "data-parallel-sharding-strategy is not given: optim_grads_params, its default since 0.18; earlier releases take "
    "no_shard: --set plan.method=ddp"
)
UNSAID_MESSAGES = (
    "gradients are reduced in fp32, as up to 0.18; later releases do so in the parameters' precision, unless "
    "megatron-fsdp-grad-comm-dtype says otherwise: --set workload.reduce_precision=bf16"
)
CONTEXT_EXCHANGES = {"p2p": "ring", "a2a": "all-to-all", "all_gather": "gather"}
SIZES = {
    "layers": "num-layers",
    "width": "hidden-size",
    "heads": "num-attention-heads",
    "key-value heads": "num-query-groups",
    "perceptron": "ffn-hidden-size",
    "vocabulary": "vocab-size",
    "experts": "num-experts",
    "experts per token": "moe-router-topk",
    "experts' perceptrons": "moe-ffn-hidden-size",
}

ALIASES = {"experts": ("num-moe-experts",)}
"""Names of sizes in Megatron core's own configuration, which files of arguments in YAML may have."""


def megatron(keys: Keys) -> Training:
    """Return the training in Megatron-LM's arguments."""
    training = Training()
    for name, (key, sets) in READ_SIZES.items():
        setattr(training, name, keys.integer(key, sets=sets))
    _batch_schedule(keys, training)
    training.sequence = keys.integer("seq-length", "encoder-seq-length", sets="workload.sequence_length")
    training.world = launched_ranks(keys, "nproc-per-node", may_be_open=True)
    _architecture(keys, training)
    _experts(keys, training)
    _precision(keys, training)
    _sharding(keys, training)
    _pipeline(keys, training)
    if training.cp is not None and training.cp.value > 1:
        _context_exchange(keys, training)
    _recompute(keys, training)
    _optimizer(keys, training)
    training.clip_norm = keys.number("clip-grad") or Value(1.0, "clip-grad = 1.0 (its default)")
    training.seed = keys.seed("seed")
    _offloading(keys, training)
    _deepspeed(keys, training)
    training.embedding_parallel = training.loss_parallel = Value(
        True, "Megatron-LM divides the vocabulary among tensor-parallel ranks"
    )
    training.sequence_parallel = keys.flag("sequence-parallel")
    training.gathered_inputs = Value("gathered-again", "Megatron-LM gathers inputs of linear maps again")
    training.tp_overlap = keys.flag("tp-comm-overlap")
    waits = keys.flag("no-async-tensor-model-parallel-allreduce")
    default = "Megatron-LM sums gradients of inputs beside products"
    training.fused_maps = True
    training.async_input_gradients = Value(waits is None or not waits.value, waits.origin if waits else default)
    _masks(keys, training)
    keys.close(MEGATRON)
    return training


def _offloading(keys: Keys, training: Training) -> None:
    """Read whether the optimizer is offloaded; list the options of offloaded activations where that is off."""
    if (offloads := keys.enabled("optimizer-cpu-offload")) is not None:
        training.offload = Value("optimizer", offloads.origin)
    if keys.is_off("cpu-offloading"):
        for key in keys.values:
            if key.startswith("cpu-offloading-"):
                keys.note(key, "of offloading, which is off")


DROPOUT = "approximated: the masks of dropout are those of the model file, if it has any"


NOTED_MASK_BYTES = 2**28
"""Least size of masks that are noted."""


def _masks(keys: Keys, training: Training) -> None:
    """Note masks that are not counted: of attention, and of dropout that is on.

    Of attention: a byte for each pair of positions, on the stages at both ends. The data loader makes them unless it is
    told not to, and they live until a micro-batch's forward is done. Source: pretrain_gpt.py, get_batch. Of dropout: a
    byte for each element, which is kept for the backward.
    """
    key = "no-create-attention-mask-in-dataloader"
    if (off := keys.enabled(key)) is not None:
        keys.note(off.key, "the loader's masks are not counted anyway")
    samples, length, ranks = training.micro_batch, training.sequence, training.cp
    if off is None and samples is not None and length is not None:
        size_bytes = samples.value * length.value**2 / (ranks.value if ranks is not None else 1)
        what = f"approximated: a mask of {human_bytes(size_bytes)}, which the first and last stage hold in a forward"
        if size_bytes >= NOTED_MASK_BYTES:
            keys.listed.append((f"{key} is not given", f"{what}, is not counted"))
    for key in ("hidden-dropout", "attention-dropout"):
        if key in keys.values:
            keys.note(key, MODEL if keys.is_off(key) else DROPOUT)
        else:
            keys.listed.append((f"{key} is not given: 0.1", DROPOUT))


DISPATCHER = "moe-token-dispatcher-type"
DISPATCHERS = {
    "alltoall": "tokens go by all-to-alls here too",
    "allgather": (
        "approximated: tokens go by all-to-alls, where each rank gathers those of all others, and scatters what its "
        "experts return: of n ranks that divide experts (n-1) tokens for one, not k (n-1) / n for k experts of a token"
    ),
}


def _experts(keys: Keys, training: Training) -> None:
    """Read the tensor-parallel ranks of experts, and note how rows are exchanged; the default is allgather."""
    divides = training.ep is not None and training.ep.value > 1
    if divides:
        training.etp = keys.integer("expert-tensor-parallel-size", sets="plan.etp")
    kind = str(keys.raw(DISPATCHER) or "allgather")
    reason = DISPATCHERS.get(kind, "approximated: tokens go by all-to-alls, not by kernels that both send and permute")
    if keys.has(DISPATCHER):
        keys.note(DISPATCHER, reason)
    elif divides and training.ep is not None:
        keys.note(training.ep.key, f"{reason} ({DISPATCHER} is not given: allgather)")


def _context_exchange(keys: Keys, training: Training) -> None:
    why = "hierarchical exchanges cannot be simulated"
    exchange = keys.choice(CONTEXT_EXCHANGES, "cp-comm-type", sets="plan.context_exchange", why=why)
    training.context_exchange = exchange
    if exchange is not None and exchange.value == "gather":
        keys.note(exchange.key, "approximated: gradients of keys go around, and are not reduce-scattered")


def _architecture(keys: Keys, training: Training) -> None:
    grouped = keys.has("group-query-attention")
    keys.raw("group-query-attention")
    for size, key in SIZES.items():
        if key == "num-query-groups" and not grouped:
            if keys.has(key):
                keys.note(key, "of no effect without group-query-attention")
        elif size == "experts" and str(keys.values.get(key)) == "1":
            keys.note(key, "one expert is none")
        elif key == "vocab-size" and keys.has(key):
            keys.note(key, "approximated: the vocabulary is the model's, which Megatron pads")
        elif (value := keys.integer(key, *ALIASES.get(size, ()))) is not None:
            training.architecture[size] = value
    if (groups := keys.integer("num-key-value-heads")) is not None:  # Megatron-DeepSpeed's
        training.architecture["key-value heads"] = groups
    _absent_sizes(keys, training, grouped=grouped)


def _absent_sizes(keys: Keys, training: Training, *, grouped: bool) -> None:
    """Set the sizes of a model that the file describes where they are not given, as validate_args does.

    Of mixtures, moe-ffn-hidden-size may say what the experts' perceptrons have.
    """
    architecture = training.architecture
    for name in () if "experts" in architecture else ("experts per token", "experts' perceptrons"):
        if architecture.pop(name, None) is not None:
            keys.note(SIZES[name], "of experts, of which there are none")
    heads, width = architecture.get("heads"), architecture.get("width")
    if "key-value heads" not in architecture and heads is not None:
        reason = "num-query-groups is not given" if grouped else "group-query-attention is not given"
        architecture["key-value heads"] = Value(
            1 if grouped else heads.value, f"{reason}: {1 if grouped else heads.value}"
        )
    gated = keys.enabled("swiglu") is not None
    if width is None:
        return
    if "perceptron" not in architecture and "experts" not in architecture:
        size = int(4 * width.value * 2 / 3 / 64) * 64 if gated else 4 * width.value
        architecture["perceptron"] = Value(size, f"ffn-hidden-size is not given: {size}{' with swiglu' * gated}")
    untied = keys.enabled("untie-embeddings-and-output-weights")
    usual = "untie-embeddings-and-output-weights is not given"
    training.shares_embedding = Value(untied is None, untied.origin if untied else usual)


def _optimizer(keys: Keys, training: Training) -> None:
    kind = str(keys.raw("optimizer") or "adam").lower()
    if kind == "adam":
        origin = keys.line("optimizer") if keys.has("optimizer") else "optimizer is not given: adam"
        coupled = keys.enabled("no-adam-decoupled-weight-decay")
        training.optimizer = Value("adamw" if coupled is None else "adam", origin)
        training.optimizer_implementation = Value("fused", f"{origin}, fused")
    elif kind in ("muon", "dist_muon"):
        origin = keys.line("optimizer")
        training.optimizer = Value("muon", origin)
        training.optimizer_implementation = Value("fused", f"{origin}, with a fused Adam beside it")
    else:
        optimizer_in(keys, training, "optimizer")
        if kind == "sgd" and training.optimizer is not None:
            training.optimizer = Value("sgd-momentum", training.optimizer.origin)
    momentum = "muon-momentum" if kind.endswith("muon") else "sgd-momentum"
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight-decay"), ("momentum", momentum)):
        setattr(training, name, keys.number(key, sets=f"workload.{name}"))


READ_SIZES = {
    "tp": ("tensor-model-parallel-size", "plan.tp"),
    "pp": ("pipeline-model-parallel-size", "plan.pp"),
    "cp": ("context-parallel-size", "plan.cp"),
    "ep": ("expert-model-parallel-size", "plan.ep"),
    "micro_batch": ("micro-batch-size", "plan.micro_batches"),
    "global_batch": ("global-batch-size", "workload.global_batch_size"),
}


def _batch_schedule(keys: Keys, training: Training) -> None:
    """Read the last batch size of a schedule such as `0:16 2.4B:320`; it must be the global batch size."""
    schedule = keys.raw("step-batch-size-schedule")
    if schedule is None:
        return
    last = str(schedule).split()[-1].rpartition(":")[2] if str(schedule).split() else ""
    if training.global_batch is None and last.isdecimal() and 0 < len(last) < 16:  # since 0.17 they exclude each other
        training.global_batch = Value(int(last), f"{keys.line('step-batch-size-schedule')}: its end")
    if training.global_batch is not None and last == str(training.global_batch.value):
        keys.note(
            "step-batch-size-schedule", "approximated: steps are those of the schedule's end, of the global batch"
        )
    else:
        keys.refuse("step-batch-size-schedule", "must end at --global-batch-size: predicted are steps of that batch")


def _precision(keys: Keys, training: Training) -> None:
    on = [(name, flag) for name in ("bf16", "fp16") if (flag := keys.enabled(name)) is not None]
    if len(on) == 2:
        keys.refuse("fp16", "contradicts bf16", replaced_by=["workload.precision"])
    if not on:
        training.precision = Value("fp32", "neither bf16 nor fp16")
        return
    name, flag = on[0]
    training.precision = Value(name, flag.origin)
    if name == "fp16":
        training.loss_scale = keys.number("loss-scale")
    wide, narrow = keys.flag("accumulate-allreduce-grads-in-fp32"), keys.flag("grad-reduce-in-bf16")
    if (wide is not None and wide.value) or (name == "bf16" and not (narrow is not None and narrow.value)):
        origin = wide.origin if wide else f"{flag.origin}, whose gradients are summed in fp32"
        training.gradient_precision = training.reduce_precision = Value("fp32", origin)


def _sharding(keys: Keys, training: Training) -> None:
    overlap = keys.flag("overlap-grad-reduce")
    distributed, fsdp2 = keys.enabled("use-distributed-optimizer"), keys.enabled("use-torch-fsdp2")
    megatron_fsdp = keys.enabled("use-megatron-fsdp", "use-custom-fsdp")
    training.zero1_implementation = "megatron"
    if fsdp2 is not None:
        training.reduce_precision = None  # no policy of precisions: that of the parameters
        kept = keys.flag("torch-fsdp2-no-reshard-after-forward")
        training.sharding = Value("zero2" if kept is not None and kept.value else "zero3", (kept or fsdp2).origin)
    elif megatron_fsdp is not None:
        strategy = keys.choice(STRATEGIES, "data-parallel-sharding-strategy", sets="plan.method")
        training.sharding = strategy or Value("zero3", f"{megatron_fsdp.origin}: optim_grads_params")
        if strategy is None:
            keys.listed.append((megatron_fsdp.origin, UNSAID_STRATEGY))
        message = "megatron-fsdp-grad-comm-dtype"
        if str(keys.values.get(message, "auto")) != "auto":
            training.reduce_precision = keys.choice(PRECISIONS, message, sets="workload.reduce_precision")
        elif training.reduce_precision is not None:
            keys.listed.append((megatron_fsdp.origin, UNSAID_MESSAGES))
    elif distributed is not None:
        training.sharding = Value("zero1", distributed.origin)
    elif str(keys.raw("optimizer")).lower() == "dist_muon":
        training.sharding = Value("zero1", keys.line("optimizer"))
    else:
        training.sharding = Value("none", "use-distributed-optimizer is not given")
    if training.sharding.value in ("zero2", "zero3"):
        training.gradient_precision = None  # shards are summed in fp32 anyway
    on = overlap is not None and overlap.value
    if training.sharding.value in ("none", "zero1"):
        training.overlap = Value(on, overlap.origin if overlap else "overlap-grad-reduce is not given")
        training.gathers_beside_forward = keys.enabled("overlap-param-gather")
        bucket = keys.integer("ddp-bucket-size", sets="plan.bucket_bytes")
        training.bucket_count = keys.integer("ddp-num-buckets", sets="plan.bucket_bytes")
        training.bucket_parameters = bucket or Value(0, "ddp-bucket-size is not given")


def _pipeline(keys: Keys, training: Training) -> None:
    ranks = training.pp.value if training.pp else 1
    virtual = keys.integer("num-virtual-stages-per-pipeline-rank")
    per_stage = keys.integer("num-layers-per-virtual-pipeline-stage")
    first, last = keys.integer("decoder-first-pipeline-num-layers"), keys.integer("decoder-last-pipeline-num-layers")
    counted = _ends_of_stages(keys)
    beside = keys.enabled("use-tp-pp-dp-mapping")
    if ranks == 1:
        if keys.has(LAYOUT):
            keys.note(LAYOUT, "there is no pipeline")
        return
    if beside is not None:
        reason = "stages on ranks side by side, and replicas further apart, cannot be simulated: here replicas are"
        keys.refuse("use-tp-pp-dp-mapping", reason)
    training.short_schedules = True  # its warm-up is no longer than the number of micro-batches: schedules.py
    training.schedule = Value("1f1b", "neither virtual stages nor layers of them are given")
    if virtual is not None and virtual.value > 1:
        training.schedule, training.stages_per_rank = Value("interleaved", virtual.origin), virtual
    elif per_stage is not None:
        training.schedule, training.blocks_per_stage = Value("interleaved", per_stage.origin), per_stage
    training.first_stage_blocks, training.last_stage_blocks = first, last
    _layout(keys, training, ranks)
    if counted is not None:
        _count_ends(keys, training, counted, virtual.value if virtual is not None else 1)
    training.even_stages = True
    # each receive allocates a tensor, which the backward that uses it frees: p2p_communication.py, schedules.py
    training.receive_buffers = Value("in-flight", "Megatron-LM frees what a stage received after its backward")


LAYOUT = "pipeline-model-parallel-layout"
MOST_LETTERS = 1000
"""Most letters of a layout as it is written; unrolled, it may have so many times that."""


def _layout(keys: Keys, training: Training, ranks: int) -> None:
    """Read stages by letters, such as `Et*3|(tt|)*6L`: embedding, transformer blocks, and the head with its loss.

    Source: core/transformer/pipeline_parallel_layer_layout.py.
    """
    layout = keys.raw(LAYOUT, sets="plan.stages")
    if layout is None:
        return
    letters = str(layout).strip("'\"").replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,3})(?!\d)", r"(.)\*(\d{1,3})(?!\d)"):
        letters = (
            re.sub(pattern, lambda found: found[1] * int(found[2]), letters) if len(letters) < MOST_LETTERS else ""
        )
    if not re.fullmatch(r"E[t|]*L", letters):
        reason = "stages of others than an embedding (E), transformer blocks (t) and a loss (L) cannot be simulated"
        keys.refuse(LAYOUT, reason, replaced_by=["plan.stages"])
        return
    blocks = (f"layers.{number}" for number in range(letters.count("t")))
    names = {"E": lambda: ["tok_embeddings"], "t": lambda: [next(blocks)], "L": lambda: ["norm", "output"]}
    stages = [[name for letter in stage for name in names[letter]()] for stage in letters.split("|")]
    training.stage_modules = Value(stages, keys.line(LAYOUT))
    if len(stages) > ranks:
        training.schedule = Value("interleaved", keys.line(LAYOUT))


ENDS = "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"
PARTITION = "pp-partition-method"


def _ends_of_stages(keys: Keys) -> tuple[int, int, str] | None:
    """Return whether embedding and loss count as a block each in the division of blocks into stages, and the key."""
    first, last = (int(keys.enabled(name) is not None) for name in ENDS)
    method = keys.raw(PARTITION)
    if method is not None:
        kinds = set(str(method).strip("'\"").lower().removeprefix("type:").split("|"))
        if not kinds <= {"transformer", "embedding"} or not str(method).strip("'\"").lower().startswith("type:"):
            keys.refuse(PARTITION, "stages of this kind are not known here", replaced_by=["plan.stages"])
            return None
        return (1, 1, PARTITION) if "embedding" in kinds else None
    return (first, last, ENDS[0] if first else ENDS[1]) if first or last else None


def _count_ends(keys: Keys, training: Training, counted: tuple[int, int, str], virtual: int) -> None:
    """Set the number of blocks of the first and last stage, if the embedding or loss counts as a block there."""
    first, last, key = counted
    blocks, ranks = training.architecture.get("layers"), training.pp
    if blocks is None or ranks is None or (blocks.value + first + last) % (ranks.value * virtual):
        keys.refuse(key, "stages need num-layers, which does not divide so", replaced_by=["plan.stages"])
        return
    each = (blocks.value + first + last) // (ranks.value * virtual)
    training.first_stage_blocks = Value(each - first, keys.line(key))
    training.last_stage_blocks = Value(each - last, keys.line(key))


DEEPSPEED_FILE = "deepspeed-config"


def _deepspeed(keys: Keys, training: Training) -> None:
    """Read what Megatron-DeepSpeed adds: the engine's file, which sets how state is sharded, and Ulysses' ranks."""
    read_ulysses(keys, training, "ds-sequence-parallel-size")
    on, on_host, stage = keys.enabled("deepspeed"), keys.enabled("cpu-optimizer"), keys.integer("zero-stage", least=0)
    experts = training.architecture.get("experts")
    if on is None:
        keys.raw(DEEPSPEED_FILE)
        implementation = keys.choice({"local": False, "torch": True}, "DDP-impl", sets="plan.method")
        if implementation is not None and training.sharding is not None and training.sharding.value == "none":
            training.overlap = implementation
            training.bucket_parameters = None
        return
    if experts is not None and experts.value > 1:
        keys.refuse("num-experts", "DeepSpeed's mixtures of experts, which drop tokens, cannot be simulated")
    training.architecture.pop("experts", None)
    keys.raw("DDP-impl")
    inner = _engine(keys, stage)
    if inner is None:
        return
    training.bucket_parameters = None
    for name in (*OF_ENGINE, "clip_norm", "loss_scale", "dp_shard", "sharding_in_stages"):
        setattr(training, name, getattr(inner, name))
    if training.sharding_in_stages is not None and keys.enabled("no-pipeline-parallel") is None:
        training.sharding = training.sharding_in_stages  # a pipeline of one stage is one too
    training.gradient_precision = None
    if on_host is not None:
        training.offload = training.offload or Value("optimizer", on_host.origin)
    for name in ("global_batch", "micro_batch", "precision"):
        ours, theirs = getattr(training, name), getattr(inner, name)
        if ours is not None and theirs is not None and ours.value != theirs.value:
            place = theirs.key if name != "precision" else DEEPSPEED_FILE
            keys.refuse(place, f"{theirs.value} in DeepSpeed's configuration contradicts {ours.origin}")


def _engine(keys: Keys, stage: Value | None) -> Training | None:
    """Return the training in the engine's configuration, from a file or from a text that the script writes."""
    prefix = f"{DEEPSPEED_FILE}."
    written = {key.removeprefix(prefix): value for key, value in keys.values.items() if key.startswith(prefix)}
    name = keys.raw(DEEPSPEED_FILE, sets="plan.method")
    if not written and name is not None:
        inner = deepspeed_file(keys, DEEPSPEED_FILE, str(name))
    elif written or stage is not None:
        if not written and stage is not None:
            written = {"zero_optimization.stage": stage.value}
        within = Keys(keys.file, written, keys.overridden, keys.ignored)
        inner = deepspeed(within)
        keys.read |= {key for key in keys.values if key.startswith(prefix)}
        keys.listed += [(prefix + line, reason) for line, reason in within.listed]
        keys.refused += [(prefix + line, reason) for line, reason in within.refused]
    else:
        keys.refuse("deepspeed", "its configuration is not in the file", replaced_by=["plan.method"])
        inner = None
    if inner is not None and stage is not None and inner.sharding is not None:
        says = 0 if inner.sharding.value == "none" else int(inner.sharding.value[-1])
        if says != stage.value:
            keys.refuse("zero-stage", f"contradicts {inner.sharding.origin}", replaced_by=["plan.method"])
    return inner


FIRST_LAYERS = "recomputes only the first layers of a stage"
OLDER_METHOD = "activations-checkpoint-method"
OLDER_CHUNKS = ("checkpoint-num-layers", "activations-checkpoint-num-layers")


def _checkpoints(keys: Keys, training: Training) -> bool:
    """Read the older spellings of full-block recomputation, and return whether it is on.

    The method was the switch from Megatron-LM 2.6 to 3.0: none, uniform or block.
    """
    whole = keys.enabled("checkpoint-activations")
    method = keys.choice({"uniform": "uniform"}, OLDER_METHOD, sets="plan.recompute", why=FIRST_LAYERS)
    chunk = keys.integer(*OLDER_CHUNKS)
    whole = whole or method
    if whole is None:
        return False
    if chunk is not None and chunk.value > 1:
        reason = "units of several layers cannot be simulated"
        keys.refuse(chunk.key, reason, replaced_by=["plan.recompute"])
    training.recompute = Value("full", whole.origin)
    for key in ("recompute-granularity", "recompute-method", "recompute-num-layers", "checkpoint-method"):
        if keys.has(key):
            keys.note(key, f"{whole.key} recomputes whole blocks")
    return True


def _recompute(keys: Keys, training: Training) -> None:
    if _checkpoints(keys, training):
        return
    granularity = keys.raw("recompute-granularity")
    old = keys.enabled("recompute-activations")
    method, layers = keys.raw("recompute-method"), keys.integer("recompute-num-layers")
    keys.raw("recompute-modules")
    keys.raw("distribute-saved-activations")
    plan = ["plan.recompute"]
    if granularity == "full":
        if keys.flag("distribute-saved-activations") is not None:
            keys.refuse("distribute-saved-activations", "saved activations that are distributed cannot be simulated")
        if method == "block":
            keys.refuse("recompute-method", FIRST_LAYERS, replaced_by=plan)
        elif layers is not None and layers.value > 1:
            keys.refuse("recompute-num-layers", "units of several layers cannot be simulated", replaced_by=plan)
        training.recompute = Value("full", keys.line("recompute-granularity"))
    elif granularity == "selective" or old is not None:
        keys.refuse(
            "recompute-granularity" if granularity else "recompute-activations",
            "recomputes the core of attention (or the modules that are named), which is not this plan's 'selective': "
            "fused attention kernels keep as little without, so say none, or full",
            replaced_by=plan,
        )
    elif granularity is not None:
        keys.refuse("recompute-granularity", "must be full or selective", replaced_by=plan)
    else:
        training.recompute = Value("none", "recompute-granularity is not given")
