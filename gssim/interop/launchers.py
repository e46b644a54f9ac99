"""Number of ranks that a script starts, by its launcher and the header of its batch job.

`ranks_of_launcher` reads the options of srun, mpirun, jsrun, deepspeed and accelerate into a key that begins with
`RANKS_OF`. torchrun's and DeepSpeed's `--nproc-per-node`, `--nnodes`, `--num_gpus` and `--num_nodes`, and srun's
`--ntasks`, are keys anyway: `gssim.interop.arguments` reads them like options of the training. `launched_ranks` makes
one number of all these keys.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gssim.interop.reading import Keys, Undecided, Value
from gssim.interop.shell_syntax import is_open, written

STARTERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "jsrun")
"""Programs that start the ranks of a host or of a job."""
OF_TORCH = ("torchrun", "torch.distributed.launch", "torch.distributed.run")
MODULES = (*OF_TORCH[1:], "accelerate.commands.launch", "deepspeed.launcher")
"""Modules that start the program that follows."""
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

ALL_GPUS = ("gpu", "auto", "cuda")
"""Values of torchrun's --nproc-per-node that mean all GPUs of a host."""

Header = Mapping[str, int]
"""What the header of a batch job asks for, as `header_of` returns it."""
TextOf = Callable[[str], str | None]
"""Returns the text of a host file by its name; None if there is none."""


def launched_ranks(keys: Keys, processes: str, *, may_be_open: bool = False) -> Value | None:
    """Return the number of ranks that a script starts; None if it is not said: then all devices take part.

    `processes`: key of a host's number of processes. `may_be_open`: whether numbers that the script leaves open are
    listed as not said; otherwise they are refused.
    """
    names = (processes, "nnodes", "ntasks")  # of torchrun or DeepSpeed, and srun
    left_open = [name for name in names if may_be_open and isinstance(keys.values.get(name), Undecided)]
    for name in left_open:
        keys.note(name, "left open: the ranks are the devices of --cluster, or --set plan.ranks")
    if keys.values.get(processes) in ALL_GPUS:
        keys.note(processes, "all of each host: the ranks are the devices of --cluster")
        left_open.append(processes)
    each, hosts, tasks = (None if name in left_open else keys.integer(name, sets="plan.ranks") for name in names)
    if each is None and hosts is not None:
        keys.note(hosts.key, "without the processes of each: the ranks are the devices of --cluster")
    if keys.raw(ONE_PROCESS):
        keys.listed.append(("nproc-per-node is not given", TORCHRUN_STARTS_ONE))
    total = keys.integer(*(key for key in keys.values if key.startswith(RANKS_OF)), sets="plan.ranks")
    if each is None or "nnodes" in left_open:
        return tasks or total
    return each if hosts is None else Value(each.value * hosts.value, f"{each.origin}, {hosts.origin}")


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
    counts: dict[str, int] = {}
    for line in text.splitlines():
        directive, *words = line.split() or [""]
        if directive in HEADER_PATTERNS:
            for name, pattern in HEADER_PATTERNS[directive].items():
                if match := re.search(pattern, " ".join(words)):
                    counts[name] = int(match[1])
    if "tasks" not in counts and {"nodes", "tasks per node"} <= counts.keys():
        counts["tasks"] = counts["nodes"] * counts["tasks per node"]
    return counts


HEADER_PATTERNS = {
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
"""Patterns of the options of batch jobs' headers, by directive."""


def slurm_variables(text: str, header: Header) -> dict[str, str]:
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
        name: str(header[option])
        for option, each in names.items()
        for name in each
        if option in header and not re.search(rf"(?m)^\s*(export\s+)?{name}=", text)
    }


