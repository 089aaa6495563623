"""Sources from files, folders, patterns and archives."""

import bz2
import gzip
import io
import lzma
import os
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.logs import log_sources
from lockstep.doctor.logs.log_sources import (
    CollectedSources,
    LogSource,
    NoSuchPath,
    collect_sources,
    open_streams,
    read_blocks,
)


def _all(found: CollectedSources) -> dict[str, bytes]:
    return {each.name: b"".join(read_blocks(each, found.gaps)) for each in found.sources}


def test_a_folder_gives_names_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "3").mkdir(parents=True)
    (tmp_path / "attempt_0" / "3" / "stderr.log").write_bytes(b"x\n")
    (tmp_path / "a.log").write_bytes(b"a\n")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 10)
    found = collect_sources([str(tmp_path)])
    assert _all(found) == {"a.log": b"a\n", "attempt_0/3/stderr.log": b"x\n"}
    assert not found.gaps


def test_one_file_has_its_own_name_and_several_paths_theirs(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"a\n")
    (tmp_path / "b.log").write_bytes(b"b\n")
    assert list(_all(collect_sources([str(tmp_path / "a.log")]))) == ["a.log"]
    both = collect_sources([str(tmp_path / "a.log"), str(tmp_path / "b.log")])
    assert list(_all(both)) == [str(tmp_path / "a.log"), str(tmp_path / "b.log")]
    assert sorted(_all(collect_sources([str(tmp_path / "*.log")]))) == [
        str(tmp_path / "a.log"),
        str(tmp_path / "b.log"),
    ]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_files_are_unpacked_whatever_their_name(tmp_path: Path, pack: object) -> None:
    (tmp_path / "a.log").write_bytes(pack(b"one\ntwo\n"))  # type: ignore[operator]
    assert _all(collect_sources([str(tmp_path)])) == {"a.log": b"one\ntwo\n"}


