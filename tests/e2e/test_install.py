"""The built wheel in empty environments outside the repository: the core reads a log, the extra `train` trains."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE_MB = 140
"""Limit for the size of the core on disk, with dependencies and compiled files, without pip."""
SIZE = """
from importlib import metadata
files = [f for d in metadata.distributions() if d.name not in ("pip", "setuptools") for f in d.files or ()]
print(sum(p.stat().st_size for p in {f.locate().resolve() for f in files} if p.exists()))
"""
LOG = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 12, in <module>
[rank1]:     loss.backward()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB
"""
TRAINING = ("torch", "transformers", "datasets", "pyarrow", "httpx", "matplotlib", "safetensors")


def run(*command: object, cwd: Path, code: int = 0, **environment: str) -> str:
    """Run a command without this environment and checkout on its path; returns its output."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | {"COLUMNS": "200"} | environment,
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    run(sys.executable, *build, cwd=folder)
    (built,) = folder.glob("lockstep_rl-*.whl")
    return built


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the locked versions of all packages."""
    locked = re.findall(
        r"^([\w.-]+)(?:\[[\w,-]+\])?==([^ ;\\]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
    file = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    file.write_text("".join(f"{name}=={version}\n" for name, version in locked))
    return file


def environment(folder: Path, wheel: Path, constraints: Path, extra: str = "", *more: str) -> Path:
    """Create an environment with the wheel; returns the folder with its commands."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin" / "pip", "--disable-pip-version-check", "install", "--quiet", "--constraint", constraints)
    run(*pip, f"{wheel}{extra}", *more, cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory, wheel: Path, constraints: Path) -> Path:
    return environment(tmp_path_factory.mktemp("core") / "venv", wheel, constraints)


@pytest.mark.xdist_group("install")
def test_the_core_is_small_and_has_no_dependency_of_training(core: Path, tmp_path: Path) -> None:
    assert int(run(core / "python", "-c", SIZE, cwd=tmp_path)) < CORE_MB << 20
    found = f"import importlib.util as u; print([name for name in {TRAINING} if u.find_spec(name)])"
    assert run(core / "python", "-c", found, cwd=tmp_path).strip() == "[]"


@pytest.mark.xdist_group("install")
def test_the_core_runs_explain_check_and_top(core: Path, tmp_path: Path) -> None:
    lockstep = core / "lockstep"
    (tmp_path / "job.log").write_text(LOG)
    assert "rank_oom" in run(lockstep, "explain", tmp_path / "job.log", cwd=tmp_path)
    assert run(lockstep, "explain", "--json", tmp_path / "job.log", cwd=tmp_path).lstrip().startswith("{")
    assert "1 ok" in run(lockstep, "check", "--env", cwd=tmp_path, NCCL_DEBUG="INFO")
    earlier = Path(__file__).with_name("earlier_run") / "runs" / "begun"
    assert "begun" in run(lockstep, "top", "--once", earlier, cwd=tmp_path)


@pytest.mark.xdist_group("install")
def test_the_core_checks_this_host(core: Path, tmp_path: Path) -> None:
    """The host may have problems: the test requires only that every part of the check has run and reported."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [core / "lockstep", "check"], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "pip install 'lockstep-rl[train]'" in done.stdout, (
        "torch is missing, and the report names the extra that installs it"
    )


@pytest.mark.xdist_group("install")
def test_the_core_watches_a_command(core: Path, tmp_path: Path) -> None:
    printed = run(core / "lockstep", "watch", "--", core / "python", "-c", "print('hello from the job')", cwd=tmp_path)
    assert "hello from the job" in printed and "Traceback" not in printed


@pytest.mark.xdist_group("install")
@pytest.mark.parametrize("command", [("train", "run.yaml"), ("tiny", "model"), ("check", "run.yaml")], ids=" ".join)
def test_a_command_whose_extra_is_missing_names_it(core: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "run.yaml").write_text("recipe: sft\nname: x\nmodel: {path: m}\ndata: {path: d}\nsteps: 1\n")
    printed = run(core / "lockstep", *command, cwd=tmp_path, code=2)
    assert "pip install 'lockstep-rl[train]'" in printed and "Traceback" not in printed


@pytest.mark.xdist_group("install")
def test_the_dashboard_names_its_own_extra(core: Path, tmp_path: Path) -> None:
    printed = run(core / "lockstep", "dashboard", tmp_path, cwd=tmp_path, code=2)
    assert "pip install 'lockstep-rl[dashboard]'" in printed and "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.xdist_group("install")
