"""Drives a headless Chromium over its debugging pipe: no driver program and no other package is needed."""

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""None where this machine has no browser; on Debian: `apt-get install chromium`."""
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip
_KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27}
"""Of keys that the browser itself acts upon."""
_WATCH = """
window.__tasks = []; window.__refused = [];
new PerformanceObserver(list => list.getEntries().forEach(e => __tasks.push([e.startTime, e.duration])))
  .observe({ type: 'longtask', buffered: true });
document.addEventListener('securitypolicyviolation', e => __refused.push(`${e.violatedDirective} ${e.blockedURI}`));
"""
"""Collects main-thread tasks of 50 ms and more, and what the content security policy refused."""


class BrowserError(RuntimeError):
    """The browser did not do what it was asked, or its page's script failed."""


class Chromium:
    """A headless browser with a fresh profile; a context manager that ends it."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        if CHROMIUM is None:
            raise BrowserError("no Chromium on this machine. On Debian: apt-get install chromium")
        self.timeout_s = timeout_s
        self._next = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self.events: defaultdict[str, queue.Queue[dict[str, Any]]] = defaultdict(queue.Queue)
        """By session; those of the whole browser under an empty name."""
        self._folder = tempfile.mkdtemp(prefix="lockstep-chromium-")
        commands, self._to = _high(os.pipe())
        self._from, replies = _high(os.pipe())
        with open(Path(self._folder, "stderr"), "wb") as log:  # noqa: PTH123
            self._process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{replies}', "chromium", CHROMIUM, *_OPTIONS,
                 f"--user-data-dir={self._folder}/profile", "about:blank"],
                pass_fds=(commands, replies), stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        os.close(commands)
        os.close(replies)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close", timeout_s=5)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._to)
        self._reader.join(5)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(
        self, method: str, session: str | None = None, timeout_s: float | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        _write_all(self._to, json.dumps(message).encode() + b"\0")
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._answers, timeout_s or self.timeout_s):
                raise BrowserError(f"no answer to {method} within {timeout_s or self.timeout_s:.0f} s")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    def page(self, width: int = 1440, height: int = 900, scheme: str = "light") -> "BrowserPage":
        """A new page; `scheme` is what it prefers: light or dark."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = BrowserPage(self, session, target)
        page.size(width, height)
        page.prefer(scheme)
        return page

    def trace(self) -> None:
        """Records the main threads' tasks until `traced_tasks`."""
        self.call("Tracing.start", traceConfig={"includedCategories": ["disabled-by-default-devtools.timeline"]})

    def traced_tasks(self) -> list[tuple[float, float]]:
        """(wall, CPU) milliseconds of each task of the busiest page's main thread since `trace`.

        The time on the CPU leaves out what other processes of a busy machine took.
        """
        list(_drain(self.events[""]))
        self.call("Tracing.end")
        found: list[dict[str, Any]] = []
        while (event := self.events[""].get(timeout=self.timeout_s))["method"] != "Tracing.tracingComplete":
            if event["method"] == "Tracing.dataCollected":
                found += event["params"]["value"]
        mains = {(each["pid"], each["tid"]) for each in found if each.get("args", {}).get("name") == "CrRendererMain"}
        tasks = {
            thread: [(each.get("dur", 0) / 1e3, each.get("tdur", 0) / 1e3) for each in found
                     if each["name"] == "RunTask" and (each["pid"], each["tid"]) == thread]
            for thread in mains
        }  # fmt: skip
        return max(tasks.values(), key=lambda each: sum(cpu for _, cpu in each), default=[])

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                chunk = os.read(self._from, 1 << 20)
            except OSError:
                return
            if not chunk:
                return
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    with self._arrived:
                        self._answers[message["id"]] = message
                        self._arrived.notify_all()
                else:
                    self.events[message.get("sessionId", "")].put(message)


class BrowserPage:
    """One page. What its scripts logged and threw, and what its policy refused, is kept."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")
        self.do("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)

    def close(self) -> None:
        """Closes the page."""
        self.browser.call("Target.closeTarget", targetId=self.target)

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def size(self, width: int, height: int) -> None:
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str, reduced_motion: bool = False) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        features += [{"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"}]
        self.do("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        self.do("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        found = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            detail = found["exceptionDetails"]
            raise BrowserError(detail.get("exception", {}).get("description") or detail["text"])
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = 20.0) -> Any:
        """The expression's value as soon as it is true; True for an element."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with contextlib.suppress(BrowserError):  # the page may be between two documents
                if value := self.run(f"(v => v instanceof Node ? true : v)({script})"):
                    return value
            time.sleep(0.05)
        raise BrowserError(f"not true within {timeout_s:.0f} s: {script}; problems: {self.gather()[:5]}")

    def key(self, key: str, text: str = "") -> None:
        """Presses a key, such as `ArrowRight`, or `?` with its text."""
        common = {"key": key, "windowsVirtualKeyCode": _KEY_CODES.get(key, 0)}
        self.do("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.do("Input.dispatchKeyEvent", type="keyUp", **common)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Presses the left button at `start`, moves to `end` and releases it."""
        for kind, (x, y), held in (
            ("mouseMoved", start, 0), ("mousePressed", start, 1), ("mouseMoved", end, 1), ("mouseReleased", end, 0)
        ):  # fmt: skip
            button = "none" if kind == "mouseMoved" and not held else "left"
            self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=held, clickCount=1)

    def screenshot(self, whole: bool = False) -> bytes:
        """A PNG of what is in sight, or of the whole page."""
        data = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)

    def long_tasks(self) -> list[tuple[float, float]]:
        """(start, duration) in milliseconds of the main-thread tasks of 50 ms and more so far."""
        return [(start, duration) for start, duration in self.run("window.__tasks")]

    def refused(self) -> list[str]:
        """What the content security policy refused so far."""
        return list(self.run("window.__refused"))

    def gather(self) -> list[str]:
        """Errors and warnings so far: of scripts, of the console and of the browser's log."""
        self.problems += [text for event in _drain(self.browser.events[self.session]) if (text := _problem(event))]
        return self.problems


def _problem(event: dict[str, Any]) -> str | None:
    parameters = event.get("params", {})
    if event["method"] == "Runtime.exceptionThrown":
        detail = parameters["exceptionDetails"]
        return str(detail.get("exception", {}).get("description") or detail["text"])
    if event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
        return " ".join(str(each.get("description") or each.get("value")) for each in parameters["args"])
    if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
        return f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}"
    return None


def _drain(events: "queue.Queue[dict[str, Any]]") -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield events.get_nowait()
        except queue.Empty:
            return


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _high(ends: tuple[int, int]) -> tuple[int, int]:
    """The two ends of a pipe as numbers above those that the browser takes for itself."""
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
