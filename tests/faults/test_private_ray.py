"""A Ray that is started for a run, and other users who reach the host."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from needed_systems import needs_ray

from lockstep.config.cluster import RayClusterConfig as Config

pytestmark = needs_ray

STRANGER = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("tasks run as", ray.get(ray.remote(num_cpus=0)(lambda: "another user").remote()))
"""


def connect_as_other_user(address: str, **variables: str) -> str:
    """The output of a program of another user, with these variables, that connects to the Ray at the address."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, address], env={**environment, **variables}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_user_runs_nothing_in_the_ray_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from lockstep.cluster.ray.ray_session import close_session, open_session

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as if for another cluster
    for _ in range(2):  # the second has another token
        open_session(Config(), 1, 0)
        try:
            assert os.environ["RAY_AUTH_MODE"] == "disabled"
            assert "RAY_AUTH_TOKEN" not in os.environ  # which workers of the run would get
            address = ray.get_runtime_context().gcs_address
            assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=60) == 7
            for variables in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}):
                output = connect_as_other_user(address, **variables)
                assert "another user" not in output
                assert "uthenticat" in output, output
        finally:
            close_session()


def test_all_addresses_of_a_head_are_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.cluster.ray.ray_session import RayUnavailable, _check_listening

    def both(host: str, port: int, **more: Any) -> list[Any]:
        return [each for one in ("127.0.0.1", "::1") for each in resolve(one if host == "head" else host, port, **more)]

    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", both)

    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        port = listening.getsockname()[1]
        _check_listening(f"[::1]:{port}")
        _check_listening(f"head:{port}")  # 127.0.0.1 does not listen
    with pytest.raises(RayUnavailable, match="Connection refused"):
        _check_listening(f"[::1]:{port}")
