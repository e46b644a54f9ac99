"""Arguments of Megatron-LM, or of Hugging Face's Trainer: a command line, a script that is followed, or a file of them.

A YAML file may hold Megatron-LM's too. Names are written with hyphens, without the leading ones. In a script, only the
command that trains counts. Values that the script leaves open are `Undecided`. Names of the launcher's arguments
(before the program's name) begin with `launcher:`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gssim.errors import UserError, one_line
from gssim.interop.launchers import MODULES, STARTERS, header_of, ranks_of_launcher, slurm_variables
from gssim.interop.reading import Undecided, flattened, read_bounded
from gssim.interop.shell import Script, follow
from gssim.interop.shell_syntax import MARKS, NAME, is_open, shown_mark, written
from gssim.interop.shell_words import Branch, Command

OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
OF_TRAINER = {"per-device-train-batch-size"}
"""Options that mark a command as a training by Hugging Face's Trainer."""
BEGINS_TRAINING = {
    "micro-batch-size",
    "global-batch-size",
    "train-iters",
    "train-samples",
    "train-tokens",
    "batch-size",
    "lr",
    *OF_TRAINER,
}
"""Options that mark a command as one that trains."""
OF_MODELS = {
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "seq-length",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
}
"""Options that mark a command, or a variable, as Megatron-LM's."""
READ = (BEGINS_TRAINING | OF_MODELS) - {"batch-size", "lr"}
"""Options that mark a program as one that is read; many others also have a batch size and a learning rate."""
LAUNCHER = {
    "nproc-per-node": "nproc-per-node",
    "nnodes": "nnodes",
    "num-gpus": "nproc-per-node",
    "num-nodes": "nnodes",
}
"""Options of torchrun and deepspeed that count ranks."""
OF_SRUN = {"ntasks": "ntasks"}
"""Options of srun that count ranks, where no other launcher starts them."""
IN_LAUNCHER = "launcher:"
FLAG = re.compile(
    r"(no|disable|enable|use|overlap)-.*|bf16|fp16|sequence-parallel|standalone|finetune|swiglu|recompute-activations"
    r"|group-query-attention|untie-embeddings-and-output-weights|apply-layernorm-1p|qk-layernorm|deepspeed"
    r"|checkpoint-activations|deepspeed-activation-checkpointing|moe-grouped-gemm|add-qkv-bias|log-(?!interval).*"
)
"""Options that take no value; a variable that follows one may hold further arguments."""
DEEPSPEED_FILE = "deepspeed-config"
MOST_NESTED = 8

Options = dict[str, Any]


def arguments_in(
    text: str, *, file: str, variables: Mapping[str, str] | None = None, folder: Path | None = None
) -> Options:
    r"""Return the arguments in a command line, script or file of arguments; flags without a value are True.

    `variables`: values that the caller gives for the script's variables. `folder`: folder of the files that it
    includes.

    >>> arguments_in("N=8\npython pretrain_gpt.py --micro-batch-size 2 --seq-length=$((N)) --bf16", file="train.sh")
    {'micro-batch-size': '2', 'seq-length': '8', 'bf16': True}
    """

    def source(name: str, is_beside: bool) -> str | None:
        beside = [folder / name] if folder is not None else []
        places = beside if is_beside else [Path(name), *beside]
        path = next((place for place in places if place.is_file()), None)
        try:
            return read_bounded(path) if path is not None else None
        except UserError:
            return None

    header = header_of(text)
    script = follow(text, file=file, given={**slurm_variables(text, header), **(variables or {})}, source=source)

    def ranks(words: Sequence[str]) -> Options:
        """Return the number of ranks that a command's launcher starts, by the key that says what it is of."""
        words = _split(words)
        return ranks_of_launcher(
            words[: _program_place(words) + 1],
            header=header,
            text_of=lambda name: script.files.get(name) or (None if is_open(name) else source(name, False)),
            value=lambda text: _valued(text, script),
        )

    options = _of_commands(script, file, ranks)
    name = options.get(DEEPSPEED_FILE)
    document = script.files.get(str(name)) or next(
        (body for place, body in script.files.items() if written(place) == str(name)), None
    )
    if document is not None:
        options[DEEPSPEED_FILE] = str(name)
        options |= {f"{DEEPSPEED_FILE}.{key}": value for key, value in _json_in(document, file).items()}
    return options


