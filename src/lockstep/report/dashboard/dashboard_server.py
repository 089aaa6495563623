"""The HTTP server of `lockstep dashboard`: what each address answers. See docs/dashboard.md for their form."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import Annotated, Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from lockstep.ledger.errors import LedgerError
from lockstep.report.dashboard.metric_history import metric_facts
from lockstep.report.dashboard.request_guard import ApiProblem, RequestGuard
from lockstep.report.dashboard.run_catalogue import RunCatalogue
from lockstep.report.dashboard.run_feed import RunBusy, RunFeed
from lockstep.report.dashboard.static_files import static_file
from lockstep.report.server_connections import ACCEPTED_AT_ONCE, QueueingServer, connection_type

T = TypeVar("T")
Step = Annotated[int | None, Query(ge=0)]
MOST_NAMES = 256
MOST_POINTS = 5000
HEADER_BYTES = 32768
CONNECTIONS = 256


class DashboardServer:
    """The application of a dashboard; `app` is the ASGI callable.

    Args:
        host: the address that it listens on.
    """

    def __init__(self, catalogue: RunCatalogue, token: str, host: str) -> None:
        self._catalogue = catalogue
        web = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for path, answer in (
            ("/api/runs", self._runs),
            ("/api/runs/{run}/metrics", self._metrics),
            ("/api/runs/{run}/series", self._series),
            ("/{name:path}", self._page),
        ):
            web.add_api_route(path, answer, methods=["GET"])
        web.add_exception_handler(ApiProblem, _answer_problem)
        web.add_exception_handler(RequestValidationError, _answer_invalid)
        web.add_exception_handler(HTTPException, _answer_http)
        self.app = RequestGuard(web, token, host)

    async def _runs(self) -> Response:
        return _json({"runs": await asyncio.to_thread(self._overviews)})

    def _overviews(self) -> list[dict[str, Any]]:
        found = []
        for name, feed in self._catalogue.runs().items():
            with suppress(LedgerError, OSError, RunBusy):  # one that was removed meanwhile, or is no run after all
                found.append({"id": name, "folder": str(feed.folder), **asdict(feed.overview())})
        return found

    async def _metrics(self, run: str) -> Response:
        names, steps = await self._read(run, RunFeed.metric_names)
        return _json({"names": [metric_facts(name) for name in names], "steps": steps})

    async def _series(
        self,
        run: str,
        name: Annotated[list[str], Query(max_length=MOST_NAMES)],
        first: Annotated[int | None, Query(alias="from", ge=0)] = None,
        last: Annotated[int | None, Query(alias="to", ge=0)] = None,
        points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 600,
    ) -> Response:
        return _json({"series": await self._read(run, lambda feed: feed.curves(name, first, last, points))})

    async def _page(self, name: str) -> Response:
        if name.startswith("api/"):
            raise ApiProblem(404, "there is no such address", "path", f"/{name}", "see docs/dashboard.md")
        found = await asyncio.to_thread(static_file, name or "index.html")
        if found is None:
            raise ApiProblem(404, "the page has no such file", "path", f"/{name}", "open /")
        return Response(found[0], media_type=found[1])

    async def _read(self, run: str, read: Callable[[RunFeed], T]) -> T:
        """Reads a run in another thread. Raises ApiProblem."""
        feed = self._catalogue.run(run)
        if feed is None:
            raise ApiProblem(404, "there is no such run", "run", run, "take an id of /api/runs")
        try:
            return await asyncio.to_thread(read, feed)
        except FileNotFoundError as error:
            raise ApiProblem(410, "the run's folder was removed", "run", run, "choose another run") from error
        except RunBusy as error:
            raise ApiProblem(503, str(error), "run", run, "try again") from error
        except (LedgerError, OSError) as error:
            raise ApiProblem(409, f"the run cannot be read: {error}", "run", run, "see the message") from error


class _EndingServer(QueueingServer):
    """Ends at once on Ctrl-C: its open connections are streams that end with nothing lost."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = True
        super().handle_exit(sig, frame)


def http_server_of(server: DashboardServer) -> uvicorn.Server:
    """The server of the application; `run(sockets=[...])` serves until Ctrl-C or SIGTERM, or until `should_exit` is
    set."""
    return _EndingServer(
        uvicorn.Config(
            server.app,
            http=connection_type(),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            backlog=ACCEPTED_AT_ONCE,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
    )


def serve_dashboard(server: DashboardServer, listening: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    with suppress(KeyboardInterrupt):  # uvicorn raises it again when everything has ended
        http_server_of(server).run(sockets=[listening])


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _answer_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiProblem)
    return Response(error.body(), error.status, media_type="application/json")


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    return await _answer_problem(
        request, ApiProblem(400, str(first["msg"]), field, str(first.get("input", "")), "see docs/dashboard.md")
    )


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _answer_problem(request, ApiProblem(error.status_code, str(error.detail), "path", request.url.path))
