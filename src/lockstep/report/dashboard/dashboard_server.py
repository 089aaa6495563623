"""The HTTP server of `lockstep dashboard`: what each address answers. See docs/dashboard.md for their form."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any, TypeVar

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from lockstep.ledger.errors import LedgerError
from lockstep.report.completion_samples import STORED_CHARS
from lockstep.report.dashboard.config_view import changed_keys
from lockstep.report.dashboard.event_stream import EventStream
from lockstep.report.dashboard.metric_history import json_bytes, metric_facts
from lockstep.report.dashboard.request_guard import ApiProblem, RequestGuard
from lockstep.report.dashboard.run_catalogue import RunCatalogue
from lockstep.report.dashboard.run_feed import UNREADABLE, RunBusy
from lockstep.report.dashboard.run_overviews import RunOverviews
from lockstep.report.dashboard.shown_run import ShownRun
from lockstep.report.dashboard.static_files import static_file
from lockstep.report.server_connections import QueueingServer, bounded_config

T = TypeVar("T")
Step = Annotated[int | None, Query(ge=0)]
Chars = Annotated[int, Query(ge=1, le=1_000_000)]
MOST_LISTENED = 32
MOST_NAMES = 256
MOST_POINTS = 5000
HEADER_BYTES = 32768
CONNECTIONS = 256
THREADS = 16
"""More than processors: some wait for a first look, or for a slow disk."""
READ_AHEAD = 4
"""Runs whose metrics are read before a page asks for them."""


class DashboardServer:
    """The application of a dashboard; `app` is the ASGI callable.

    Args:
        host: the address that it listens on.
    """

    def __init__(self, catalogue: RunCatalogue, token: str, host: str) -> None:
        self._catalogue = catalogue
        self._threads = ThreadPoolExecutor(THREADS, "dashboard")
        self._overviews = RunOverviews(catalogue, self._threads)
        web = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self.events = EventStream(catalogue.run)
        for path, answer in (
            ("/api/runs", self._runs),
            ("/api/runs/{run}/metrics", self._metrics),
            ("/api/runs/{run}/series", self._series),
            ("/api/runs/{run}/stages", self._stages),
            ("/api/runs/{run}/waits", self._waits),
            ("/api/runs/{run}/hosts", self._hosts),
            ("/api/runs/{run}/samples", self._samples),
            ("/api/runs/{run}/samples/diff", self._sample_diff),
            ("/api/runs/{run}/incidents", self._incidents),
            ("/api/runs/{run}/incidents/{incident}/file", self._incident_file),
            ("/api/runs/{run}/config", self._config),
            ("/api/runs/{run}/communication", self._communication),
            ("/api/diff", self._config_diff),
            ("/api/events", self._events),
            ("/{name:path}", self._page),
        ):
            web.add_api_route(path, answer, methods=["GET"])
        web.add_exception_handler(ApiProblem, _answer_problem)
        web.add_exception_handler(RequestValidationError, _answer_invalid)
        web.add_exception_handler(HTTPException, _answer_http)
        self.app = RequestGuard(web, token, host)

    def read_ahead(self) -> None:
        """Reads the metrics of the first runs while the browser starts. Returns at once."""
        shown = list(self._catalogue.runs().values())[:READ_AHEAD]

        def read() -> None:
            for each in shown:
                with suppress(LedgerError, *UNREADABLE, OSError, RunBusy):
                    each.feed.metric_names()

        threading.Thread(target=read, name="dashboard read ahead", daemon=True).start()

    def close(self) -> None:
        """Ends the watching of runs."""
        self._catalogue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _runs(self) -> Response:
        return _json({"runs": await self._overviews.read()})

    async def _metrics(self, run: str) -> Response:
        names, steps = await self._read(run, lambda shown: shown.feed.metric_names())
        return _json({"names": [metric_facts(name) for name in names], "steps": steps})

    async def _series(
        self,
        run: str,
        name: Annotated[list[str], Query(max_length=MOST_NAMES)],
        first: Annotated[int | None, Query(alias="from", ge=0)] = None,
        last: Annotated[int | None, Query(alias="to", ge=0)] = None,
        points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 600,
    ) -> Response:
        return _json({"series": await self._read(run, lambda shown: shown.feed.curves(name, first, last, points))})

    async def _stages(
        self,
        run: str,
        start: Annotated[float | None, Query(alias="from")] = None,
        end: Annotated[float | None, Query(alias="to")] = None,
    ) -> Response:
        return _json(await self._read(run, lambda shown: shown.stages(start, end)))

    async def _waits(self, run: str) -> Response:
        return _json(await self._read(run, ShownRun.waits))

    async def _hosts(self, run: str) -> Response:
        return _json(await self._read(run, ShownRun.hosts))

    async def _samples(
        self,
        run: str,
        step: Step = None,
        query: Annotated[str, Query(max_length=1000)] = "",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
        chars: Chars = STORED_CHARS,
    ) -> Response:
        return _json(await self._read(run, lambda shown: shown.samples(step, query, offset, limit, chars)))

    async def _sample_diff(
        self,
        run: str,
        prompt_id: str,
        a: Annotated[int, Query(ge=0)],
        b: Annotated[int, Query(ge=0)],
        chars: Chars = STORED_CHARS,
    ) -> Response:
        return _json(await self._read(run, lambda shown: shown.sample_diff(prompt_id, a, b, chars)))

    async def _incidents(self, run: str) -> Response:
        return _json({"incidents": await self._read(run, ShownRun.incidents)})

    async def _incident_file(self, run: str, incident: str, name: str) -> Response:
        found = await self._read(run, lambda shown: shown.incident_file(incident, name))
        if found is None:
            raise ApiProblem(404, "the incident has no such file", "name", name, "take one of its `files`")
        return _json({"name": name, "text": found[0], "cut": found[1]})

    async def _config(self, run: str) -> Response:
        return _json({"config": await self._read(run, ShownRun.config)})

    async def _communication(self, run: str) -> Response:
        return _json(await self._read(run, ShownRun.communication))

    async def _config_diff(self, a: str, b: str) -> Response:
        before, after = [await self._read(run, lambda shown: shown.feed.config()) for run in (a, b)]
        return _json({"changed": changed_keys(before, after)})

    async def _events(self, request: Request, run: Annotated[list[str], Query(max_length=MOST_LISTENED)]) -> Response:
        for each in run:
            if await self._in_thread(self._catalogue.run, each) is None:
                raise _unknown_run(each)
        events = self.events.follow(list(dict.fromkeys(run)), request.headers.get("last-event-id", ""))
        return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def _page(self, name: str) -> Response:
        if name.startswith("api/"):
            raise ApiProblem(404, "there is no such address", "path", f"/{name}", "see docs/dashboard.md")
        found = await self._in_thread(static_file, name or "index.html")
        if found is None:
            raise ApiProblem(404, "the page has no such file", "path", f"/{name}", "open /")
        return Response(found[0], media_type=found[1])

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def _read(self, run: str, read: Callable[[ShownRun], T]) -> T:
        """Reads a run in another thread. Raises ApiProblem."""
        shown = await self._in_thread(self._catalogue.run, run)
        if shown is None:
            raise _unknown_run(run)
        try:
            return await self._in_thread(read, shown)
        except FileNotFoundError as error:
            raise ApiProblem(410, "the run's folder was removed", "run", run, "choose another run") from error
        except RunBusy as error:
            raise ApiProblem(503, str(error), "run", run, "try again") from error
        except (LedgerError, *UNREADABLE, OSError) as error:
            why = str(error) if isinstance(error, LedgerError | OSError) else f"{type(error).__name__}: {error}"
            raise ApiProblem(409, f"the run cannot be read: {why}", "run", run, "see the message") from error


def _unknown_run(run: str) -> ApiProblem:
    return ApiProblem(404, "there is no such run", "run", run, "take an id of /api/runs")


class _EndingServer(QueueingServer):
    """Ends at once on Ctrl-C: its open connections are streams, which a page opens again."""

    def __init__(self, config: uvicorn.Config, events: EventStream) -> None:
        super().__init__(config)
        self._events = events

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._events.closing = True
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = True
        super().handle_exit(sig, frame)


def http_server_of(server: DashboardServer) -> uvicorn.Server:
    """The server of the application; `run(sockets=[...])` serves until Ctrl-C or SIGTERM, or until `should_exit` is
    set."""
    return _EndingServer(bounded_config(server.app, CONNECTIONS, HEADER_BYTES, 1, starts_app=False), server.events)


def serve_dashboard(server: DashboardServer, listening: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    server.read_ahead()
    try:
        with suppress(KeyboardInterrupt):  # uvicorn raises it again when everything has ended
            http_server_of(server).run(sockets=[listening])
    finally:
        server.close()


def _json(content: Any, status: int = 200) -> Response:
    return Response(json_bytes(content), status, media_type="application/json")


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