def _of_commands(script: Script, file: str, ranks: Callable[[Sequence[str]], Options]) -> Options:
    """Return the arguments of the command that trains or, without such a command, those in variables.

    Variables count if one of them has an option of a training: others may hold a launcher's options, or only a part.
    """
    pieces = [word for command in script.commands if command.words[0].startswith("--") for word in command.words]
    commands = [each for each in script.commands if not each.words[0].startswith("--")]
    runs = [(each, ranks(each.words) | _options_of(each.words, script)) for each in commands]
    runs = [(command, options) for command, options in runs if options.keys() & (BEGINS_TRAINING | OF_MODELS)]
    trainings = [run for run in runs if run[1].keys() & BEGINS_TRAINING] or runs
    if others := [run for run in trainings if _reason_against(*run)]:
        trainings = [run for run in trainings if run not in others]
        if not trainings:
            raise UserError(f"{file}: runs {_reason_against(*others[0])}")
    if trainings:
        if not any(options.keys() & READ for _, options in trainings):
            _refuse_program(file, [command for command, _ in trainings])
        return _joined(trainings)
    if pieces:
        return _options_of(pieces, script)
    arguments: Options = {}
    for value in script.variables.values():
        words = [word for part in ([value] if isinstance(value, str) else value) for word in part.split()]
        if any(OPTION.fullmatch(word) for word in words):
            _add(arguments, _options_of(words, script))
    if arguments.keys() & (BEGINS_TRAINING | OF_MODELS):
        return arguments
    if script.unread:  # what it includes may hold the training
        raise UserError(
            f"{file}: holds no arguments of a training, such as --micro-batch-size 1, and includes "
            f"{one_line(script.unread[0], 60)}, which cannot be read: put it beside the file, or give the command line"
        )
    _refuse_program(file, commands)
    return {}


def _refuse_program(file: str, commands: Sequence[Command]) -> None:
    """Raise UserError for commands that run a Python program whose options are not known, by its name."""
    programs = list(dict.fromkeys(filter(None, (_program(command.words) for command in commands))))
    if programs:
        names = one_line(", ".join(programs), 100)
        raise UserError(
            f"{file}: runs {names}, none of whose options is known; known are those of Megatron-LM "
            "(--micro-batch-size 1) and of Hugging Face's Trainer (--per_device_train_batch_size 1): write the "
            "scenario yourself, or give the DeepSpeed or Accelerate file that the command names"
        )


def _program(words: Sequence[str]) -> str:
    """Return the Python file or module that a command runs; empty if it runs none.

    >>> _program("torchrun --nproc_per_node 8 train.py --lr 1".split()), _program("python3 -m verl.trainer".split())
    ('train.py', 'verl.trainer')
    """
    programs = (word for i, word in enumerate(words) if _is_program(words, i) and not is_open(word))
    return next(programs, "").rpartition("/")[2]


def _is_program(words: Sequence[str], place: int) -> bool:
    """Return whether a word of a command is a Python file or module that it runs, and no launcher."""
    is_module = place > 0 and words[place - 1] in ("-m", "--module") and words[place] not in MODULES
    return is_module or words[place].endswith(".py")


PREFERENCE_TRAININGS = re.compile(r"(^|[_-])(reward|dpo|kto|orpo|simpo|ppo|grpo|rloo)([_-]|\.)")
"""Part of the name of programs that train by preferences or rewards."""
WITHOUT_TRAINING = re.compile(r"text_generation|inference|convert|evaluate|preprocess|prune|quantize")
"""Part of the name of Megatron-LM's programs that take the options of a training, and do not train."""
OF_SWIFT = ("sft", "pt", "rlhf")
"""Subcommands of ms-swift's `megatron`, which train."""


