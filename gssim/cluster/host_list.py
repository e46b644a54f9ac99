"""Host lists as Slurm writes them: `srv[8-10,12],login`."""

import re

from gssim.errors import UserError, one_line

MOST_HOSTS = 100_000
LONGEST_LIST = 20_000
"""Largest number of characters in a host list."""


def hosts_in(text: str, *, file: str) -> list[str]:
    """Return the names in a host list of Slurm.

    >>> hosts_in("srv[8-10,12],login", file="example")
    ['srv8', 'srv9', 'srv10', 'srv12', 'login']
    """
    if len(text) > LONGEST_LIST or text.count("[") != text.count("]"):
        raise UserError(f"{file}: {one_line(text, 60)!r}: is no host list")
    hosts: list[str] = []
    for part in re.findall(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)+|[^,\[\]]+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            ends = [plain] if plain else _numbers(ranges, file)
            if len(names) * len(ends) + len(hosts) > MOST_HOSTS:
                raise UserError(f"{file}: {one_line(part, 60)}: more than {MOST_HOSTS} names")
            names = [name + end for name in names for end in ends]
        hosts += names
    if not hosts:
        raise UserError(f"{file}: {one_line(text, 60)!r}: is no host list")
    return hosts


def _numbers(ranges: str, file: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"{file}: [{one_line(ranges, 40)}]: is no list of numbers and ranges")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first + len(numbers) >= MOST_HOSTS:
            raise UserError(f"{file}: [{one_line(ranges, 40)}]: more than {MOST_HOSTS} names")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers
