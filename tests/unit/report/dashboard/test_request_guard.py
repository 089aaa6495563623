"""Every request is checked before anything else sees it: its host, its method, its token."""

import pytest
from dashboard_helpers import TOKEN, ask, make_run, server_of

from lockstep.report.dashboard.dashboard_server import DashboardServer
from lockstep.report.dashboard.request_guard import is_loopback

GOOD = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> DashboardServer:
    return server_of(make_run(tmp_path_factory.mktemp("runs") / "run", 3, end="finished"))


@pytest.mark.parametrize("path", ["/api/runs", "/api", "/api/events?run=x", "/api/runs/x/config", "/api/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {}, {"authorization": ""}, {"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": "Bearer \udcff"}, {"cookie": f"token={TOKEN}"},
    ],
)  # fmt: skip
def test_everything_below_api_needs_the_token(server: DashboardServer, path: str, headers: dict[str, str]) -> None:
    sent = {name: value.encode("utf-8", "surrogateescape") for name, value in headers.items()}
    answer = ask(server, path, headers=sent)  # type: ignore[arg-type]
    assert answer.status_code == 401 and TOKEN not in answer.text
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["remedy"].startswith("open the whole address")


def test_the_token_does_not_count_in_an_address(server: DashboardServer) -> None:
    assert ask(server, f"/api/runs?token={TOKEN}", headers={}).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8123", 200), ("LOCALHOST:1", 200), ("127.0.0.1:9", 200), ("[::1]:80", 200),
        ("127.8.9.10", 200), ("evil.example", 421), ("localhost.evil.example", 421), ("127.0.0.1.evil.example:80", 421),
        ("192.168.1.5", 421), ("", 421), ("localhost:80:80", 421), ("[::1", 421), ("2130706433", 421),
    ],
)  # fmt: skip
def test_only_this_host_is_served(server: DashboardServer, host: str, status: int) -> None:
    for path in ("/api/runs", "/"):
        assert ask(server, path, headers={**GOOD, "host": host}).status_code == status


def test_a_server_for_others_is_reached_by_address_and_name(tmp_path) -> None:  # type: ignore[no-untyped-def]
    open_server = server_of(make_run(tmp_path / "run", 1), host="0.0.0.0")
    assert ask(open_server, "/api/runs", headers={**GOOD, "host": "192.168.1.5:80"}).status_code == 200
    assert ask(open_server, "/api/runs", headers={**GOOD, "host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server: DashboardServer, method: str) -> None:
    answer = ask(server, "/api/runs", method=method)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/", "/api/runs", "/nothing", "/api/runs/x/config", "/api/runs/%00/config"])
def test_all_answers_have_the_headers(server: DashboardServer, path: str) -> None:
    headers = ask(server, path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY" and headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == ("no-store" if path.startswith("/api") else "no-cache")
    assert "server" not in headers and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml", "/..%2f..%2fdashboard_server.py", "/%2e%2e/dashboard_server.py", "/static/../../x",
        "//etc/passwd", "/etc/passwd", "/dashboard_server.py", "/C:\\x", "/index.html/", "/index.html%00",
        "/api/runs/..%2f..%2fetc/config", "/api/runs/%2fetc%2fpasswd/metrics",
    ],
)  # fmt: skip
def test_no_path_reaches_the_disk(server: DashboardServer, path: str) -> None:
    answer = ask(server, path)
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"field", "value", "remedy", "message"}


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "node7"))