def _reason_against(command: Command, options: Options) -> str:
    """Return the program that a command runs, and why its options are not those of a training that is read.

    Empty if they may be.
    """
    words, program = command.words, _program(command.words)
    if options.keys() & OF_TRAINER:
        reason = f"{one_line(program, 60)}, which trains by preferences or rewards; that cannot be simulated"
        return reason if PREFERENCE_TRAININGS.search(program) else ""
    if WITHOUT_TRAINING.search(program):
        return f"{one_line(program, 60)}, which trains no model; give the script of a training"
    subcommand = next((word for name, word in pairwise(words) if name == "megatron" and word in OF_SWIFT), None)
    if subcommand is not None:
        return (
            f"ms-swift's `megatron {subcommand}`, whose options have other defaults than Megatron-LM's and are not "
            "read; give Megatron-LM's arguments for the same training"
        )
    return ""


def _joined(runs: Sequence[tuple[Command, Options]]) -> Options:
    """Return the options of several trainings; options that differ are `Undecided`."""
    if len(runs) == 1:
        return runs[0][1]
    lines = ", ".join(dict.fromkeys(str(command.line) for command, _ in runs))
    joined: Options = {}
    for name in dict.fromkeys(name for _, options in runs for name in options):
        values = tuple(dict.fromkeys(options.get(name) for _, options in runs))
        joined[name] = _undecided(values, f"in the commands of the lines {lines}: leave one")
    return joined


def _undecided(values: Sequence[Any], decided: str) -> Any:
    """Return one value for several, some of which may be `Undecided`; a single value is returned as it is."""
    if len(values) == 1:
        return values[0]
    parts = [value.alternatives if isinstance(value, Undecided) else (value,) for value in values]
    alternatives = tuple(dict.fromkeys(each for part in parts for each in part)) if all(parts) else ()
    named = [part or (value,) for part, value in zip(parts, values, strict=True)]
    texts = ["not given" if each is None else "given" if each is True else str(each) for part in named for each in part]
    shown = [one_line(text, 40) for text in dict.fromkeys(texts)]
    return Undecided(" or ".join(shown), f"is {', '.join(shown[:-1])} or {shown[-1]}, {decided}", alternatives)


def _split(words: Sequence[str]) -> list[str]:
    """Return words of which those that hold several options are several."""
    return [part for word in words for part in (word.split() if " --" in f" {word}" and " " in word else [word])]


def _program_place(words: Sequence[str]) -> int:
    """Return the place of the program in a command, -1 if there is none."""
    first = next((i for i, word in enumerate(words) if _name(word) in BEGINS_TRAINING | OF_MODELS), len(words))
    return max((i for i in range(first) if _is_program(words, i)), default=-1)


def _options_of(words: Sequence[str], script: Script, depth: int = 0) -> Options:
    """Return the options of a command, by name."""
    words = _split(words)
    program = _program_place(words)
    options: Options = {}
    starts_ranks = any(word.rpartition("/")[2] in STARTERS or word in MODULES for word in words[: program + 1])
    for position, (name, value) in enumerate(_pairs(words[: program + 1], script, one_value=True)):
        counts = LAUNCHER if starts_ranks else LAUNCHER | OF_SRUN
        key = counts.get(name, f"{IN_LAUNCHER} {written(name)}")
        known = _valued(value, script)
        _add(options, {key: _host_count(known) if key == "nnodes" else known} if position or name else {})
    for name, value in _pairs(words[program + 1 :], script):
        if not name.startswith("\0"):
            _add(options, {name: _valued(value, script)})
            continue
        branch = script.branches.get(MARKS.findall(name)[0])
        if branch is None or depth >= MOST_NESTED:
            label = written(name)
            reason = f"the file does not say what this variable is, which may hold arguments; {_hint(label)}"
            _add(options, {label: Undecided(label, reason)})
            continue
        choices = [_options_of((text or "").split(), script, depth + 1) for text in branch.alternatives]
        decided = _decided(branch)
        for key in dict.fromkeys(key for choice in choices for key in choice):
            values = tuple(dict.fromkeys(choice.get(key) for choice in choices))
            _add(options, {key: _undecided(values, decided)})
    return options


def _host_count(value: Any) -> Any:
    """Return torchrun's number of hosts; a range of them is `Undecided`.

    >>> _host_count("4:4"), str(_host_count("1:4"))
    ('4', '1:4')
    """
    least, colon, most = str(value).partition(":")
    if not colon or isinstance(value, Undecided):
        return value
    reason = f"is elastic, from {least} to {most} hosts: one number of ranks is predicted"
    return least if least == most else Undecided(str(value), reason)