@pytest.mark.timeout(600)
def test_with_the_extra_dashboard_it_is_served_without_torch(tmp_path: Path, wheel: Path, constraints: Path) -> None:
    commands = environment(tmp_path / "venv", wheel, constraints, "[dashboard]")
    earlier = Path(__file__).with_name("earlier_run") / "runs" / "begun"
    shutil.copytree(earlier, tmp_path / "begun")
    served = subprocess.Popen(
        [commands / "lockstep", "dashboard", "begun"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    try:
        assert served.stdout is not None
        address, _, token = served.stdout.readline().strip().partition("#token=")
        path, found = "api/runs", list[bytes]()
        for view in ("", "/series?name=reward/mean", "/samples?limit=1", "/stages", "/waits", "/incidents"):
            request = urllib.request.Request(f"{address}{path}{view}", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                found.append(answer.read())
            if not view:
                path = f"api/runs/{json.loads(found[0])['runs'][0]['id']}"
        assert b'"reward/mean"' in found[1] and b'"prompt"' in found[2]
        assert b"<!doctype html>" in urllib.request.urlopen(address, timeout=60).read().lower()
    finally:
        served.kill()
        served.communicate(timeout=60)
    assert (
        run(commands / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=tmp_path)
        == "None\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_the_extra_train_it_trains(tmp_path: Path, wheel: Path, constraints: Path) -> None:
    commands = environment(tmp_path / "venv", wheel, constraints, "[train]", "torch==2.13.0")
    lockstep, offline = commands / "lockstep", {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    tiny = ("tiny", "model", "--hidden", "32", "--layers", "1", "--alphabet", "0123456789=")
    run(lockstep, *tiny, cwd=tmp_path, **offline)
    rows = "".join(f'{{"prompt": "{n}=", "completion": "{n}"}}\n' for n in range(10, 90))
    (tmp_path / "data.jsonl").write_text(rows)
    settings = ("recipe: sft", "name: short", "steps: 2", "model: {path: model}", "data: {path: data.jsonl}")
    (tmp_path / "run.yaml").write_text("\n".join(settings) + "\n")
    assert "finished after 2 of 2 steps" in run(lockstep, "train", "run.yaml", cwd=tmp_path, **offline)


LOCKS = sorted(ROOT.glob("requirements*.lock"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem.removeprefix("requirements").lstrip("-") or "all")
def test_every_locked_requirement_has_a_version_and_hashes(lock: Path) -> None:
    requirements = re.split(r"\n(?=\S)", lock.read_text().strip())
    for requirement in requirements:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+", requirement), requirement
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", requirement), requirement


def test_scripts_install_only_what_is_locked() -> None:
    """Besides: this checkout itself, and a build of torch that the user asks for."""
    text = (ROOT / "script" / "bootstrap").read_text().replace("\\\n", " ")
    locked = [line.strip() for line in text.splitlines() if re.search(r"(^|[\s&|(])locked -", line)]
    assert {name for line in locked for name in re.findall(r"requirements[\w-]*\.lock|\$\w*lock\b", line)} == {
        "requirements-build.lock", "$torch_lock", "requirements-cuda.lock", "$lock", "requirements-tasks.lock",
        "requirements-deepspeed.lock",
    }  # fmt: skip
    others = [line.strip() for line in text.splitlines() if re.match(r"\s*(if )?(pip )?install [-$\w]", line)]
    assert "locked() { install --no-deps --require-hashes" in text
    assert others[:1] == ["install $torch"] and others[1].startswith("if install --dry-run")
    assert others[2:] == ["install --no-deps --no-build-isolation --editable ."]
    for line in (ROOT / "script" / "benchmark").read_text().replace("\\\n", " ").splitlines():
        assert "pip install" not in line or "--require-hashes" in line


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_build_of_torch_with_another_hash_is_refused(tmp_path: Path) -> None:
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    if not any(Path(folder).is_dir() and list(Path(folder).glob("torch-*+cpu*.whl")) for folder in folders):
        pytest.skip("no CPU build of torch in a folder of PIP_FIND_LINKS")
    for path in (ROOT / "script", *ROOT.glob("requirements*"), ROOT / "pyproject.toml"):
        target = tmp_path / path.name
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    lock = tmp_path / "requirements-torch-cpu.lock"
    lock.write_text(re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", lock.read_text()))
    kept = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "LOCKSTEP_TORCH")
    }
    done = subprocess.run(
        [tmp_path / "script" / "bootstrap"], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DO NOT MATCH THE HASHES" in done.stderr and "LOCKSTEP_TORCH='--require-hashes" in done.stderr
    assert not list(tmp_path.glob(".venv/lib/*/site-packages/torch"))
