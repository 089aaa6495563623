"""`lockstep push` uploads a run's model with a card to a hub, here one on loopback."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_controller import ENVIRONMENT
from harness import Launched, config, task, write
from hub_server import TOKEN, Hub, Repository, open_hub

from lockstep.run.errors import RunRefused
from lockstep.run.trained_models.checkpoint_export import export_checkpoint
from lockstep.run.trained_models.hub_push import HubRepository, push_model

pytestmark = [pytest.mark.xdist_group("push"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, with an evaluation before and after."""
    home = task(tmp_path_factory.mktemp("push"))
    values = config(home, "grpo", steps=2, checkpoint={"every": 1})
    values["trainer"]["ranks"] = values["evaluation"]["every"] = 1
    file = write(home, values)
    launched = Launched.start(home / "runs/grpo", str(file))
    assert launched.finish() == 0, launched.text()
    return home / "runs/grpo"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with open_hub() as opened:
        yield opened


def push(
    hub: Hub | None, folder: Path, *arguments: str, token: str | None = TOKEN
) -> "subprocess.CompletedProcess[str]":
    # Xet, the hub's own store for large files, is a service of its own: git LFS is what a hub offers without it.
    environment = {**ENVIRONMENT, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "huggingface")}
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        environment.pop(name, None)
    if hub is not None:
        environment["HF_ENDPOINT"] = hub.address
    if token is not None:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-m", "lockstep", "push", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_run_is_pushed_with_its_card(run: Path, hub: Hub, tmp_path: Path) -> None:
    tried = push(None, tmp_path, str(run), "sort-grpo", "--step", "1", "--dry-run", token=None)
    assert tried.returncode == 0, tried.stderr
    done = push(hub, tmp_path, str(run), "sort-grpo", "--step", "1", "--private", "--revision", "trial")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{hub.address}/mira/sort-grpo/commit/")
    found = hub.repositories["mira/sort-grpo"]
    files = found.branches["trial"]
    assert found.private and found.branches["main"] == {}
    assert found.messages == ["Upload the model after 1 step with Lockstep"]
    export_checkpoint(run, tmp_path / "export", "1")
    exported = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    assert files.keys() - {"README.md"} == exported.keys()
    # transformers writes into tokenizer_config.json whether it was offline, so digests of it differ too.
    assert all(files[name] == exported[name] for name in ("model.safetensors", "config.json", "tokenizer.json"))
    card = files["README.md"].decode()
    assert card.replace("mira/sort-grpo", "sort-grpo") in tried.stdout
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["library_name"] == "transformers" and metadata["tags"][:2] == ["lockstep", "grpo"]
    (result,) = metadata["model-index"][0]["results"]
    assert "exact_match" in {each["type"] for each in result["metrics"]}
    assert 'from_pretrained("mira/sort-grpo")' in card and "after 1 step of GRPO" in card
    assert str(run.parents[1]) not in card and os.uname().nodename not in card


@pytest.mark.slow
def test_a_damaged_folder_is_not_pushed(run: Path, hub: Hub, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "export")
    file = tmp_path / "export/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for arguments in ([], ["--dry-run"]):
        refused = push(hub, tmp_path, "export", "mira/damaged", *arguments)
        assert refused.returncode == 2 and "copy the folder again" in refused.stderr, refused.stderr
        assert "export_it_again" in "_".join(refused.stderr.split()) and "Traceback" not in refused.stderr
    assert "mira/damaged" not in hub.repositories


def test_a_folder_is_pushed_as_it_is(run: Path, hub: Hub, tmp_path: Path) -> None:
    export_checkpoint(run, tmp_path / "export")
    (tmp_path / "export/README.md").write_text("# Mine\n")
    (tmp_path / "export/.notes").write_text("not for others\n")
    done = push(hub, tmp_path, "export", "mira/mine")
    assert done.returncode == 0, done.stderr
    files = hub.repositories["mira/mine"].branches["main"]
    assert files["README.md"] == b"# Mine\n" and ".notes" not in files and "model.safetensors" in files
    assert not hub.repositories["mira/mine"].private


@pytest.mark.parametrize(
    ("arguments", "token", "expected"),
    [
        (("RUN", "sort-grpo"), None, "no token for the hub: run `hf auth login`, or set HF_TOKEN"),
        (("RUN", "sort-grpo"), "hf_other", "does not accept the token"),
        (("RUN", "others/sort-grpo"), TOKEN, "may not write there"),
        (("RUN", "mira/open", "--private"), TOKEN, "exists and is public"),
    ],
    ids=["no token", "unknown token", "other account", "public"],
)
def test_what_cannot_be_pushed_is_refused(
    run: Path, hub: Hub, tmp_path: Path, arguments: tuple[str, ...], token: str | None, expected: str
) -> None:
    hub.repositories["mira/open"] = Repository(private=False)
    done = push(hub, tmp_path, *(str(run) if each == "RUN" else each for each in arguments), token=token)
    assert done.returncode == 2 and expected in re.sub(r"\s+", " ", done.stderr), done.stderr
    assert not any(repository.branches["main"] for repository in hub.repositories.values())


@pytest.mark.parametrize(
    ("source", "name", "options", "expected"),
    [
        ("RUN", "a/b/c", {}, "no name of a repository: give OWNER/NAME"),
        ("empty", "sort-grpo", {}, "neither a run nor a folder with a model"),
        ("RUN", "sort-grpo", {"step": "7"}, "there are checkpoints after"),
        ("RUN", "sort-grpo", {"adapter": True}, "has no adapter"),
    ],
    ids=["name", "no model", "no step", "no adapter"],
)
def test_what_is_no_model_is_refused(
    run: Path, tmp_path: Path, source: str, name: str, options: dict[str, Any], expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunRefused, match=expected):
        push_model(str(run if source == "RUN" else tmp_path / source), HubRepository(name), dry_run=True, **options)


@pytest.mark.slow
def test_an_upload_that_fails_leaves_no_commit_and_says_so(run: Path, hub: Hub, tmp_path: Path) -> None:
    hub.fail_uploads = True
    done = push(hub, tmp_path, str(run), "sort-grpo")
    assert done.returncode == 1 and "the store is full" in done.stderr and TOKEN not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert hub.repositories["mira/sort-grpo"].branches["main"] == {}


def test_an_unreachable_hub_is_one_sentence(run: Path, tmp_path: Path) -> None:
    nowhere = Hub(address="http://127.0.0.1:9")
    done = push(nowhere, tmp_path, str(run), "sort-grpo")
    assert done.returncode == 2 and "http://127.0.0.1:9 cannot be reached (Connection refused)" in done.stderr
    assert json.dumps(done.stderr).count("\\n") <= 3
