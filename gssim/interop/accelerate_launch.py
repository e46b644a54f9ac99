"""Reads from `accelerate launch`, its options and its file, how it runs a training by Hugging Face's Trainer."""

from gssim.cluster import Cluster
from gssim.interop.accelerate import accelerate
from gssim.interop.deepspeed import OF_ENGINE
from gssim.interop.reading import Keys, Value, flattened, named_file, parsed_json, parsed_yaml, read_bounded
from gssim.interop.trainer_keys import REPLICAS
from gssim.interop.training import PRECISIONS, Training

CONFIG_FILE = "launcher: config_file"


def launch_file(keys: Keys, cluster: Cluster) -> Training | None:
    """Return the training in the file of `accelerate launch --config_file`; None if no such file is named or found, or
    it is not Accelerate's, which is refused.
    """
    name = keys.values.get(CONFIG_FILE)
    if not isinstance(name, str):
        return None  # not given, or left open by the script, which is refused as every key that is not read
    path = named_file(keys, name)
    if path is None:
        why = "it says how the training is sharded; no such file, beside this one, above it, or in the working folder"
        keys.refuse(CONFIG_FILE, why, replaced_by=["plan.method"])
        return None
    parse = parsed_json if path.suffix == ".json" else parsed_yaml
    content = flattened(parse(read_bounded(path), file=str(path)), file=str(path))
    if "distributed_type" not in content:
        return None  # the key then counts as not read
    inner = Keys(str(path), content, keys.overridden, keys.ignored)
    found = accelerate(inner, cluster)
    keys.raw(CONFIG_FILE)
    keys.add(inner, file=path.name)
    return found


OF_LAUNCHER = (*OF_ENGINE, "dp_replicate", "dp_shard", "tp", "cp", "context_exchange", "loss_scale")
"""Fields of a training that an Accelerate file decides."""


def shard_as_launched(keys: Keys, training: Training, launched: Training) -> None:
    """Set what the Accelerate file that starts the training decides; the Trainer's own keys come first."""
    training.world = training.world or launched.world
    own = training.sharding is not None and training.sharding.key != REPLICAS
    if launched.sharding is None or launched.sharding.value == "none":
        return
    if own:
        keys.refuse(CONFIG_FILE, f"its {launched.sharding.origin} contradicts the Trainer's own sharding")
        return
    theirs, ours = launched.accumulation, training.accumulation
    if theirs is not None and ours is not None and theirs.value != ours.value:
        said = f"its {theirs.origin} contradicts {ours.origin}"
        keys.refuse(CONFIG_FILE, said, replaced_by=["plan.micro_batches"])
    for name in OF_LAUNCHER:
        setattr(training, name, getattr(launched, name))
    training.clip_norm = launched.clip_norm or training.clip_norm
    if launched.recompute is not None and launched.recompute.value == "full":
        training.recompute = launched.recompute


def launch_precision(keys: Keys, launched: Training | None) -> Value | None:
    """Return the precision that the launcher's option says, or its file; it counts where the Trainer has none.

    `launched`: the training in the file.
    """
    why = "this precision cannot be simulated"
    found = keys.choice(PRECISIONS, "launcher: mixed_precision", sets="workload.precision", why=why)
    if found is None and launched is not None:
        found = launched.autocast or launched.precision
    return found if found is not None and found.value != "fp32" else None
