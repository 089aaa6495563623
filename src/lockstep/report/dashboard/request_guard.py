"""What the dashboard checks of every request: the host that it names and its token. Adds the headers of answers."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lockstep.report.dashboard.metric_history import json_bytes

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

CONTENT_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d{1,5})?")
_LOCAL_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost"}


class ApiProblem(Exception):
    """A request that gets an error: the field that is wrong, its value, and what helps."""

    def __init__(self, status: int, message: str, field: str = "", value: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.value, self.remedy = status, message, field, value[:200], remedy

    def body(self) -> bytes:
        """The error as JSON."""
        fields = {"field": self.field, "value": self.value, "remedy": self.remedy, "message": self.message}
        return json_bytes({"error": fields})


class RequestGuard:
    """Refuses requests that name another host, that would change something, or that lack the token where they need it.

    A page of another site whose name suddenly leads to this host (DNS rebinding) still sends its own name as `Host`. An
    address, and any port, is allowed there, because the end of an SSH tunnel has another one.

    Args:
        host: the address that the server listens on.
    """

    def __init__(self, app: AsgiApp, token: str, host: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()
        self._local = is_loopback(host)
        self._names = _LOCAL_NAMES | (set() if self._local else {host.lower(), *_own_names()})

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        private = scope["path"].startswith("/api")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = _HEADERS | {"cache-control": "no-store" if private else "no-cache"}
                present = {name.lower() for name, _ in message.get("headers", ())}
                more = [
                    (name.encode(), value.encode()) for name, value in added.items() if name.encode() not in present
                ]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            self._check(scope, private)
        except ApiProblem as problem:
            await answer_problem(problem, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _check(self, scope: Message, private: bool) -> None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._is_own_host(hosts[0].decode("latin-1")):
            shown = ", ".join(each.decode("latin-1") for each in hosts)
            raise ApiProblem(
                421, "this server is not the host that the request names", "Host", shown,
                "open the address that the command printed, or localhost at the end of an SSH tunnel",
            )  # fmt: skip
        if scope["method"] not in ("GET", "HEAD"):
            raise ApiProblem(405, "the dashboard changes nothing", "method", scope["method"], "send a GET")
        given = headers.get(b"authorization", [b""])
        if private and not (len(given) == 1 and hmac.compare_digest(given[0], self._expected)):
            raise ApiProblem(
                401, "the token is missing or wrong", "Authorization", "",
                "open the whole address that `lockstep dashboard` printed, with #token=...",
            )  # fmt: skip

    def _is_own_host(self, value: str) -> bool:
        found = _HOST.fullmatch(value.lower())
        if found is None:
            return False
        name = found[1] or found[2]
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._local


async def answer_problem(problem: ApiProblem, send: Send) -> None:
    """Sends an error as the whole answer."""
    body = problem.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def is_loopback(host: str) -> bool:
    """Whether only this host reaches what listens on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOCAL_NAMES


def _own_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}
