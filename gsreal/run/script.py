"""Launch scripts of a real run on several hosts, for Slurm, torchrun, Kubernetes and SkyPilot: printed, never started.

Every host starts one torchrun, whose ranks run `gsreal run`; they find each other at the first host (c10d rendezvous).
A first host whose name is an address of the loopback, as some images have it, would make each host wait for itself, so
the scripts refuse it.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gssim.errors import UserError
from gssim.scenario import Scenario

PORT = 29500
NOT_LOOPBACK = (
    'case "$(getent hosts "$HEAD")" in 127.*|::1*) echo "$HEAD resolves to the loopback: name it by its address" >&2; '
    "exit 1;; esac"
)


def launch_script(
    scenario: Scenario, path: Path, overrides: Sequence[str], launcher: str, *, image: str | None = None
) -> str:
    """Return what to submit to a launcher, one of `LAUNCHERS`, for a scenario in the file `path`.

    `image`: the container's image for Kubernetes, in which the file is found at the same path. Raises UserError where
    hosts have unequal numbers of ranks, or the launcher is unknown.
    """
    if launcher not in LAUNCHERS:
        raise UserError(f"--for {launcher}: no such launcher; allowed: {', '.join(LAUNCHERS)}")
    if (image is not None) != (launcher == "kubernetes"):
        raise UserError(f"--image: {'missing; it is' if image is None else 'is'} for --for kubernetes")
    hosts = Counter(device.host for device in scenario.cluster.devices[: scenario.ranks])
    if len(set(hosts.values())) > 1:
        raise UserError(f"{path}: hosts have {sorted(set(hosts.values()))} ranks; torchrun starts equally many on each")
    words = ["gsreal", "run", str(path)]
    for override in overrides:
        words += ["--set", override]
    each = next(iter(hosts.values()))
    device = scenario.cluster.devices[0].type
    gpus = scenario.cluster.backend == "nccl"
    return LAUNCHERS[launcher](
        len(hosts), each, shlex.join([*words, "--out", "out/results"]), device if gpus else "", image
    )


def _torchrun(nodes: str, each: str, run: str, *, identity: str) -> str:
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-id {identity} --rdzv-backend c10d "
        f'--rdzv-endpoint "$HEAD:{PORT}" --no-python {run}'
    )


def _for_slurm(nodes: int, each: int, run: str, gpu: str, image: str | None) -> str:
    started = f"{NOT_LOOPBACK}; exec {_torchrun(str(nodes), str(each), run, identity='$SLURM_JOB_ID')}"
    lines = [
        "#!/bin/bash",
        "# sbatch FILE",
        "#SBATCH --job-name gsreal",
        f"#SBATCH --nodes {nodes}",
        "#SBATCH --ntasks-per-node 1",
        *([f"#SBATCH --gpus-per-node {each}"] if gpu else [f"#SBATCH --cpus-per-task {each}"]),
        "#SBATCH --exclusive",
        "set -euo pipefail",
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export HEAD",
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(started)}",
    ]
    return "\n".join(lines) + "\n"


def _for_torchrun(nodes: int, each: int, run: str, gpu: str, image: str | None) -> str:
    lines = [
        "#!/bin/bash",
        f"# on each of {nodes} hosts: HEAD=NAME_OF_THE_FIRST bash FILE",
        "set -euo pipefail",
        ': "${HEAD:?name the first host}"',
        *([NOT_LOOPBACK] if nodes > 1 else []),
        f"exec {_torchrun(str(nodes), str(each), run, identity='gsreal')}",
    ]
    return "\n".join(lines) + "\n"


def _for_kubernetes(nodes: int, each: int, run: str, gpu: str, image: str | None) -> str:
    """Return an indexed Job and the headless Service that names its first pod. JSON is YAML that needs no quoting."""
    head = "gsreal-0.gsreal"
    command = f"HEAD={head}; {_torchrun(str(nodes), str(each), run, identity='gsreal')}"
    limits = {"nvidia.com/gpu": each} if gpu else {"cpu": each}
    container = {
        "name": "gsreal",
        "image": image,
        "command": ["bash", "-c", command],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": "gsreal",
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "gsreal"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": "gsreal"}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "gsreal"},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }
    return "# kubectl apply -f FILE\n" + "\n---\n".join(json.dumps(part, indent=2) for part in (service, job)) + "\n"


def _for_skypilot(nodes: int, each: int, run: str, gpu: str, image: str | None) -> str:
    nodes_word, each_word = "$SKYPILOT_NUM_NODES", "$SKYPILOT_NUM_GPUS_PER_NODE" if gpu else str(each)
    name = gpu.partition("-")[0].upper()
    resources = ["resources:", f"  accelerators: {name}:{each}"] if gpu else ["resources:", f"  cpus: {each}+"]
    lines = [
        "# sky launch FILE",
        "name: gsreal",
        f"num_nodes: {nodes}",
        *resources,
        "workdir: .",
        "run: |",
        '  HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        f"  {_torchrun(nodes_word, each_word, run, identity='gsreal')}",
    ]
    return "\n".join(lines) + "\n"


LAUNCHERS: dict[str, Callable[[int, int, str, str, str | None], str]] = {
    "slurm": _for_slurm,
    "torchrun": _for_torchrun,
    "kubernetes": _for_kubernetes,
    "skypilot": _for_skypilot,
}
"""Functions that write what to submit, by launcher. Arguments: hosts, ranks of each, command, GPU ('': none), image."""