def ranks_of_launcher(
    words: Sequence[str], *, header: Header, text_of: TextOf, value: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the number of ranks that the innermost launcher of a command starts, by the key that says what it is of.

    `words`: the command up to its program. `text_of`: returns the text of a host file by its name. `value`: returns the
    value of a word that is no number: a text, or an `Undecided`. Empty if the number is not known.

    >>> srun, deepspeed = "srun -N 2 --ntasks-per-node 8 python", "deepspeed --include h1:0,1@h2:0,1"
    >>> ranks_of_launcher(srun.split(), header={}, text_of={}.get, value=str)
    {'ranks of srun -N 2 --ntasks-per-node 8': 16}
    >>> ranks_of_launcher(deepspeed.split(), header={}, text_of={}.get, value=str)
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
    option, number = reader(options, header, text_of)
    if number is None:
        return {}
    key = written(f"{RANKS_OF}{launcher} {option}".strip())
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


def _of_srun(words: Sequence[str], header: Header, _text_of: TextOf) -> Said:
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
    options = " ".join(text for text, _ in filter(None, (nodes, each))) or "in a job with #SBATCH --nodes"
    return options, int(hosts) * int(per_host)


def _of_mpi(words: Sequence[str], header: Header, text_of: TextOf) -> Said:
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
    text = hosts[1].replace(",", "\n") if hosts else text_of(file[1]) if file else None
    if text is None:
        if each is None:
            return "in a batch job", header.get("tasks")
        known = each[1].isdecimal() and not file and "nodes" in header
        return f"{each[0]} in a batch job", int(each[1]) * header["nodes"] if known else None
    option, slots = (hosts or file or ("",))[0], _slots_by_host(text)
    if each is None:
        return option, sum(slots.values()) or None
    return f"{each[0]} {option}", int(each[1]) * len(slots) or None if each[1].isdecimal() else None


def _of_jsrun(words: Sequence[str], _header: Header, _text_of: TextOf) -> Said:
    """Return jsrun's tasks: the resource sets, times the tasks of each."""
    if counted := _option(words, "-p", "--np"):
        return counted
    sets, each = _option(words, "-n", "--nrs"), _option(words, "-a", "--tasks_per_rs")
    if not sets or not f"{sets[1]}{each[1] if each else 1}".isdecimal():
        return sets[0] if sets else "", None
    return " ".join(text for text, _ in filter(None, (sets, each))), int(sets[1]) * int(each[1] if each else 1)


def _of_deepspeed(words: Sequence[str], _header: Header, text_of: TextOf) -> Said:
    """Return the number of ranks that `deepspeed` starts, with the option that says so: --include, else --hostfile.

    None if it is not known: --exclude and --num_nodes, which limit the host file's slots, are not read.
    """
    if _option(words, "--num_gpus", "--num-gpus"):
        return "", None  # read as an option of the training
    included = _option(words, "--include", "-i")
    named = _option(words, "--hostfile", "-H")
    slots = _slots_by_host(text_of(named[1]) or "") if named else {}
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


def _of_accelerate(words: Sequence[str], _header: Header, _text_of: TextOf) -> Said:
    return _option(words, "--num_processes", "--num-processes") or ("", None)


READERS = {
    "srun": _of_srun,
    "jsrun": _of_jsrun,
    **dict.fromkeys(("deepspeed", "deepspeed.launcher"), _of_deepspeed),
    **dict.fromkeys(("accelerate", "accelerate.commands.launch"), _of_accelerate),
}
"""Readers of launchers' options; all others have mpirun's."""


def _slots_by_host(text: str) -> Mapping[str, int]:
    r"""Return the slots of a host file's hosts; a line without a number is one. Empty if it leaves something open.

    >>> dict(_slots_by_host("a max_slots=8 slots=4 # two\nb:2\nb")), dict(_slots_by_host("a slots=auto"))
    ({'a': 4, 'b': 3}, {})
    """
    slots = Counter[str]()
    for line in text.replace("\\n", "\n").splitlines():  # printf writes lines so
        entry = line.partition("#")[0]
        name, _, count = (entry.split() or [""])[0].partition(":")
        if match := SLOTS.search(entry):
            count = match[1]
        if is_open(line) or not (count or "1").isdecimal():
            return Counter()
        if name:
            slots[name] += int(count or 1)
    return slots
