import selectors
import sys

from lockstep.watch.agent.worker_spawner import SpawnRequest, WorkerSpawner


def test_cancelled_requests_are_no_failures_of_the_fork_server() -> None:
    refused: list[str] = []
    with selectors.DefaultSelector() as selector:
        spawner = WorkerSpawner(selector, on_exit=print)
        for number in range(3):
            argv = [sys.executable, "-m", "json.tool"]
            spawner.spawn(
                SpawnRequest(f"w{number}", argv, {}, "log", ".", ("json",), None, print, refused.append)
            )  # fmt: skip
            (server,) = spawner._servers.values()
            server.forking = server.waiting.popleft()  # the request was sent
            spawner.cancel_pending("cancelled")
            assert server.process.wait(30) < 0
        assert refused == ["cancelled"] * 3 and not spawner._servers
        assert not any(spawner._failures.values()), "the next worker starts with preloaded modules"
