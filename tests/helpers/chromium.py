"""A headless Chromium, driven by the DevTools protocol over a pipe: no driver is installed for it."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
KEYS = {"Tab": 9, "Enter": 13, "End": 35, "ArrowRight": 39}
PATIENCE_S = 120.0


def program() -> str | None:
    """Return Chromium's path; None where it is not installed."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """A running Chromium with one page."""

    def __init__(self, process: subprocess.Popen[bytes], writes: int, reads: int) -> None:
        self._process, self._writes, self._reads = process, writes, reads
        self._count, self._buffer, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return what a method of the protocol gives."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer.get("result", {})

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._reads, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def open(
        self, file: Path, *, wide: int = 1200, high: int = 900, scheme: str = "light", media: str = "screen"
    ) -> None:
        """Load a file in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=wide, height=high, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=file.resolve().as_uri())
        end = time.monotonic() + PATIENCE_S
        here = file.resolve().as_uri()
        while self.evaluate("[document.readyState, location.href]") != ["complete", here]:
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, *, seconds: float = 10.0) -> Any:
        """Return the value of an expression once it is true: what an event shows may come a frame later.

        After `seconds`, the value that it has then.
        """
        until_s = time.monotonic() + seconds
        while not (value := self.evaluate(expression)) and time.monotonic() < until_s:
            time.sleep(0.02)
        return value

    def click(self, x: float, y: float, *, until: str, tries: int = 5) -> Any:
        """Click at a place, as a person does, and return the value of the expression `until` once it is true.

        A series of many marks knows from the pointer's last move which one is below it, and forgets this when it is
        drawn anew, as while a page is still drawn for the first time. So the pointer moves a little before each click,
        as a hand does, and a click without effect is repeated.
        """
        value = None
        for _ in range(tries):
            for place in (x + 1, x):
                self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place, y=y)
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, x=x, y=y)
            if value := self.wait_for(until, seconds=10.0 / tries):
                break
        return value

    def main_thread_ms(self) -> float:
        """Return the processor's time of the page's main thread since the page was opened, or since the first call.

        Unlike the clock's time, it is the same on a busy machine.
        """
        self.call("Performance.enable", timeDomain="threadTicks")
        metrics = self.call("Performance.getMetrics")["metrics"]
        return 1e3 * next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    def press(self, key: str) -> None:
        """Press a key, as a person does."""
        same: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **same, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def roles(self) -> list[tuple[str, str]]:
        """Return (role, name) of what a screen reader is told."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored", False)
        ]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Give a Chromium that ends with the block; `folder`: for its profile."""
    path = program()
    assert path is not None
    to_read, writes = os.pipe()
    reads, to_write = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_read, to_write)]

    def pipes() -> None:  # Chromium reads from 3 and writes to 4
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    # Chromium drops clicks and keys, but no movement, until it has shown the first frame of a page.
    options += ["--allow-pre-commit-input", "--no-first-run", "--disable-dev-shm-usage"]
    process = subprocess.Popen(
        [path, *options, "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(3, 4),
        preexec_fn=pipes,
    )
    for end in (*high, to_read, to_write):
        os.close(end)
    try:
        yield Browser(process, writes, reads)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for end in (writes, reads):
            os.close(end)
