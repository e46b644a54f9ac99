"""How `tc` is told to shape what leaves an interface: a rate, a delay, and acknowledgements before all else."""

from gsreal.lab.network import End
from gssim.cluster import FRAME_BYTES, SEGMENT_BYTES, burst_bytes

QUEUE_FRAMES = 10_000
ACKNOWLEDGEMENTS = (("0x0000", "0xffc0"), ("0x0040", "0xfff0"), ("0x0050", "0xffff"))
"""Lengths of packets (bytes 2 and 3 of the IP header) with their masks: up to 80 bytes, what headers alone come to.
Behind a queue of data they hold up the other direction (measured). Nothing else may overtake: gloo's notices, of 100
bytes, share their connection with data, and a segment that arrives before its turn looks like the loss of those that it
overtook."""

Command = tuple[str, ...]


def wire_bits_per_s(rate_bytes_per_s: float) -> int:
    """Return the rate of frames at which messages have the given rate.

    >>> wire_bits_per_s(12.5e6)
    104558011
    """
    return round(rate_bytes_per_s * 8 * FRAME_BYTES / SEGMENT_BYTES)


def shape(end: End, *, netem: bool) -> list[Command]:
    """Return the commands that shape what leaves an interface; without `netem`, the delay is left to the wire.

    A hierarchical token bucket (HTB): class 1:20 for acknowledgements comes first, class 1:10 takes all else.
    """
    tc: Command = ("tc", "-n", end.namespace)
    device: Command = ("dev", end.interface)
    rate = wire_bits_per_s(end.rate_bytes_per_s)
    burst = ("burst", f"{burst_bytes(end.rate_bytes_per_s)}b")
    common = ("ceil", f"{rate}bit", *burst, "c" + burst[0], burst[1], "quantum", "60000")

    def leaf(place: str, part: float, priority: int) -> Command:
        rates = ("rate", f"{round(rate * part)}bit", *common, "prio", str(priority))
        return (*tc, "class", "add", *device, "parent", "1:1", "classid", place, "htb", *rates)

    def queue(place: str, handle: str) -> Command:
        delay = round(end.delay_s * 1e6)
        kind = ("netem", "delay", f"{delay}us", "limit") if netem and delay else ("pfifo", "limit")
        return (*tc, "qdisc", "add", *device, "parent", place, "handle", handle, *kind, str(QUEUE_FRAMES))

    whole = ("rate", f"{rate}bit", *common)
    filters = (*tc, "filter", "add", *device, "parent", "1:", "protocol", "ip", "prio", "1", "u32")
    return [
        (*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "10"),
        (*tc, "class", "add", *device, "parent", "1:", "classid", "1:1", "htb", *whole),
        leaf("1:10", 0.9, 1),
        leaf("1:20", 0.1, 0),
        queue("1:10", "10:"),
        queue("1:20", "20:"),
        *((*filters, "match", "u16", *length, "at", "2", "flowid", "1:20") for length in ACKNOWLEDGEMENTS),
    ]
