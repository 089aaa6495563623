"""The pictures of docs/dashboard.md: the views of a real run in headless Chromium, while one of its ranks is stopped.

    python -m benchmarks.dashboard_pictures docs/images --run runs/demo/sort-grpo --beside runs/demo/sort-grpo-fast

Curves and configs are those of both runs, and the view of many GPUs has invented figures. The run must be training on
this host: `script/demo`, or `lockstep train examples/grpo_sort.yaml`. A trainer rank gets SIGSTOP; the graph of waits
is pictured with the verdict on it, and the incident once the run has recovered.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.chromium import BrowserPage, Chromium
from benchmarks.dashboard_page import open_view, run_ids, served, show_many_gpus
from lockstep.base.folders import read_run_id
from lockstep.run.run_id import RUN_ID_FILE
from lockstep.watch.beacon.reader import read_beacons

LIMIT_S = 120.0
SIZES = {"wide": (1280, 800), "narrow": (390, 760)}
COMPARED = {"curves": "&from=1&to=100", "config": ""}
"""Views that show several runs: curves of the first steps, in which all runs have some."""
STREAMED_S = 12.0
"""How long a live view collects what comes before its picture."""
EVALUATED = "[...document.querySelectorAll('.sample')].find(e => e.textContent.includes('evaluation'))"
"""A sample of an evaluation, whose prompts come again in other steps."""
NAMED = "document.querySelector('.verdict')?.textContent.includes('stopped')"
"""The verdict on the stopped rank: seconds later the run has replaced it."""


def pid_of_rank(run: Path, role: str, rank: int) -> int:
    """The pid of a rank of a run on this host. Raises SystemExit."""
    for state in read_beacons(read_run_id(run / RUN_ID_FILE)):
        if (state.role, state.rank) == (role, rank) and Path(f"/proc/{state.pid}").exists():
            return state.pid
    raise SystemExit(f"{run} has no rank {rank} of its {role} on this host: start the run with two trainer ranks")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process, and resumes it at the end, unless the run has replaced it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def picture(page: BrowserPage, file: Path) -> None:
    """Writes what is in sight as a PNG. Raises SystemExit if the page had an error."""
    page.until("document.querySelector('#live').dataset.state === 'live'")
    time.sleep(1)
    file.write_bytes(page.screenshot())
    if problems := page.gather():
        raise SystemExit(f"{file.name}: {problems}")
    print(file)


def live_views(page: BrowserPage, address: str, folder: Path, run: str, both: str) -> None:
    """The views of a run that trains. `run` is the part of an address that chooses it, `both` that of several."""
    for view in ("curves", "stages", "hosts", "samples", "communication", "config"):
        more = both + COMPARED[view] if view in COMPARED else run
        open_view(page, address, view, more + ("&step=40" if view == "samples" else ""))
        if view == "hosts":
            time.sleep(STREAMED_S)
        if view == "samples":
            page.until(EVALUATED)
            page.run(f"{EVALUATED}.querySelector('button').click()")
            page.until("document.querySelectorAll('.compare pre').length > 2")
            page.run("document.activeElement.blur()")
        picture(page, folder / f"dashboard-{view}.png")
    open_view(page, address, "hosts", run)
    show_many_gpus(page)
    picture(page, folder / "dashboard-gpus.png")


def dark_views(browser: Chromium, address: str, folder: Path, run: str, both: str) -> None:
    """The page in the dark, wide and on a phone."""
    for size, view, chosen in (("wide", "communication", run), ("narrow", "curves", both + COMPARED["curves"])):
        page = browser.page(*SIZES[size], "dark")
        open_view(page, address, view, chosen)
        picture(page, folder / f"dashboard-{'dark' if size == 'wide' else size}.png")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--run", type=Path, required=True, help="a run that trains on this host")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], help="other runs, whose curves are overlaid")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with served(chosen.run, *chosen.beside) as address, Chromium() as browser:
        page = browser.page(*SIZES["wide"])
        open_view(page, address, "config")
        ids = run_ids(page, address)
        run = f"&runs={ids[chosen.run.name]}"
        both = run + "".join(f"&runs={ids[each.name]}" for each in chosen.beside)
        live_views(page, address, chosen.folder, run, both)
        dark_views(browser, address, chosen.folder, run, both)
        with stopped(pid_of_rank(chosen.run, "policy", 1)):
            open_view(page, address, "waits", run)
            page.until(NAMED, LIMIT_S)
            picture(page, chosen.folder / "dashboard-waits.png")
        open_view(page, address, "incidents", run)
        page.until("document.querySelector('.incident')", LIMIT_S)
        picture(page, chosen.folder / "dashboard-incidents.png")


if __name__ == "__main__":
    main()