def test_zstd(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    stream = pyarrow.CompressedOutputStream(str(tmp_path / "a.log.zst"), "zstd")
    stream.write(b"one\n" * 1000)
    stream.close()
    assert _all(collect_sources([str(tmp_path)])) == {"a.log.zst": b"one\n" * 1000}


def test_members_of_archives_are_sources(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("logs/rank0.log", "zero\n")
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
        for name, data in (("x/rank1.log", b"one\n"), ("../../etc/evil.log", b"two\n")):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    found = collect_sources([str(tmp_path)])
    assert _all(found) == {
        "a.zip/logs/rank0.log": b"zero\n",
        "b.tar.gz/x/rank1.log": b"one\n",
        "b.tar.gz/../../etc/evil.log": b"two\n",
    }
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.zip", "b.tar.gz"]


def _tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return into.getvalue()


def _zip(files: dict[str, bytes]) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return into.getvalue()


def test_packed_members_and_archives_in_archives(tmp_path: Path) -> None:
    logs = {"rank0.log.gz": gzip.compress(b"zero\n"), "rank1.log.xz": lzma.compress(b"one\n"), "rank2.log": b"two\n"}
    (tmp_path / "a.tar.gz").write_bytes(_tar(logs))
    (tmp_path / "b.zip").write_bytes(_zip({"n1.tar": _tar(logs, "w"), "n2.tgz": _tar(logs), "driver.log": b"d\n"}))
    (tmp_path / "c.tar").write_bytes(
        _tar({"x/n3.zip": _zip(logs), "deep.tar.xz": _tar({"in.zip": _zip(logs)}, "w:xz")}, "w")
    )
    found = collect_sources([str(tmp_path)])
    own = {"rank0.log.gz": b"zero\n", "rank1.log.xz": b"one\n", "rank2.log": b"two\n"}
    folders = ("a.tar.gz", "b.zip/n1.tar", "b.zip/n2.tgz", "c.tar/x/n3.zip", "c.tar/deep.tar.xz/in.zip")
    expected = {f"{folder}/{name}": data for folder in folders for name, data in own.items()}
    assert _all(found) == expected | {"b.zip/driver.log": b"d\n"}
    assert {each.name: b"".join(data) for each, data in open_streams(found.sources, found.gaps)} == _all(found)
    assert not found.gaps and len(list(tmp_path.iterdir())) == 3


def test_archives_have_limits_of_depth_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = _tar({"a.log": b"a\n"})
    for _ in range(4):
        deep = _tar({"in.tar.gz": deep, "b.log": b"b\n"})
    (tmp_path / "deep.tar.gz").write_bytes(deep)
    found = collect_sources([str(tmp_path)])
    assert set(_all(found).values()) == {b"b\n"}
    assert any("nested in 2 others was not read" in gap for gap in found.gaps)
    monkeypatch.setattr("lockstep.doctor.logs.log_sources.MAX_UNPACKED_BYTES", 1 << 20)
    (tmp_path / "deep.tar.gz").write_bytes(_zip({"in.tar.gz": _tar({"zeros.log": b"\0" * (4 << 20)}), "b.log": b"b\n"}))
    (tmp_path / "deep.tar.gz").rename(tmp_path / "bomb.zip")
    found = collect_sources([str(tmp_path)])
    assert sum(map(len, _all(found).values())) < 1 << 20
    assert "holds more than" in found.gaps[0]


def test_a_damaged_nested_archive_is_reported_and_the_rest_read(tmp_path: Path) -> None:
    broken = _tar({"a.log": bytes(range(256)) * 4000})
    (tmp_path / "a.zip").write_bytes(
        _zip({"n1.tar.gz": broken[: len(broken) // 2], "n2.zip": b"PK\3\4", "n3.log": b"c\n"})
    )
    found = collect_sources([str(tmp_path)])
    assert _all(found)["a.zip/n3.log"] == b"c\n"
    assert any("n1.tar.gz" in gap for gap in found.gaps) and any("n2.zip" in gap for gap in found.gaps)


def test_members_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(_tar({"/root/a.log": b"a\n", "//b.log": b"b\n", "\udcff.log": b"c\n"}, "w"))
    found = collect_sources([str(tmp_path)])
    assert _all(found) == {"a.tar/root/a.log": b"a\n", "a.tar/b.log": b"b\n", "a.tar/?.log": b"c\n"}
    assert not found.gaps


def test_an_archive_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar.gz").write_bytes(_tar({f"rank{rank}.log": b"x\n" * 1000 for rank in range(200)}))
    found = collect_sources([str(tmp_path)])
    opened = []
    real = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda **given: opened.append(1) or real(**given))  # type: ignore[func-returns-value]
    assert sum(len(b"".join(data)) for _, data in open_streams(found.sources, found.gaps)) == 200 * 2000
    assert len(opened) == 1


def test_unbounded_growth_is_cut_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.doctor.logs.log_sources.FREE_BYTES", 1 << 20)
    monkeypatch.setattr("lockstep.doctor.logs.log_sources.MAX_RATIO", 1)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\0" * (64 << 20)))
    found = collect_sources([str(tmp_path)])
    assert sum(map(len, _all(found).values())) <= 8 << 20
    assert "unpacks to more than" in found.gaps[0]


def test_a_damaged_archive_is_reported_and_the_rest_read(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b"one\n" * 1000)[:-20])
    (tmp_path / "b.zip").write_bytes(b"PK\x03\x04 nonsense")
    (tmp_path / "c.log").write_bytes(b"c\n")
    found = collect_sources([str(tmp_path)])
    assert _all(found)["c.log"] == b"c\n"
    assert any("a.log.gz" in gap for gap in found.gaps) and any("b.zip" in gap for gap in found.gaps)


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(b"a\n")
    (tmp_path / "logs" / "again").symlink_to(tmp_path)
    assert len(collect_sources([str(tmp_path)]).sources) == 1


def test_a_missing_path_is_rejected() -> None:
    with pytest.raises(NoSuchPath):
        collect_sources(["/nowhere/at/all*.log"])


def test_standard_input() -> None:
    assert collect_sources(["-"]).sources == [LogSource("stdin", None)]


_LOGS = {"rank0.log.gz": gzip.compress(b"zero\n" * 50), "rank1.log": b"one\n" * 50}
_ARCHIVES = {
    "a.tar.gz": _tar(_LOGS),
    "b.zip": _zip({"n1.tar": _tar(_LOGS, "w"), "n2.zip": _zip(_LOGS)}),
    "c.tar": _tar({"x/n3.zip": _zip(_LOGS), "n4.tar.xz": _tar(_LOGS, "w:xz")}, "w"),
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(_ARCHIVES)),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=4)), min_size=1, max_size=8),
)
def test_any_damage_to_an_archive_is_only_a_gap(name: str, damage: list[tuple[float, int, bytes]]) -> None:
    data = bytearray(_ARCHIVES[name])
    for place, removed, new in damage:
        at = int(place * len(data))
        data[at : at + removed] = new
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(bytes(data))
        found = collect_sources([folder])
        for _, blocks_of in open_streams(found.sources, found.gaps):
            assert sum(map(len, blocks_of)) < 1 << 20


_BEGINNINGS = (b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
"""Of packed files, whatever they are called: what begins like one is unpacked."""
_PACKS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "rank3", "x.y", "ü"]), min_size=1, max_size=3).map("/".join),
        st.tuples(
            st.binary(max_size=200).filter(lambda data: not data.startswith(_BEGINNINGS)),
            st.sampled_from(sorted(_PACKS)),
        ),
        max_size=6,
    )
)
def test_any_tree_of_files_is_read_back(tree: dict[str, tuple[bytes, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = {}
        for name, (data, pack) in tree.items():
            path = Path(folder) / (name + ".log" + pack)
            if any(parent.is_file() for parent in path.parents):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_PACKS[pack](data))
            expected[name + ".log" + pack] = data
        found = collect_sources([folder])
        assert _all(found) == expected
        assert not found.gaps


def test_a_pipe_in_a_folder_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x\n")
    os.mkfifo(tmp_path / "control")
    found = collect_sources([str(tmp_path)])
    assert [source.name for source in found.sources] == ["a.log"]
    assert found.gaps == ["control: a pipe, which is read only if it is given by name"]


def test_a_pipe_that_is_given_by_name_is_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    gaps: list[str] = []
    monkeypatch.setattr(log_sources, "PIPE_WAIT_S", 0.2)
    source = collect_sources([str(pipe)]).sources[0]
    assert list(read_blocks(source, gaps)) == []
    assert "no process has written for 0.2 s" in gaps[0]
    monkeypatch.setattr(log_sources, "PIPE_WAIT_S", 20)
    with subprocess.Popen(["sh", "-c", f"echo hello > {pipe}"]) as writer:
        assert b"".join(read_blocks(source, gaps)) == b"hello\n"
    assert writer.returncode == 0 and len(gaps) == 1