def _add(found: Options, more: Options) -> None:
    """Add options; one that is already there with another value becomes `Undecided`.

    A value that is given on some condition and also without any does not depend on the condition.
    """
    for name, value in more.items():
        if name in found and found[name] != value:
            values = (found[name], value)
            sure = next((each for each in values if not isinstance(each, Undecided)), None)
            others = {each for part in values if isinstance(part, Undecided) for each in part.alternatives}
            if sure is not None and others and others <= {sure, None}:
                value = sure
            else:
                value = _undecided(values, "as it is given twice: leave one")
        found[name] = value


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("_", "-") if OPTION.fullmatch(word) else ""


def _pairs(words: Sequence[str], script: Script, *, one_value: bool = False) -> list[tuple[str, str | bool]]:
    """Return the options of a command, each with its value (True for a flag).

    A mark (for a variable of the script that is not known yet) which is no option's value stands for options, and is
    returned like a flag. `one_value`: only the first word behind an option is its value, as in options of launchers.
    """
    pairs: list[tuple[str, str | bool]] = []
    values: list[str] | None = None
    name = ""
    for word in [*words, None]:
        option = "" if word is None else _name(word)
        holds = word is not None and MARKS.fullmatch(word) is not None
        if holds and values == [] and FLAG.fullmatch(name) is None:
            branch = script.branches.get(MARKS.findall(word or "")[0])
            texts = () if branch is None else branch.alternatives
            # the variable holds options, unless it is the value of the option before it
            holds = any((text or "").lstrip().startswith("--") for text in texts)
        if (option or word is None or holds) and values is not None:
            pairs.append((name, " ".join(values) if values else True))
            values = None
        if option and word is not None:
            name, values = option, [word.partition("=")[2]] if "=" in word else []
        elif holds and word is not None:
            pairs.append((word, True))
        elif values is not None and word and not word.endswith(".py") and not (one_value and values):
            values.append(word)
    return pairs


def _valued(value: str | bool, script: Script) -> Any:
    """Return a value, or an `Undecided` with what it depends on."""
    if isinstance(value, bool) or not is_open(value):
        return value
    labels = MARKS.findall(value)
    branch = script.branches.get(labels[0]) if len(labels) == 1 else None
    if branch is None:
        reason = f"the file does not say what this variable is; {_hint(shown_mark(labels[0]))}"
        return Undecided(written(value), reason)
    before, after = MARKS.split(value)[::2]
    texts = [None if text is None else f"{before}{text}{after}" for text in branch.alternatives]
    decided = _decided(branch)
    parts = [_valued(text, script) if text is not None and text != value else text for text in texts]
    return _undecided(tuple(dict.fromkeys(parts)), decided)


def _decided(branch: Branch) -> str:
    return f"by `{branch.where}`" + (f"; --variable {branch.variable}=... decides" if branch.variable else "")


def _hint(variable: str) -> str:
    name = variable.removeprefix("$")
    return f"--variable {name}=... does" if NAME.fullmatch(name) or name.isdigit() else "give it in its place"


def _json_in(document: str, file: str) -> Options:
    """Return the keys of a JSON file that a script writes; an open value is a text with its variable."""
    for quoted in (r'"\g<0>"', r"\g<0>"):
        try:
            data = json.loads(written(MARKS.sub(quoted, document)))
        except (ValueError, RecursionError):
            continue
        return flattened(data, file=f"{file}: {DEEPSPEED_FILE}") if isinstance(data, dict) else {}
    return {}


def arguments_of(data: Any, *, file: str) -> Options:
    """Return the arguments in a YAML file: of the table MODEL_ARGS, or of all tables."""
    if isinstance(data, Mapping) and isinstance(data.get("MODEL_ARGS"), Mapping):
        data = data["MODEL_ARGS"]
    options: Options = {}
    for key, value in flattened(data, file=file).items():
        short = key if key.startswith("--") else key.rpartition(".")[2]
        name = short.removeprefix("--").replace("_", "-")
        if name in options and options[name] != value:
            raise UserError(f"{file}: {name}: is given twice, as {options[name]} and as {value}; leave one")
        options[name] = value
    return {name: value for name, value in options.items() if value is not False}
