"""An unreachable hub is noticed at once, in one sentence."""

import socket
import time
from collections.abc import Iterator

import pytest

from lockstep.base import hub
from lockstep.base.hub import hub_problem
from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_rows import HubDataUnreachable
from lockstep.data.datasets import load_rows


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub._connection_problem.cache_clear()
    yield
    hub._connection_problem.cache_clear()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_server_that_listens_is_reachable_and_offline_mode_asks_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub_problem({"HF_ENDPOINT": address + "/"}) == ""
    assert hub_problem({"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HUB_OFFLINE": "1"}) == ""


def test_the_reason_names_the_address() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    assert hub_problem({"HF_ENDPOINT": address}) == f"{address} cannot be reached (Connection refused)"
    unknown = hub_problem({"HF_ENDPOINT": "https://hub.invalid"})
    assert unknown == "https://hub.invalid cannot be reached (the name hub.invalid cannot be looked up)"


def test_the_reason_does_not_contain_the_mirrors_password() -> None:
    port = free_port()
    reason = hub_problem({"HF_ENDPOINT": f"http://anna:hunter22@127.0.0.1:{port}/hf"})
    assert reason == f"http://127.0.0.1:{port}/hf cannot be reached (Connection refused)"


def test_a_proxy_is_what_must_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    assert hub_problem({}) == "https://huggingface.co cannot be reached through the proxy (Connection refused)"
    hub._connection_problem.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{server.getsockname()[1]}")
        assert hub_problem({}) == ""


def test_a_dataset_of_an_unreachable_hub_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    began = time.monotonic()
    with pytest.raises(HubDataUnreachable) as caught:
        load_rows(DatasetConfig(path="someone/some-data"))
    assert time.monotonic() - began < 10  # datasets itself repeats requests for half a minute
    text = str(caught.value)
    assert f"{address} cannot be reached (Connection refused)" in text and "\n" not in text
    assert all(word in text for word in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "local path"))
    assert before == (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)
