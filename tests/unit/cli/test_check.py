"""The command `lockstep check`: what it prints and how it ends."""

import json
import os
import socket
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.config.load import load_config
from lockstep.doctor.check.wanted import needs_of


def test_json_is_all_that_is_printed() -> None:
    result = CliRunner().invoke(app, ["check", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["passed"] else 1)
    assert set(report) == {"passed", "counts", "rungs", "findings"}


def _found(result: Result) -> dict[str, dict[str, str]]:
    return {found["id"]: found for found in json.loads(result.stdout)["findings"]}


def test_an_interface_that_is_not_there_ends_it_with_1() -> None:
    result = CliRunner().invoke(app, ["check", "--json"], env={"NCCL_SOCKET_IFNAME": "nosuch0"})
    found = _found(result)["interface-nccl"]
    assert result.exit_code == 1 and found["severity"] == "error" and "nosuch0" in found["seen"] and found["source"]


def test_a_busy_master_port_is_named_with_who_has_it() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        result = CliRunner().invoke(app, ["check"], env=environ)
    assert result.exit_code == 1
    assert "is taken by" in " ".join(result.stdout.split()) and f"(pid {os.getpid()})" in result.stdout


def test_what_a_config_asks_for_and_is_not_there(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "grpo_sort.yaml"
    wanted = [
        "cluster.kind=ray",
        "cluster.device=cuda",
        "cluster.interface=nosuch",
        "cluster.address=nosuch.invalid:6379",
    ]
    config = load_config(example, [*wanted, f"folder={tmp_path}"])
    needs = needs_of(config)
    assert needs.several and needs.gpus and needs.interface == "nosuch" and needs.names == ("nosuch.invalid",)
    assert "ray" in needs.packages and str(tmp_path / config.name) in needs.folders


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "refused" in result.stderr and "Traceback" not in result.output
