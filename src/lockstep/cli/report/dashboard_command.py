"""`lockstep dashboard`: serves a page about runs on this host."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from lockstep.base.folders import write_private
from lockstep.cli.terminal import REFUSED, require_extra
from lockstep.report.command_events import TERMINAL

TOKEN_VARIABLE = "LOCKSTEP_DASHBOARD_TOKEN"
TOKEN_POWER = "can read your runs"


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or folders that hold run folders.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Whether to open the page in a browser.")] = False,
) -> None:
    """Show runs in a browser, live: curves, stages, waits, hosts and GPUs, samples, incidents, configs.

    It changes nothing in the runs. Stop it with Ctrl-C.

    The page's address, which is printed, contains a token that is new at each start. LOCKSTEP_DASHBOARD_TOKEN, if set,
    is used instead. From another machine: ssh -L 8000:127.0.0.1:PORT HOST.

    Examples:

        lockstep dashboard runs/sort-a runs/sort-b

        lockstep dashboard runs --port 8000 --no-open
    """
    require_extra("dashboard", "lockstep dashboard")
    from lockstep.base.folders import scratch_dir
    from lockstep.base.network import listen
    from lockstep.base.transport.run_token import check_token
    from lockstep.cli.top import show_runs_of
    from lockstep.report.dashboard.dashboard_server import DashboardServer, serve_dashboard
    from lockstep.report.dashboard.request_guard import is_loopback
    from lockstep.report.dashboard.run_catalogue import RunCatalogue
    from lockstep.report.safe_console import SafeConsole

    try:
        given = os.environ.pop(TOKEN_VARIABLE, "").strip()
        token = check_token(given, TOKEN_VARIABLE, TOKEN_POWER) if given else secrets.token_urlsafe(32)
        catalogue = RunCatalogue(runs)
        show_runs_of(runs[0].stat().st_uid)
        listening = listen(host, (port, port))
    except (ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    if not is_loopback(host):
        TERMINAL.note(
            f"the token and all data travel unencrypted to {host}, and whoever records them can read the runs: rather "
            "listen on 127.0.0.1 and use an SSH tunnel"
        )
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    if not catalogue.runs():
        TERMINAL.progress("no run is there yet; those that begin will appear")
    SafeConsole(soft_wrap=True).print(f"{address}#token={token}", markup=False, highlight=False)
    with scratch_dir("lockstep-dashboard-") as folder:
        if browser:
            _open_browser(folder, f"{address}#token={token}")
        serve_dashboard(DashboardServer(catalogue, token, host), listening)


def _open_browser(folder: Path, address: str) -> None:
    """Opens the address in a browser, by a file that only this user can read: all users of a host can see the arguments
    of a process, and with them the token."""
    import threading
    import webbrowser

    page = folder / "dashboard.html"
    content = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}">'
    write_private(page, content.encode())
    # A browser in the terminal returns only when it ends.
    threading.Thread(target=webbrowser.open, args=(page.as_uri(),), name="browser", daemon=True).start()
