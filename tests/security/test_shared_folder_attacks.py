"""Other users of the host prepare the places that all users share; and killed commands leave nothing there."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_user import ATTACKER, VICTIM, error_as_user, needs_root, plant, public_folder

from lockstep.base import folders
from lockstep.base.folders import make_run_shm_dir, run_shm_dir, scratch_dir, write_atomically
from lockstep.doctor.environment.incident_environment import write_incident_findings
from lockstep.watch.beacon.reader import read_beacon, read_beacons
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.incident import IncidentContents, write_incident
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore

PRECIOUS = "do not overwrite\n"
CONTENTS = IncidentContents(Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, ()), 1e9, 0)


@pytest.fixture
def public() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that only root can write."""
    file = tmp_path / "precious"
    file.write_text(PRECIOUS)
    return file


@needs_root
def test_a_folder_for_beacons_that_another_user_owns_is_refused(
    public: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could replace the folder of a run, although it has the sticky bit, and let weights overwrite a file."""
    shared = public / "lockstep"
    plant('mkdir -m 1777 "$1"', shared)
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(shared))
    with pytest.raises(PermissionError, match=rf"{shared} .*uid {ATTACKER}.*LOCKSTEP_BEACONS"):
        folder = make_run_shm_dir("train-1")
        swap = (
            'mv "$1/train-1" "$1/gone"; mkdir -m 777 -p "$1/train-1/weights"; ln -s "$2" "$1/train-1/weights/plan.json"'
        )
        plant(swap, shared, precious)
        WeightStore.create(folder / "weights", WeightPlan.of([("head.weight", (2, 2), "float32")]), 1)
    assert precious.read_text() == PRECIOUS


@needs_root
@pytest.mark.xdist_group("well-known folder")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('mkdir -m 777 "$1"', f"belongs to uid {ATTACKER}"),
        ('ln -s "$2" "$1"', "is not a folder and belongs to"),
        ('touch "$1"', "is not a folder and belongs to"),
        ('mkdir -m 700 "$1"', f"belongs to uid {ATTACKER}"),
    ],
    ids=["folder", "link", "file", "closed"],
)
def test_the_well_known_folder_of_a_user_is_refused_if_another_user_made_it(
    script: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the real `/dev/shm`, for a user who has no run."""
    monkeypatch.delenv("LOCKSTEP_BEACONS", raising=False)
    squatted = Path(f"/dev/shm/lockstep-{VICTIM}")
    try:
        with public_folder() as target:
            plant(script, squatted, target)
            error = error_as_user(VICTIM, lambda: make_run_shm_dir("train-1"))
            assert list(target.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", str(squatted)], check=True, timeout=10)
    assert f"UnsafePath: {squatted} {reason}" in error, error
    assert "remove it, or set LOCKSTEP_BEACONS" in error


@needs_root
def test_a_link_of_another_user_instead_of_the_shared_folder_is_refused(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (public / "root").mkdir()
    plant('ln -s "$1/root" "$1/lockstep"', public)
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(public / "lockstep"))
    with pytest.raises(PermissionError, match=rf"lockstep is a link that belongs to uid {ATTACKER}"):
        make_run_shm_dir("train-1")
    assert list((public / "root").iterdir()) == []


def test_a_shared_folder_without_the_sticky_bit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"\(mode 0777\) can be changed by other users.*chmod \+t"):
        make_run_shm_dir("train-1")
    tmp_path.chmod(0o1777)
    assert make_run_shm_dir("train-1").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_shared_memory_is_private_whatever_the_umask_is(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "new"))
    before = os.umask(umask)
    try:
        open_beacon("r-1", "policy-0", "policy", 0)
        write_atomically(run_shm_dir("r-1") / "leader.json", b"{}")
    finally:
        os.umask(before)
        close_beacon()
    modes = {path.name: path.stat().st_mode & 0o777 for path in run_shm_dir("r-1").rglob("*")}
    assert modes == {"policy-0.beacon": 0o600, "leader.json": 0o600}
    assert run_shm_dir("r-1").stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_place_of_a_draft_is_not_followed(tmp_path: Path, precious: Path) -> None:
    (tmp_path / f".agent.json.{os.getpid()}").symlink_to(precious)
    (tmp_path / "agent.json").symlink_to(precious)
    write_atomically(tmp_path / "agent.json", b"{}")
    assert precious.read_text() == PRECIOUS
    assert (tmp_path / "agent.json").read_bytes() == b"{}"


