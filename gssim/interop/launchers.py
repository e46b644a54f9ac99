"""Number of ranks that launchers start: srun, mpirun, jsrun, deepspeed and accelerate, and the headers of batch jobs.

torchrun's and DeepSpeed's `--nproc-per-node`, `--nnodes`, `--num_gpus` and `--num_nodes`, and srun's `--ntasks`, are
read as options of the training by `gssim.interop.arguments`.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gssim.interop.shell_syntax import is_open, written

STARTERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "jsrun")
"""Programs that start the ranks of a host or of a job."""
MODULES = ("torch.distributed.launch", "torch.distributed.run", "accelerate.commands.launch", "deepspeed.launcher")
"""Modules that start the program that follows."""
OF_TORCH = ("torchrun", *MODULES[:2])
RANKS_OF = "ranks of "
"""Beginning of the key that holds a number of ranks, and of what it was read from."""
ONE_PROCESS = "started by torchrun without a number of processes"
"""Key that is set where torchrun starts its usual one process on a host."""
TORCHRUN_STARTS_ONE = (
    "approximated: torchrun starts one process on a host unless --nproc-per-node says more; taken are the devices of "
    "--cluster: --set plan.ranks gives another number"
)
SLOTS = re.compile(r"(?<![\w-])slots\s*=\s*(\S+)")
"""The number of slots in a line of a host file, as OpenMPI and DeepSpeed have it; MPICH's follows the host's name."""

Values = Mapping[str, Any]
Valued = Callable[[str], Any]
"""Returns a word's value: a text, or an `Undecided`."""


def header_of(text: str) -> dict[str, int]:
    r"""Return what the header of a batch job asks for: `nodes`, `tasks` and `tasks per node`, where it says so.

    Read are Slurm's, PBS's and LSF's; ranges, open values and PBS's hosts of several kinds are left out.

    >>> header_of("#SBATCH -N 2\n#SBATCH --ntasks-per-node=8")
    {'nodes': 2, 'tasks per node': 8, 'tasks': 16}
    >>> header_of("#SBATCH --job-name=a --nodes=2"), header_of("#PBS -l select=1:mpiprocs=4+2:mpiprocs=8")
    ({'nodes': 2}, {})
    >>> header_of("#PBS -l select=4:ncpus=64:mpiprocs=8"), header_of('#BSUB -n 16\n#BSUB -R "span[ptile=8]"')
    ({'nodes': 4, 'tasks per node': 8, 'tasks': 32}, {'tasks': 16, 'tasks per node': 8})
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        sign, *words = line.split() or [""]
        if sign in FORMS:
            for name, pattern in FORMS[sign].items():
                if match := re.search(pattern, " ".join(words)):
                    found[name] = int(match[1])
    if "tasks" not in found and {"nodes", "tasks per node"} <= found.keys():
        found["tasks"] = found["nodes"] * found["tasks per node"]
    return found


FORMS = {
    "#SBATCH": {
        "nodes": r"(?:^| )(?:-N|--nodes)[ =]?(\d+)(?![\d-])",
        "tasks": r"(?:^| )(?:-n|--ntasks)[ =]?(\d+)\b(?!-)",
        "tasks per node": r"(?:^| )--(?:n?tasks-per-node)[ =](\d+)\b",
    },
    "#PBS": {
        "nodes": r"-l [^+]*?(?:select|nodes)=(\d+)\b(?![^ ,]*\+)",
        "tasks per node": r"-l [^+]*?(?:mpiprocs|ppn)=(\d+)\b(?![^ ,]*\+)",
    },
    "#BSUB": {"tasks": r"^-n (\d+)\b", "nodes": r"^-nnodes (\d+)\b", "tasks per node": r"ptile=(\d+)\b"},
}
"""Patterns of the options of batch jobs' headers."""


def slurm_variables(text: str, header: Values) -> dict[str, str]:
    r"""Return the variables that Slurm sets for a job with this header, except those that the script sets itself.

    >>> slurm_variables("#SBATCH -N 2\nN=$SLURM_NNODES", {"nodes": 2})
    {'SLURM_NNODES': '2', 'SLURM_JOB_NUM_NODES': '2'}
    """
    if "#SBATCH" not in text:
        return {}
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "tasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
        "tasks per node": ("SLURM_NTASKS_PER_NODE",),
    }
    return {
        name: str(header[said])
        for said, each in names.items()
        for name in each
        if said in header and not re.search(rf"(?m)^\s*(export\s+)?{name}=", text)
    }


