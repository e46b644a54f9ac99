"""Launch scripts of a real run on several hosts, for Slurm, torchrun, Kubernetes and SkyPilot: printed, never started.

Every host starts one torchrun, whose ranks run `gsreal run`; they find each other at the first host (c10d rendezvous).
A first host whose name is an address of the loopback, as some images have it, would make each host wait for itself, so
the scripts refuse it.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gssim.errors import UserError
from gssim.scenario import Scenario

PORT = 29500
NOT_LOOPBACK = (
    'case "$(getent hosts "$HEAD")" in 127.*|::1*) echo "$HEAD resolves to the loopback: name it by its address" >&2; '
    "exit 1;; esac"
)


@dataclass(frozen=True)
class Job:
    """A run on several hosts, as launchers take it."""

    nodes: int
    each: int
    """Ranks of each host."""
    run: str
    """The command of every rank."""
    gpu: str
    """Type of the GPUs; empty: there is none."""
    image: str | None = None

    def _torchrun(self, identity: str, *, nodes: str = "", each: str = "") -> str:
        """Return the command of a host; `nodes`, `each`: variables of the launcher for these numbers."""
        return (
            f"torchrun --nnodes {nodes or self.nodes} --nproc-per-node {each or self.each} --rdzv-id {identity} "
            f'--rdzv-backend c10d --rdzv-endpoint "$HEAD:{PORT}" --no-python {self.run}'
        )

    def slurm(self) -> str:
        """Return a batch script for `sbatch`."""
        started = f"{NOT_LOOPBACK}; exec {self._torchrun('$SLURM_JOB_ID')}"
        lines = [
            "#!/bin/bash",
            "# sbatch FILE",
            "#SBATCH --job-name gsreal",
            f"#SBATCH --nodes {self.nodes}",
            "#SBATCH --ntasks-per-node 1",
            *([f"#SBATCH --gpus-per-node {self.each}"] if self.gpu else [f"#SBATCH --cpus-per-task {self.each}"]),
            "#SBATCH --exclusive",
            "set -euo pipefail",
            'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export HEAD",
            f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(started)}",
        ]
        return "\n".join(lines) + "\n"

    def torchrun(self) -> str:
        """Return a shell script to start on each host."""
        lines = [
            "#!/bin/bash",
            f"# on each of {self.nodes} hosts: HEAD=NAME_OF_THE_FIRST bash FILE",
            "set -euo pipefail",
            ': "${HEAD:?name the first host}"',
            *([NOT_LOOPBACK] if self.nodes > 1 else []),
            f"exec {self._torchrun('gsreal')}",
        ]
        return "\n".join(lines) + "\n"

    def kubernetes(self) -> str:
        """Return an indexed Job, and the headless Service that names its first pod, as JSON, which is YAML."""
        head = "gsreal-0.gsreal"
        command = f"HEAD={head}; {self._torchrun('gsreal')}"
        limits = {"nvidia.com/gpu": self.each} if self.gpu else {"cpu": self.each}
        container = {
            "name": "gsreal",
            "image": self.image,
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
                "completions": self.nodes,
                "parallelism": self.nodes,
                "backoffLimit": 0,
                "template": {"spec": pod},
            },
        }
        parts = "\n---\n".join(json.dumps(part, indent=2) for part in (service, job))
        return f"# kubectl apply -f FILE\n{parts}\n"

    def skypilot(self) -> str:
        """Return a task for `sky launch`."""
        nodes, each = "$SKYPILOT_NUM_NODES", "$SKYPILOT_NUM_GPUS_PER_NODE" if self.gpu else ""
        name = self.gpu.partition("-")[0].upper()
        lines = [
            "# sky launch FILE",
            "name: gsreal",
            f"num_nodes: {self.nodes}",
            "resources:",
            f"  accelerators: {name}:{self.each}" if self.gpu else f"  cpus: {self.each}+",
            "workdir: .",
            "run: |",
            '  HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f"  {self._torchrun('gsreal', nodes=nodes, each=each)}",
        ]
        return "\n".join(lines) + "\n"


LAUNCHERS: dict[str, Callable[[Job], str]] = {
    "slurm": Job.slurm,
    "torchrun": Job.torchrun,
    "kubernetes": Job.kubernetes,
    "skypilot": Job.skypilot,
}
"""Functions that write what to submit, by launcher."""


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
    run = shlex.join([*words, "--out", "out/results"])
    return LAUNCHERS[launcher](Job(len(hosts), each, run, device if gpus else "", image))
