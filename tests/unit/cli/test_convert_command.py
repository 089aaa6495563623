"""`lockstep convert`: exit codes, files and messages."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.config.loader import load_config

COMMAND = "trl dpo --model_name_or_path m --dataset_name d --max_steps 10"


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["convert", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_whole_conversion_ends_with_0_and_a_partial_one_with_3(tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    code, shown, _ = invoke("--from", "trl", COMMAND, "--ranks", "2", "-o", str(out))
    assert code == 0 and load_config(out).steps == 10 and "converted 3 of 3 options" in shown
    code, text, notes = invoke("--from", "trl", f"{COMMAND} --zork 1")
    assert code == 3 and text.startswith("# Converted from TRL (dpo)")
    assert "unknown: --zork" in notes and "missing: trainer.ranks" in notes


def test_a_file_is_only_overwritten_if_asked(tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    code, _, problem = invoke("--from", "trl", COMMAND, "--ranks", "1", "-o", str(out))
    assert code == 2 and "--force" in problem and out.read_text() == "mine"
    assert invoke("--from", "trl", COMMAND, "--ranks", "1", "-o", str(out), "--force")[0] == 0
    assert load_config(out).recipe == "preference"
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "elsewhere.yaml")
    assert invoke("--from", "trl", COMMAND, "--ranks", "1", "-o", str(link))[0] == 2
    assert not (tmp_path / "elsewhere.yaml").exists()


def test_nothing_is_written_where_nothing_can_be_converted(tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    code, _, problem = invoke(
        "--from", "verl", "-o", str(out), "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=remax"
    )
    assert code == 2 and "remax" in problem and not out.exists()
    assert invoke("--from", "trl", str(tmp_path / "none.yaml"))[0] == 2


def test_json_has_the_config_and_every_option() -> None:
    code, text, _ = invoke("--from", "trl", COMMAND, "--json", "--ranks", "1")
    answer = json.loads(text)
    assert code == 0 and answer["complete"] and answer["config"]["recipe"] == "preference"
    assert [each["name"] for each in answer["options"]] == ["--model_name_or_path", "--dataset_name", "--max_steps"]
    assert answer["options"][0]["fields"] == ["model.path"]


def test_words_of_a_command_need_two_dashes() -> None:
    assert invoke("--from", "trl", "--ranks", "1", "--", *COMMAND.split())[0] == 0
    code, _, problem = invoke("--from", "trl", *COMMAND.split())
    assert code == 2 and "-- trl dpo --model_name_or_path m" in " ".join(problem.replace("│", "").split())


@pytest.mark.parametrize("secret", ["hf_0123456789abcdefghijABCDEFGHIJ", "0123456789abcdef0123456789abcdef01234567"])
def test_no_secret_is_shown(secret: str) -> None:
    options = f"--hub_token {secret} --zork_key {secret} {secret} --report_to wandb"
    code, text, notes = invoke("--from", "trl", f"{COMMAND} {options}", "--ranks", "1")
    assert code == 3 and secret not in text + notes and "--hub_token" in notes
    _, text, notes = invoke("--from", "trl", f"{COMMAND} {options}", "--json")
    assert secret not in text + notes


def test_control_characters_do_not_reach_the_terminal() -> None:
    code, text, notes = invoke("--from", "trl", f"{COMMAND} '--\x1b[31mx' 1 --run_name '\x1b[2J'", "--ranks", "1")
    assert code == 3 and "\x1b[2J" not in text + notes


def test_a_place_where_no_file_can_be_is_named(tmp_path: Path) -> None:
    for out, problem in ((tmp_path / "none" / "x.yaml", "create it first"), (tmp_path, "is a folder")):
        for force in ([], ["--force"]):
            code, _, shown = invoke("--from", "trl", COMMAND, "--ranks", "1", "-o", str(out), *force)
            assert code == 2 and problem in shown and "Errno" not in shown
    assert list(tmp_path.iterdir()) == []
    code, _, shown = invoke("--from", "trl", "")
    assert code == 2 and "is empty" in shown
