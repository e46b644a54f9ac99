"""Measures the built links before they are used, and the bytes that a lab's device has really sent and received.

Links are measured by a plain TCP connection between neighbours; bytes by the counters of network interfaces.
"""

import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from gsreal.lab.network import ADDRESS_DEVICE, End, Network, in_namespace, prepare_process
from gsreal.lab.throttle import own_place
from gsreal.run.signals import signals_deferred
from gssim.errors import RunFailedError

INSIDE = ("lo", ADDRESS_DEVICE)
"""Interfaces that lead to no other node."""


def interface_bytes(table: Path = Path("/proc/self/net/dev")) -> tuple[int, int] | None:
    """Return (sent, received) bytes of this device since its network was built, headers included; None outside the lab.

    Traffic that an adjacent switch forwards for others is in that switch's counters.
    """
    if own_place() is None:
        return None
    sent = received = 0
    for line in table.read_text(encoding="ascii").splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() not in INSIDE:
            received, sent = received + int(counts.split()[0]), sent + int(counts.split()[8])
    return sent, received


class InterfaceBytes:
    """Bytes that this device has sent and received over steps, with some intervals excluded.

    The kernel's table is read where the steps begin and end, and not between: a reading takes a fifth of a millisecond
    of CPU time, after which a slowed-down device sleeps several times as long, during the next step.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start counting."""
        self._from = interface_bytes()
        self._to: tuple[int, int] | None = None
        self._steps = 0

    def note(self, *, last: bool) -> None:
        """Count a step, which has just ended; `last`: the bytes up to now count."""
        self._steps += 1
        if last:
            self._to = interface_bytes()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Exclude the bytes carried meanwhile, between two steps."""
        before = interface_bytes()
        yield
        after = interface_bytes()
        if self._from and before and after and not self._to:
            sent, received = (at - begun for at, begun in zip(after, before, strict=True))
            self._from = self._from[0] + sent, self._from[1] + received

    @property
    def by_step(self) -> tuple[float, float] | None:
        """(Sent, received) bytes per step, mean over the steps; None if they are not counted."""
        if not (self._from and self._to and self._steps):
            return None
        sent, received = (to - begun for to, begun in zip(self._to, self._from, strict=True))
        return sent / self._steps, received / self._steps


TOLERANCE_RATIO = 0.05
ATTEMPTS = 3
"""Number of measurements on a busy machine; the median counts."""
PATIENCE_S = 5.0
SKIPPED_S, MEASURED_S = 0.1, 0.25
LEAST_BYTES = 60_000
"""Least amount to measure, which takes longer on slow links."""
MOST_MEASURED_S = 5.0
ROUNDS = 7
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Verified:
    """A directed link: requested and measured properties."""

    name: str
    rate_bytes_per_s: float
    measured_bytes_per_s: float
    delay_s: float
    """Requested; 0: not emulated."""
    measured_delay_s: float
    """Half of the round-trip time of one byte."""

    @property
    def faults(self) -> list[str]:
        """Texts of the properties that deviate by more than the tolerance."""
        texts = []
        if abs(self.measured_bytes_per_s / self.rate_bytes_per_s - 1) > TOLERANCE_RATIO:
            asked, got = (rate * 8 / 1e6 for rate in (self.rate_bytes_per_s, self.measured_bytes_per_s))
            texts.append(f"{got:.4g} Mbit/s, not {asked:.4g} ({got / asked - 1:+.0%})")
        if self.delay_s and abs(self.measured_delay_s / self.delay_s - 1) > TOLERANCE_RATIO:
            asked, got = self.delay_s * 1e3, self.measured_delay_s * 1e3
            texts.append(f"a delay of {got:.4g} ms, not {asked:.4g} ({got / asked - 1:+.0%})")
        return texts


def verify(network: Network) -> tuple[Verified, ...]:
    """Return every directed link of the network, measured by a process of the highest priority.

    Raises RunFailedError if a link does not work at all.
    """
    with signals_deferred():
        process = subprocess.Popen(
            [sys.executable, "-c", "from gsreal.lab import verify; verify.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare_process,
            start_new_session=True,
        )
    with process:
        try:
            answer, log = process.communicate(pickle.dumps(network))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        last = log.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise RunFailedError(f"lab: links cannot be measured: {last[0]}")
    links: tuple[Verified, ...] = pickle.loads(answer)
    return links


def main() -> None:
    """Measure the network described on stdin, and write the measurements to stdout."""
    sys.stdout.buffer.write(pickle.dumps(measured(pickle.load(sys.stdin.buffer))))


def measured(network: Network) -> tuple[Verified, ...]:
    """Return every directed link, measured by this process, one after another."""
    links = []
    for wire in network.wires:
        a, b = wire.ends
        there, back = wire.between
        mean_delay_s = (a.delay_s + b.delay_s) / 2  # a round trip does not separate the directions
        delay_s = _settled(partial(_delay_once, a, b), mean_delay_s)
        for ends, name in (((a, b), f"{there} -> {back}"), ((b, a), f"{back} -> {there}")):
            rate = _settled(partial(_rate_once, *ends), ends[0].rate_bytes_per_s)
            links.append(Verified(name, ends[0].rate_bytes_per_s, rate, mean_delay_s, delay_s))
    return tuple(links)


def _settled(measure: Callable[[], float], asked: float) -> float:
    """Return the median of measurements: of one, if it is about the requested value, else of several."""
    values: list[float] = []
    while len(values) < ATTEMPTS:
        values.append(measure())
        if asked and abs(median(values) / asked - 1) < TOLERANCE_RATIO / 2:
            break
    return median(values)


def _rate_once(source: End, target: End) -> float:
    """Return the bytes per second that arrive, once the connection is established."""
    with _connection(source, target) as (sender, receiver):
        stop = threading.Event()

        def send() -> None:
            chunk = bytes(CHUNK_BYTES)
            while not stop.is_set():
                try:
                    sender.send(chunk)
                except OSError:
                    return

        thread = threading.Thread(target=send)
        thread.start()
        try:
            return _arriving(receiver, max(MEASURED_S, LEAST_BYTES / source.rate_bytes_per_s), source.delay_s)
        finally:
            stop.set()
            receiver.close()  # wakes the sender
            thread.join()


def _arriving(receiver: socket.socket, long_s: float, delay_s: float) -> float:
    start_s = time.perf_counter()
    skipped_s = SKIPPED_S + 20 * delay_s  # the window opens within some round trips
    first_s = last_s = 0.0
    arrived = 0
    while not first_s or last_s - first_s < min(long_s, MOST_MEASURED_S):
        size = len(receiver.recv(CHUNK_BYTES))
        last_s = time.perf_counter()
        if not size:
            raise RunFailedError("lab: a link broke while it was measured")
        if first_s:
            arrived += size
        elif last_s - start_s > skipped_s:
            first_s = last_s
    return arrived / (last_s - first_s)


def _delay_once(a: End, b: End) -> float:
    """Return half of the median round-trip time of a byte, in seconds."""
    with _connection(a, b) as (near, far):
        trips = []
        for _ in range(ROUNDS):
            start_s = time.perf_counter()
            near.sendall(b"?")
            far.sendall(far.recv(1))
            near.recv(1)
            trips.append(time.perf_counter() - start_s)
    return median(trips) / 2


@contextmanager
def _connection(source: End, target: End) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a TCP connection over one wire; data in flight at the end are dropped."""
    try:
        with in_namespace(target.namespace, lambda: socket.create_server((target.address, 0))) as server:
            server.settimeout(PATIENCE_S)
            place = server.getsockname()
            near = in_namespace(source.namespace, lambda: socket.create_connection(place, PATIENCE_S))
            far = server.accept()[0]
    except OSError as error:
        raise RunFailedError(f"lab: {target.address} cannot be reached over {source.interface}: {error}") from None
    try:
        for end in (near, far):
            end.settimeout(PATIENCE_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield near, far
    finally:
        near.close()
        far.close()
