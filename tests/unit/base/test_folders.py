"""Private folders, and files with the access of their folder."""

import os
import stat
import time
from pathlib import Path

import pytest

from lockstep.base import folders
from lockstep.base.folders import (
    UnsafePath,
    check_shared_folder,
    create_file,
    hold_folder,
    make_private_dir,
    make_scratch_dir,
    open_file,
    open_own_file,
    remove_stale_folders,
    shm_root,
    write_atomically,
)


def test_a_private_folder_belongs_to_this_user(tmp_path: Path) -> None:
    own = make_private_dir(tmp_path / "own", "choose another")
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    assert make_private_dir(own, "choose another").stat().st_mode & 0o777 == 0o700
    own.chmod(0o770)
    with pytest.raises(UnsafePath, match=r"own \(mode 0770\) can be changed by other users: choose another") as caught:
        make_private_dir(own, "choose another")
    assert (caught.value.path, caught.value.remedy) == (own, "choose another")
    own.chmod(0o700)
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(PermissionError, match=f"{name} is not a folder.*: choose another"):
            make_private_dir(tmp_path / name, "choose another")
    if os.geteuid() == 0:
        os.chown(own, 1, 1)
        with pytest.raises(PermissionError, match=r"belongs to uid 1 .*, not to uid 0 .*: choose another"):
            make_private_dir(own, "choose another")


def test_a_shared_folder_exists_and_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    check_shared_folder(tmp_path / "link", "choose another")  # a link of this user
    with pytest.raises(UnsafePath, match="file is not a folder: choose another"):
        check_shared_folder(tmp_path / "file", "choose another")
    with pytest.raises(UnsafePath, match="missing does not exist: choose another"):
        check_shared_folder(tmp_path / "missing", "choose another")


def test_every_user_has_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_BEACONS", raising=False)
    assert shm_root() == Path(f"/dev/shm/lockstep-{os.geteuid()}")
    assert shm_root(1234) == Path("/dev/shm/lockstep-1234")
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert shm_root() == tmp_path / f"lockstep-{os.geteuid()}" / "shm"
    made = folders.make_run_shm_dir("r-1")
    assert made == shm_root() / "r-1"
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent, made.parent.parent)] == [0o700] * 3


@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o750, 0o640), (0o2770, 0o660), (0o755, 0o644)])
@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_file_gets_the_access_of_its_folder(folder: int, file: int, umask: int, tmp_path: Path) -> None:
    tmp_path.chmod(folder)
    before = os.umask(umask)
    try:
        os.close(open_file(tmp_path / "opened"))
        os.close(create_file(tmp_path / "created"))
        write_atomically(tmp_path / "written", b"")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {file}


def test_a_file_that_exists_keeps_its_mode_and_content(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before ")
    path.chmod(0o640)
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND), "a") as file:
        file.write("after")
    assert path.read_text() == "before after" and stat.S_IMODE(path.stat().st_mode) == 0o640
    os.close(open_file(path, os.O_WRONLY | os.O_TRUNC))
    assert path.read_text() == ""
    with pytest.raises(FileExistsError):
        create_file(path)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_TRUNC])
def test_only_regular_files_are_opened(flags: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("content")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, kind in {
        "link": f"a link to {target}", "dangling": "a link to", "pipe": "a pipe", "folder": "a folder",
    }.items():  # fmt: skip
        with pytest.raises(UnsafePath, match=f"{name} is {kind}.*, not a file: remove it"):
            open_file(tmp_path / name, flags)
    assert target.read_text() == "content" and not (tmp_path / "new").exists()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(OSError):
            open_own_file(tmp_path / name)
    os.close(open_own_file(target))


def test_a_failed_write_leaves_the_old_content_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            write_atomically(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"] and path.read_bytes() == b"old"


def test_only_unused_old_folders_with_the_prefix_are_removed(tmp_path: Path) -> None:
    for name in ("x-old", "x-held", "x-young", "y-old"):
        (tmp_path / name / "below").mkdir(parents=True)
    (tmp_path / "x-file").touch()
    (tmp_path / "x-link").symlink_to(tmp_path / "y-old")
    hold = hold_folder(tmp_path / "x-held")
    old = time.time() - 2 * folders.STALE_AFTER_S
    for name in ("x-old", "x-held", "y-old", "x-file"):
        os.utime(tmp_path / name, (old, old))
    remove_stale_folders(tmp_path, "x-")
    assert {each.name for each in tmp_path.iterdir()} == {"x-held", "x-young", "x-file", "x-link", "y-old"}
    os.close(hold)
    remove_stale_folders(tmp_path, "x-")
    assert not (tmp_path / "x-held").exists() and (tmp_path / "y-old" / "below").exists()
    remove_stale_folders(tmp_path / "missing")


def test_a_scratch_folder_is_private_and_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, hold = make_scratch_dir("x-")
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    os.utime(folder, (0, 0))
    remove_stale_folders(tmp_path, "x-")
    assert folder.exists()
    os.close(hold)
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafePath, match="set TMPDIR"):
        make_scratch_dir("x-")