def started_ranks(words: Sequence[str], *, header: Values, files: Mapping[str, str], value: Valued) -> dict[str, Any]:
    """Return the number of ranks that the innermost launcher of a command starts, by the key that says what it is of.

    `words`: the command up to its program. `files`: texts of host files by name. Empty if it is not known.

    >>> started_ranks("srun -N 2 --ntasks-per-node 8 python".split(), header={}, files={}, value=str)
    {'ranks of srun -N 2 --ntasks-per-node 8': 16}
    >>> started_ranks("deepspeed --include h1:0,1@h2:0,1".split(), header={}, files={}, value=str)
    {'ranks of deepspeed --include h1:0,1@h2:0,1': 4}
    """
    places = [i for i, word in enumerate(words) if _base(word) in (*STARTERS, "srun") or word in MODULES]
    if not places:
        return {}
    launcher, options = _base(words[places[-1]]), words[places[-1] + 1 :]
    if words[places[-1]] in OF_TORCH or launcher in OF_TORCH:
        counts = _option(options, "--nproc_per_node", "--nproc-per-node")
        return {} if counts else {ONE_PROCESS: True}
    reader = READERS.get(launcher, _of_mpi)
    said, number = reader(options, header, files)
    if number is None:
        return {}
    key = written(f"{RANKS_OF}{launcher} {said}".strip())
    return {key: int(number) if str(number).isdecimal() else value(str(number))}


Said = tuple[str, Any]
"""The options that say a number, and the number; None if it is not known."""


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _option(words: Sequence[str], *names: str) -> tuple[str, str] | None:
    """Return the first of these options as it is written, and its value; None if there is none.

    >>> _option(["-n8"], "-n"), _option(["--np=4"], "-np", "--np")
    (('-n 8', '8'), ('--np 4', '4'))
    """
    for place, word in enumerate(words):
        name, equals, text = word.partition("=")
        if word in names and place + 1 < len(words):
            return f"{word} {words[place + 1]}", words[place + 1]
        if equals and name in names:
            return f"{name} {text}", text
        short = word[:2]
        if short in names and word[2:].isdecimal():
            return f"{short} {word[2:]}", word[2:]
    return None


def _of_srun(words: Sequence[str], header: Values, _files: Mapping[str, str]) -> Said:
    """Return srun's tasks: its own, else those of the job; a node has one unless the job says more."""
    if tasks := _option(words, "-n", "--ntasks"):
        return tasks
    if _option(words, "--ntasks-per-gpu"):
        return "", None
    nodes, each = _option(words, "-N", "--nodes"), _option(words, "--ntasks-per-node", "--tasks-per-node")
    if not nodes and not each and "tasks" in header:
        return "in a job with #SBATCH --ntasks", header["tasks"]
    hosts = nodes[1] if nodes else header.get("nodes")
    per_host = each[1] if each else header.get("tasks per node", 1)
    if hosts is None or is_open(f"{hosts}{per_host}") or not f"{hosts}{per_host}".isdecimal():
        return "", None
    said = " ".join(text for text, _ in filter(None, (nodes, each))) or "in a job with #SBATCH --nodes"
    return said, int(hosts) * int(per_host)


