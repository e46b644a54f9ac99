"""What a device of the lab has really sent and received, by the counters of its network interfaces."""

from pathlib import Path

from gsreal.lab.network import ADDRESS_DEVICE
from gsreal.lab.throttle import own_place

INSIDE = ("lo", ADDRESS_DEVICE)
"""Interfaces that lead nowhere else."""


def carried_bytes(table: Path = Path("/proc/self/net/dev")) -> tuple[int, int] | None:
    """Return (sent, received) bytes of this device since its network was built, headers included; None outside the lab.

    What a switch beside it passes on for others is in that switch's counters.
    """
    if own_place() is None:
        return None
    sent = received = 0
    for line in table.read_text(encoding="ascii").splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() not in INSIDE:
            received, sent = received + int(counts.split()[0]), sent + int(counts.split()[8])
    return sent, received


class Carried:
    """Bytes that this device has sent and received over steps, of which some moments do not count."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._from = self._to = carried_bytes()
        self._steps = 0

    def note(self) -> None:
        """Count up to now, the end of a step."""
        self._to = carried_bytes()
        self._steps += 1

    def leave_out(self) -> None:
        """Do not count what has been carried since the last step's end."""
        now = carried_bytes()
        if self._from and self._to and now:
            sent, received = (at - to for at, to in zip(now, self._to, strict=True))
            self._from, self._to = (self._from[0] + sent, self._from[1] + received), now

    @property
    def by_step(self) -> tuple[float, float] | None:
        """(Sent, received) bytes of a step, mean over the steps; None where nothing counts them."""
        if not (self._from and self._to and self._steps):
            return None
        sent, received = (to - begun for to, begun in zip(self._to, self._from, strict=True))
        return sent / self._steps, received / self._steps
