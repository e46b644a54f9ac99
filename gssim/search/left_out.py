"""Plans of a search's space that cannot run: how many, of which methods, and why."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUMBER = re.compile(r"\d[\d.]*")


@dataclass
class _Group:
    reason: str
    """Of the first of them; the others' differ in numbers."""
    plans: int = 0
    methods: dict[str, None] = field(default_factory=dict)


class LeftOut:
    """Plans that were refused, by reason: those whose reasons differ in numbers alone are told together."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self._groups: dict[str, _Group] = {}

    def add(self, reason: str, method: str, plans: int = 1) -> None:
        """Count plans of a method that are refused for a reason."""
        reason = reason.removeprefix(f"{self.file}: ")
        group = self._groups.setdefault(NUMBER.sub("#", reason), _Group(reason))
        group.plans += plans
        group.methods[method] = None

    @property
    def plans(self) -> int:
        """How many in all."""
        return sum(group.plans for group in self._groups.values())

    def rows(self) -> list[Mapping[str, Any]]:
        """Return number, methods and reason of each group, the largest first, as a Result's provenance has them."""
        groups = sorted(self._groups.values(), key=lambda group: -group.plans)
        return [{"plans": each.plans, "methods": list(each.methods), "reason": each.reason} for each in groups]

    def lines(self) -> list[str]:
        """Return the same for people."""
        return [
            f"left out: {each['plans']:,} ({', '.join(each['methods'])}): {each['reason']}"
            if each["plans"]
            else f"not searched: {each['reason']}"
            for each in self.rows()
        ]