def _of_mpi(words: Sequence[str], header: Values, files: Mapping[str, str]) -> Said:
    """Return mpirun's processes: -np, else those of its hosts, else those of the job.

    A host has the processes that an option gives each, else its slots.
    """
    if counted := _option(words, "-np", "--np", "-n", "--n"):
        return counted
    each = _option(words, "-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost")
    mapped = _option(words, "--map-by", "-map-by")
    if mapped and (per_node := re.fullmatch(r"ppr:(\d+):node(?:[:,].*)?", mapped[1])):
        each = mapped[0], per_node[1]
    hosts = _option(words, "-H", "--host", "-host", "-hosts", "--hosts")
    file = _option(words, "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f")
    text = hosts[1].replace(",", "\n") if hosts else files.get(file[1]) if file else None
    if text is None:
        if each is None:
            return "in a batch job", header.get("tasks")
        known = each[1].isdecimal() and not file and "nodes" in header
        return f"{each[0]} in a batch job", int(each[1]) * header["nodes"] if known else None
    said, slots = (hosts or file or ("",))[0], _slots_by_host(text)
    if each is None:
        return said, sum(slots.values()) or None
    return f"{each[0]} {said}", int(each[1]) * len(slots) or None if each[1].isdecimal() else None


def _of_jsrun(words: Sequence[str], _header: Values, _files: Mapping[str, str]) -> Said:
    """Return jsrun's tasks: the resource sets, times the tasks of each."""
    if counted := _option(words, "-p", "--np"):
        return counted
    sets, each = _option(words, "-n", "--nrs"), _option(words, "-a", "--tasks_per_rs")
    if not sets or not f"{sets[1]}{each[1] if each else 1}".isdecimal():
        return sets[0] if sets else "", None
    return " ".join(text for text, _ in filter(None, (sets, each))), int(sets[1]) * int(each[1] if each else 1)


def _of_deepspeed(words: Sequence[str], _header: Values, files: Mapping[str, str]) -> Said:
    """Return DeepSpeed's ranks: the slots that it includes, else those of its host file without its other options."""
    if _option(words, "--num_gpus", "--num-gpus"):
        return "", None  # read as an option of the training
    included = _option(words, "--include", "-i")
    named = _option(words, "--hostfile", "-H")
    slots = _slots_by_host(files.get(named[1], "")) if named else {}
    if included:
        counts = [_included(each, slots) for each in included[1].split("@")]
        return included[0], None if None in counts else sum(filter(None, counts))
    limits = _option(words, "--exclude", "-e") or _option(words, "--num_nodes", "--num-nodes")
    return (named[0], sum(slots.values()) or None) if named and not limits else ("", None)


def _included(host: str, slots: Mapping[str, int]) -> int | None:
    """Return how many devices a host of `--include` has: `worker-0:0,1`, or all of them."""
    name, _, devices = host.partition(":")
    numbers = devices.split(",")
    return slots.get(name) if not devices else len(numbers) if all(map(str.isdecimal, numbers)) else None


def _of_accelerate(words: Sequence[str], _header: Values, _files: Mapping[str, str]) -> Said:
    return _option(words, "--num_processes", "--num-processes") or ("", None)


READERS = {"srun": _of_srun, "jsrun": _of_jsrun, "deepspeed": _of_deepspeed, "accelerate": _of_accelerate}
READERS |= {MODULES[2]: _of_accelerate, MODULES[3]: _of_deepspeed}
"""Readers of launchers' options; all others have mpirun's."""


def _slots_by_host(text: str) -> Mapping[str, int]:
    r"""Return the slots of a host file's hosts; a line without a number is one. Empty if it leaves something open.

    >>> dict(_slots_by_host("a max_slots=8 slots=4 # two\nb:2\nb")), dict(_slots_by_host("a slots=auto"))
    ({'a': 4, 'b': 3}, {})
    """
    slots = Counter[str]()
    for line in text.splitlines():
        said = line.partition("#")[0]
        name, _, count = (said.split() or [""])[0].partition(":")
        if match := SLOTS.search(said):
            count = match[1]
        if is_open(line) or not (count or "1").isdecimal():
            return Counter()
        if name:
            slots[name] += int(count or 1)
    return slots


def host_files(words: Sequence[str], made: Mapping[str, str], read: Callable[[str], str | None]) -> dict[str, str]:
    """Return the texts of the host files that a command names: those that the script writes, and others on disk."""
    names = ("-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f", "-H")
    found = {}
    for word, after in pairwise((*words, "")):
        option, equals, text = word.partition("=")
        name = text if equals else after
        if option in names and name:
            content = made.get(name) or (None if is_open(name) else read(name))
            if content is not None:
                found[name] = content.replace("\\n", "\n")  # as printf writes it
    return found
