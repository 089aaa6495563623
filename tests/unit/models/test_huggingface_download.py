"""Downloads end with a folder, with an error, or with a stall."""

import threading
from pathlib import Path

import pytest

from lockstep.base.wait_state import Stalled
from lockstep.models import huggingface
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import resolve_folder


def test_a_hub_name_becomes_its_snapshot(monkeypatch, tmp_path: Path) -> None:
    requested = []

    def snapshot(name, **kwargs):
        requested.append((name, kwargs["revision"], "*.safetensors" in kwargs["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface, "snapshot_download", snapshot)
    assert resolve_folder("owner/name", "abc") == tmp_path
    assert resolve_folder("owner/name", weights=False) == tmp_path
    assert requested == [("owner/name", "abc", True), ("owner/name", None, False)]


def test_an_error_of_the_hub_names_the_field(monkeypatch) -> None:
    def snapshot(name, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"model\.tokenizer = 'owner/name'.*no route to host"):
        resolve_folder("owner/name", field="model.tokenizer")


def test_a_stalled_download_fails(monkeypatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(huggingface, "DOWNLOAD_STALL_S", 0.3)
    monkeypatch.setattr(huggingface, "snapshot_download", lambda name, **kwargs: str(release.wait(20)))
    try:
        with pytest.raises(Stalled, match="owner/name"):
            resolve_folder("owner/name")
    finally:
        release.set()


def test_progress_counts_bytes_on_disk(tmp_path: Path) -> None:
    assert huggingface._bytes_in(tmp_path) == 0
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "one.incomplete").write_bytes(b"12345")
    assert huggingface._bytes_in(tmp_path) == 5
