"""The output and the exit codes of `lockstep check`."""

import json
import os
import socket
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.cli.check.check_arguments import read_arguments
from lockstep.config.cluster import LocalClusterConfig, RayClusterConfig
from lockstep.config.errors import ConfigError
from lockstep.config.loader import load_config
from lockstep.doctor.check.facts.host_requirements import requirements_of


def test_with_json_nothing_else_is_printed() -> None:
    result = CliRunner().invoke(app, ["check", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["passed"] else 1)
    assert set(report) == {"passed", "counts", "rungs", "findings"}


def _found(result: Result) -> dict[str, dict[str, str]]:
    return {found["id"]: found for found in json.loads(result.stdout)["findings"]}


def test_a_missing_interface_is_an_error() -> None:
    result = CliRunner().invoke(app, ["check", "--json"], env={"NCCL_SOCKET_IFNAME": "nosuch0"})
    found = _found(result)["interface-nccl"]
    assert result.exit_code == 1 and found["severity"] == "error" and "nosuch0" in found["seen"] and found["source"]


def test_a_busy_master_port_is_reported_with_its_process() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        result = CliRunner().invoke(app, ["check"], env=environ)
    assert result.exit_code == 1
    assert "is taken by" in " ".join(result.stdout.split()) and f"(pid {os.getpid()})" in result.stdout


def test_the_requirements_of_a_config(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "grpo_sort.yaml"
    overrides = [
        "cluster.kind=ray",
        "cluster.device=cuda",
        "cluster.interface=nosuch",
        "cluster.address=nosuch.invalid:6379",
    ]
    config = load_config(example, [*overrides, f"folder={tmp_path}"])
    needs = requirements_of(config)
    assert needs.several and needs.gpus and needs.interface == "nosuch" and needs.names == ("nosuch.invalid",)
    assert "ray" in needs.packages and str(tmp_path / config.name) in needs.folders


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "refused" in result.stderr and "Traceback" not in result.output


EXAMPLE = Path(__file__).parents[3] / "examples" / "sft_sort.yaml"


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("no way"), 2), (OSError("no such host"), 2), (KeyError("x"), 1)]
)
def test_complete_sections_are_printed_even_if_a_later_check_fails(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def broken(*given: object) -> None:
        raise error

    monkeypatch.setattr("lockstep.cli.check.check_hosts.check_hosts", broken)
    result = CliRunner().invoke(app, ["check", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == code and {"versions", "limits"} <= {rung["name"] for rung in report["rungs"]}
    assert report["findings"][-1]["id"] == "check-ended" and report["findings"][-1]["severity"] == "unchecked"
    shown = CliRunner().invoke(app, ["check"])
    assert "Versions" in shown.stdout and "Not checked" in shown.stdout


def test_sections_are_printed_as_soon_as_they_are_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "lockstep.cli.check.check_hosts.check_hosts", lambda *given: seen.append(capsys.readouterr().out)
    )
    with pytest.raises(SystemExit):
        app(["check"])
    assert "Versions" in seen[0] and "Limits" in seen[0] and "Environment" in seen[0]
    rest = capsys.readouterr().out
    assert "Versions" not in rest and " ok" in rest


def test_a_cluster_that_cannot_be_reached_is_a_finding() -> None:
    result = CliRunner().invoke(app, ["check", "--json", "--cluster", "127.0.0.1:1"])
    found = _found(result)["cluster-unknown"]
    assert result.exit_code == 1 and found["severity"] == "error" and "Traceback" not in result.output


def test_the_command_line_overrides_the_cluster_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def cluster(word: str | None, *overrides: str) -> object:
        request = read_arguments(str(EXAMPLE), overrides, None, word, None, None, None)
        assert request.config is not None and load_config(EXAMPLE, request.overrides) == request.config
        assert request.selection.cluster == request.config.cluster
        return request.config.cluster

    on_ray = ["cluster.kind=ray", "cluster.address=head:1", "cluster.env.A=b", "cluster.device=cpu"]
    assert cluster("local", *on_ray) == LocalClusterConfig(device="cpu")
    assert (
        cluster("ray", *on_ray)
        == RayClusterConfig(address="head:1", env={"A": "b"}, device="cpu")
        == cluster(None, *on_ray)
    )
    assert cluster("other:6379", *on_ray) == RayClusterConfig(address="other:6379", env={"A": "b"}, device="cpu")
    assert cluster("ray", "cluster.device=cpu") == RayClusterConfig(address="auto", device="cpu")
    assert cluster("auto") == RayClusterConfig(address="auto", device=load_config(EXAMPLE).cluster.device)
    with pytest.raises(ConfigError):
        cluster("local", "cluster.devise=cpu")
    monkeypatch.setenv("RAY_ADDRESS", "given:6379")
    assert cluster("ray", "cluster.device=cpu") == RayClusterConfig(device="cpu")
    without_config = read_arguments(None, (), None, "ray", None, None, None)
    assert without_config.names_other_hosts and without_config.selection.cluster == RayClusterConfig()
    assert not read_arguments(None, (), None, "local", None, None, None).names_other_hosts


@pytest.mark.parametrize(
    "arguments", [["--cluster", "slurm"], ["--cluster", "ray", "--hosts", "a,b"], ["--hosts", "a"], ["--ports", "x"],
              ["--join", "nowhere"], ["--join", "a:1", "--wait", "0"]],
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 2 and not result.stdout and "Traceback" not in result.output
