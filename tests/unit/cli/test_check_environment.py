"""`lockstep check --env` and `--env-file`: findings and exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app

BLOCK = """
export NCCL_TIMEOUT=3600
export NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=NVL
docker run -e NCCL_SOCKET_IFNMAE=eth0 -e WANDB_API_KEY=0123456789abcdef image
"""


def check(*arguments: str, text: str | None = None, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments], input=text, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_pasted_block() -> None:
    code, output = check("--env-file", "-", text=BLOCK)
    assert code == 1
    for text in ("nothing reads NCCL_TIMEOUT=3600", "Did you mean NCCL_SOCKET_IFNAME?", "NCCL_P2P_LEVEL=NVL"):
        assert text in " ".join(output.split())
    assert "0123456789abcdef" not in output


def test_json_and_several_files_as_hosts(tmp_path: Path) -> None:
    (tmp_path / "one.env").write_text("NCCL_IB_DISABLE=0")
    (tmp_path / "two.env").write_text("NCCL_IB_DISABLE=1")
    code, output = check("--env-file", str(tmp_path / "one.env"), "--env-file", str(tmp_path / "two.env"), "--json")
    found = json.loads(output)
    assert code == 1 and not found["passed"]
    differs = [each for each in found["findings"] if each["id"] == "env-differs"]
    assert [each["host"] for each in differs] == ["one, two"] and differs[0]["rung"] == "environment"


def test_variables_of_the_shell_that_workers_do_not_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".nccl.conf").write_text("# site\nNCCL_IB_HCA=mlx5_0\nNCCL_DEBUG=INFO\n")
    for name in ("NCCL_CONF_FILE", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    code, output = check("--env", "--launcher", "ray", "--json", env={"NCCL_DEBUG": "WARN"})
    assert code == 0
    joined = check("--env", "--json", env={"NCCL_DEBUG": "WARN", "RAY_ADDRESS": "auto"})[1]
    assert "env-not-seen" in joined and "env-not-seen" not in check("--env", "--json", env={"NCCL_DEBUG": "WARN"})[1]
    missing = [each["seen"] for each in json.loads(output)["findings"] if each["id"] == "env-not-seen"]
    assert len(missing) == 1 and "NCCL_DEBUG" in missing[0]


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--env-file", "/nowhere/x"], None, "/nowhere/x"),
        (["--env-file", "-"], "nothing here", "-: sets no variable"),
        (["--env-file", "-"], "\x1b[2J\x00\xff", "no variable"),
        (["--env", "--launcher", "carrier-pigeon"], None, "unknown launcher 'carrier-pigeon'"),
    ],
)
def test_invalid_input_is_refused(arguments: list[str], text: str | None, message: str) -> None:
    code, output = check(*arguments, text=text)
    assert code == 2 and message in output and "Traceback" not in output


def test_terminal_escapes_are_not_printed() -> None:
    _, output = check("--env-file", "-", text="NCCL_DEBUG='\x1b[31mINFO\x1b]0;x\x07'")
    assert "\x1b]0" not in output and "\x07" not in output


def test_the_environment_of_workers_on_other_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    # `lockstep top` and DeepSpeed, if they were used in this process, have set variables.
    for name in ("LOCKSTEP_BEACONS", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    config = [str(Path(__file__).parents[3] / "examples" / "grpo_sort.yaml"), "cluster.kind=ray"]
    shell = {"DEEPSPEED_TIMEOUT": "30", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "eth0"}
    code, output = check(*config, "cluster.env.NCCL_PROTO=LL256", "--env", "--json", env=shell)
    found = json.loads(output)["findings"]
    assert code == 1
    missing = [each for each in found if each["id"] == "env-not-seen"]
    assert [each["seen"].split("=")[0] for each in missing] == ["DEEPSPEED_TIMEOUT"]
    assert "cluster.env.DEEPSPEED_TIMEOUT" in missing[0]["fix"]
    assert [each["host"] for each in found if each["id"] == "env-value"] == ["workers on other nodes"]