@needs_root
def test_beacons_of_another_user_and_links_are_not_read(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(public))
    path = open_beacon("r-1", "policy-0", "policy", 0).path
    close_beacon()
    path.with_name("critic-0.beacon").symlink_to(path)
    assert [state.name for state in read_beacons("r-1")] == ["policy-0"]
    path.parent.chmod(0o755)
    path.chmod(0o644)
    os.seteuid(VICTIM)
    try:
        assert read_beacon(path) is None, "another user's"
    finally:
        os.seteuid(0)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


@needs_root
def test_a_planted_folder_for_incidents_is_refused(public: Path, precious: Path) -> None:
    """`lockstep watch` in a shared folder, in which another user has made `incidents`."""
    root = public / "incidents"
    plant('mkdir -m 777 "$1"', root)
    assert write_incident(root, CONTENTS) is None
    assert list(root.iterdir()) == []
    command = [sys.executable, "-m", "lockstep", "watch", "--incidents", str(root), "--", "true"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and f"belongs to uid {ATTACKER}" in refused.stderr, refused.stderr


@needs_root
def test_findings_are_not_written_through_a_link_in_an_incident(public: Path, precious: Path) -> None:
    incident = public / "incidents" / "20261121-231502-absent-policy-1"
    plant('mkdir -p "$1"; echo "{}" > "$1/environment.json"; ln -s "$2" "$1/findings.json"', incident, precious)
    assert write_incident_findings(incident) == []
    assert precious.read_text() == PRECIOUS

    own = public / "own" / "20261121-231502-absent-policy-1"
    own.mkdir(parents=True)
    (own / "environment.json").write_text("{}")
    (own / "findings.json").symlink_to(precious)
    write_incident_findings(own)
    assert precious.read_text() == PRECIOUS


def test_a_folder_for_incidents_that_others_may_change_is_closed_to_them(tmp_path: Path) -> None:
    root = tmp_path / "incidents"
    root.mkdir()
    root.chmod(0o775)
    path = write_incident(root, CONTENTS)
    assert path is not None and root.stat().st_mode & 0o777 == 0o755
    other = tmp_path / "logs"
    other.mkdir()
    other.chmod(0o775)
    assert write_incident(other, CONTENTS) is None, "may be used for more than incidents"
    assert other.stat().st_mode & 0o777 == 0o775
    write_incident_findings(path)
    assert json.loads((path / "findings.json").read_text()) == {"environment": []}


def test_watch_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Its agent removes everything as soon as it finds its controller gone."""
    temporary, shared = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    variables = {"TMPDIR": str(temporary), "LOCKSTEP_BEACONS": str(shared)}

    def files() -> set[str]:
        return {path.name for root in (temporary, shared) for path in root.rglob("*")}

    watch = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "watch", "--incidents", str(tmp_path / "incidents"), "--", "sleep", "60"],
        env={**os.environ, **variables}, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: {"agent.json", "supervisor.json"} <= files(), 30, "the services run")
        watch.send_signal(signal.SIGKILL)
        watch.wait(10)
        until(lambda: not files(), 20, "nothing is left")
    finally:
        os.killpg(watch.pid, signal.SIGKILL)


def test_the_next_command_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "import time\nfrom lockstep.base.folders import scratch_dir\nwith scratch_dir('lockstep-trial-') as folder:\n"
        "    (folder / 'file').touch(); print(folder, flush=True); time.sleep(60)"
    )
    held: list[tuple[subprocess.Popen[str], Path]] = []
    for _ in range(2):
        command = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
        )
        assert command.stdout is not None
        held.append((command, Path(command.stdout.readline().strip())))
    (killed, stale), (_, used) = held
    young, foreign = tmp_path / "lockstep-trial-young", tmp_path / "other"
    try:
        killed.kill()
        killed.wait(10)
        young.mkdir()
        foreign.mkdir()
        for folder in (stale, used, foreign):
            os.utime(folder, (0, 0))
        with scratch_dir("lockstep-trial-") as own:
            assert own.stat().st_mode & 0o777 == 0o700
            assert not stale.exists()
            assert used.exists() and young.exists() and foreign.exists()
        assert not own.exists()
    finally:
        for command, _ in held:
            command.kill()
            command.communicate(timeout=10)


def test_shared_memory_of_killed_runs_is_removed_and_that_of_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_BEACONS", raising=False)
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    stale = make_run_shm_dir("stale-1")
    open_beacon("living-1", "policy-0", "policy", 0)
    try:
        for run in (stale, run_shm_dir("living-1")):
            os.utime(run, (0, 0))
        folders.remove_stale_run_dirs()
        assert [path.name for path in stale.parent.iterdir()] == ["living-1"]
    finally:
        close_beacon(remove=True)
    assert list(stale.parent.iterdir()) == []
