"""One torch thread per test process: two of them share two cores, and the number of threads decides the last bits."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from lockstep.base.folders import new_run_id
from lockstep.report.warning_handler import WarningHandler
from marked_files import MarkedFiles

try:
    from _pytest.nodeid import coerce_node_id
except ImportError:  # pytest before 9.2

    def coerce_node_id(value: str) -> str:
        return value


if TYPE_CHECKING:
    from lockstep.cluster.local_cluster import LocalCluster
    from s3_server import S3Server

UNIT = Path(__file__).with_name("unit")
MARKED = MarkedFiles(Path(__file__).parent)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in what a shell starts in the background; the processes that tests interrupt would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("lockstep", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("lockstep")


gc.disable()  # until all tests are collected: it would look through thousands of them, again and again


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of which `-m` takes nothing, before they import torch; not those that were asked for by name."""
    expression = str(config.getoption("markexpr") or "")
    if not expression or not collection_path.name.startswith("test_") or not collection_path.is_file():
        return None
    if collection_path in {Path(each.partition("::")[0]).absolute() for each in config.args}:
        return None
    return None if MARKED.may_take(expression, collection_path) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keeps what lives until the end out of each later garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that share a fixture of their module go to one worker, which makes it once. So do the unit tests of a file:
    thousands of them take milliseconds, less than to hand out each."""
    fixtures = getattr(item, "_fixtureinfo", None)
    shares = any(each[-1].scope == "module" for each in fixtures.name2fixturedefs.values()) if fixtures else False
    if (shares or UNIT in item.path.parents) and item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of an `xdist_group` on one worker: pytest-xdist 3.8 writes the group into an attribute of an item
    that pytest 9.2 no longer reads."""
    for item in items:
        named = getattr(item, "_nodeid", item.nodeid)
        if named != item.nodeid:
            item._id = coerce_node_id(named)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Removes the group from the name of a test, so that `--last-failed` finds it again without pytest-xdist."""
    if hasattr(report, "node") and report.nodeid.rfind("@") > report.nodeid.rfind("]"):
        report.nodeid = report.nodeid.rpartition("@")[0]


@pytest.fixture(autouse=True)
def no_leftover_log_handlers() -> Iterator[None]:
    """A command that a test calls in its own process shows warnings on the terminal until that process ends."""
    yield
    for handler in [each for each in logging.getLogger().handlers if isinstance(each, WarningHandler)]:
        logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["LocalCluster"]:
    """Worker processes of a run of this module's own; a module may have another one under the same name."""
    from lockstep.cluster.local_cluster import LocalCluster
    from lockstep.config.cluster import LocalClusterConfig as Config

    os.environ["OMP_NUM_THREADS"] = "1"
    run = new_run_id(request.path.stem.removeprefix("test_"))
    made = LocalCluster(Config(device="cpu"), run, tmp_path_factory.mktemp("run"), generation=1, token=None)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def s3_server() -> "Iterator[S3Server]":
    """An S3 server on the loopback interface; skips where the extra `s3` or moto is not installed."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from s3_server import start_server

    server = start_server()
    yield server
    server.kill()


@pytest.fixture
def s3_url(s3_server: "S3Server", monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The address of an empty prefix there; the environment has its credentials."""
    import s3fs

    from s3_server import KEYS

    for name, value in (*KEYS.items(), ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_server.port}")):
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(request.node.nodeid))}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/runs"
