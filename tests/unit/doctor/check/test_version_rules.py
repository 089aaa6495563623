"""Versions: the table of supported ones, findings about one host, differences between hosts."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from lockstep.cluster.node_versions import SUPPORTED_VERSIONS
from lockstep.doctor.check.facts.host_facts import Gpu, HostVersions
from lockstep.doctor.check.facts.host_system import HostSystem
from lockstep.doctor.check.facts.installed_versions import (
    cuda_compat,
    gather_versions,
    parse_version,
    system_nccl_version,
)
from lockstep.doctor.check.rules.version_rules import BadCombination, compare_versions, judge_versions, support_table
from lockstep.doctor.output.findings import Finding

GOOD = {
    "python": "3.11.9", "lockstep-rl": "0.1.0", "torch": "2.13.0+cu126", "transformers": "5.23.0", "cuda": "12.6",
    "nccl": "2.30.7", "driver": "550.90.07", "vllm": "0.32.0", "ray": "2.60.0", "deepspeed": None,
    "kernel": "6.8.0-45-generic",
}  # fmt: skip
NEEDED = ("python", "torch", "transformers")


def _judged(
    needed: tuple[str, ...] = NEEDED, gpus: list[Gpu] | None = None, **changes: str | None
) -> dict[str, Finding]:
    return {each.id: each for each in judge_versions("a", HostVersions(GOOD | changes), gpus, needed)}


def test_the_table_is_sound() -> None:
    table = support_table()
    assert all(row.source.startswith("https://") for rows in (table.minimums, table.drivers, table.bad) for row in rows)
    assert len({bad.id for bad in table.bad}) == len(table.bad)
    assert all(set(bad.when) <= set(GOOD) for bad in table.bad), "a rule about something that is not gathered"
    for bad in table.bad:
        bad.seen.format_map(GOOD)


def test_the_table_agrees_with_what_a_run_refuses() -> None:
    least = {row.name: row.least for row in support_table().minimums}
    assert {name: known.least for name, known in SUPPORTED_VERSIONS.items()}.items() <= least.items()


def test_a_row_without_a_source_is_refused() -> None:
    row = {
        "id": "x",
        "when": {"torch": "<2"},
        "severity": "note",
        "seen": "",
        "why": "",
        "fix": "",
        "checked": "2026-11-22",
    }
    with pytest.raises(ValidationError, match="not a URL"):
        BadCombination.model_validate(row | {"source": "somebody said"})
    with pytest.raises(ValidationError, match="Invalid specifier"):
        BadCombination.model_validate(row | {"source": "https://x", "when": {"torch": "two"}})


def test_a_good_host() -> None:
    found = _judged()
    assert set(found) == {"versions"} and found["versions"].severity == "ok"
    assert "torch 2.13.0+cu126, CUDA 12.6, NCCL 2.30.7" in found["versions"].seen
    assert found["versions"].seen.endswith("not installed: deepspeed")


@pytest.mark.parametrize(
    ("changes", "id", "severity"),
    [
        ({"torch": "2.10.1"}, "old-torch", "error"),
        ({"vllm": "0.19.2"}, "old-vllm", "warning"),
        ({"torch": None}, "missing-torch", "error"),
        ({"driver": "470.57.02"}, "driver-old", "error"),
        ({"cuda": "13.0"}, "driver-old", "error"),
        ({"kernel": "5.4.0-150-generic"}, "kernel-hangs", "warning"),
        ({"nccl": "2.21.5"}, "nccl-abort-hangs", "warning"),
        ({"nccl": "2.29.2"}, "nccl-2.29.2-hangs", "warning"),
        ({"nccl": "2.28.9"}, "nccl-graphs-hang", "note"),
        ({"torch": "2.7.0+cu126"}, "torch-2.7.0-device-id-hangs", "warning"),
    ],
)
def test_what_is_wrong(changes: dict[str, str | None], id: str, severity: str) -> None:
    found = _judged(**changes)
    assert found[id].severity == severity and found[id].host == "a"


def test_what_is_not_needed_may_be_missing_and_what_is_may_not() -> None:
    assert set(_judged(ray=None)) == {"versions"}
    found = _judged((*NEEDED, "ray"), ray=None)["missing-ray"]
    assert found.severity == "error" and found.fix == "pip install 'lockstep-rl[ray]'"


def test_vllm_alone_makes_the_rule_about_graphs() -> None:
    assert "nccl-graphs-hang" not in _judged(nccl="2.28.9", vllm=None)


def test_gpus_without_cuda() -> None:
    found = _judged(gpus=[Gpu(0, "0000:07:00.0", "H100")], cuda=None, torch="2.13.0+cpu")
    assert found["torch-without-cuda"].severity == "error"


def test_versions_of_kernels_and_oddities() -> None:
    assert str(parse_version("6.18.44-fc-v669")) == "6.18.44" and parse_version("5.15.0-101-generic") is not None
    assert parse_version(None) is None and parse_version("unknown") is None


def test_unmet_requirements_and_conflicting_packages_are_reported() -> None:
    facts = HostVersions(
        GOOD, ["vllm 0.20 needs torch==2.11, and 2.13.0 is installed"], ["nvidia-nccl-cu12, nvidia-nccl-cu13"]
    )
    found = {each.id: each for each in judge_versions("a", facts, None, NEEDED)}
    assert found["unmet-requirement"].severity == found["installed-twice"].severity == "warning"


def test_hosts_that_differ() -> None:
    hosts = {f"h{number}": HostVersions(dict(GOOD)) for number in range(6)}
    hosts["h4"] = HostVersions(GOOD | {"nccl": "2.27.3", "driver": "535.129.03"})
    hosts["h5"] = HostVersions(GOOD | {"torch": "2.13.1+cu126", "python": "3.12.1", "vllm": None})
    found = {each.id: each for each in compare_versions(hosts)}
    assert found["differs-nccl"].severity == "error" and found["differs-nccl"].host == "h4"
    assert "2.30.7 on h0, h1, h2, h3 and 1 more, 2.27.3 on h4" in found["differs-nccl"].seen
    assert found["differs-nccl"].fix == "install 2.30.7 on all"
    assert found["differs-driver"].severity == "warning"
    assert found["differs-python"].host == found["differs-torch"].host == "h5"
    assert "differs-vllm" not in found and "differs-cuda" not in found


def test_a_patch_of_python_is_no_difference() -> None:
    hosts = {"a": HostVersions(dict(GOOD)), "b": HostVersions(GOOD | {"python": "3.11.2"})}
    assert list(compare_versions(hosts)) == []


def test_this_environment() -> None:
    versions = gather_versions(HostSystem())
    assert versions.packages["torch"] and versions.packages["lockstep-rl"] and versions.packages["kernel"]
    assert versions.unmet == []


def test_nccl_of_an_image_that_brings_it_as_a_file(tmp_path: Path) -> None:
    system, own = tmp_path / "system", tmp_path / "own"
    for folder in (system, own):
        folder.mkdir()
    (system / "libnccl.so.2.27.3").write_bytes(b"\x7fELF")
    (system / "libnccl.so.2").symlink_to("libnccl.so.2.27.3")
    (own / "libnccl.so.2").write_bytes(b"\x7fELF" + bytes(5000) + b"NCCL version 2.26.5+cuda12.9\0")
    assert system_nccl_version({}, [system]) == "2.27.3"
    assert system_nccl_version({"LD_LIBRARY_PATH": f"/nowhere:{own}"}, [system]) == "2.26.5"
    assert system_nccl_version({}, [tmp_path]) is None
    (own / "libnccl.so.2").write_bytes(b"")
    assert system_nccl_version({"LD_LIBRARY_PATH": str(own)}, []) is None


def test_forward_compatibility_starts_cuda_on_an_older_driver(tmp_path: Path) -> None:
    folder = tmp_path / "compat" / "lib"
    folder.mkdir(parents=True)
    assert cuda_compat({}, [folder]) == ("", False)
    (folder / "libcuda.so.1").write_bytes(b"")
    assert cuda_compat({}, [folder]) == (str(folder), False)
    assert cuda_compat({"LD_LIBRARY_PATH": str(folder)}, []) == (str(folder), True)
    old = GOOD | {"driver": "535.129.03", "cuda": "13.0"}
    for asked in (False, True):
        found = {
            each.id: each for each in judge_versions("a", HostVersions(old, [], [], str(folder), asked), None, NEEDED)
        }
        assert found["driver-old"].severity == "warning" and str(folder) in found["driver-old"].seen
        assert ("LD_LIBRARY_PATH" in found["driver-old"].fix) is not asked
