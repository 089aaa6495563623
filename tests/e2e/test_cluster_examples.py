"""The Slurm script and the KubeRay manifest, as far as they can be tested without Slurm and Kubernetes."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cluster.node_versions import SUPPORTED_VERSIONS, version_numbers
from lockstep.config.loader import apply_overrides, check_config
from lockstep.models.tiny_model import make_tiny

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "cluster" / "slurm.sh"
KUBERAY = ROOT / "examples" / "cluster" / "kuberay.yaml"

JOB = {
    "activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint", "entrypointNumCpus",
    "entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata", "rayClusterSpec", "runtimeEnvYAML",
    "shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend",
    "ttlSecondsAfterFinished",
}  # fmt: skip
"""Fields of a RayJobSpec of `ray.io/v1`, by KubeRay's API reference."""
CLUSTER = {"authOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs"}
WORKERS = {
    "groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams", "replicas",
    "resources", "labels", "scaleStrategy", "suspend", "template",
}  # fmt: skip


def test_the_manifest_is_a_ray_job() -> None:
    job = yaml.safe_load(KUBERAY.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec: dict[str, Any] = job["spec"]
    assert set(spec) <= JOB and set(spec["rayClusterSpec"]) == CLUSTER
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert version_numbers(cluster["rayVersion"]) >= version_numbers(SUPPORTED_VERSIONS["ray"].least)
    (workers,) = cluster["workerGroupSpecs"]
    assert set(workers) <= WORKERS and workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    images = set()
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        images.add(container["image"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(each["value"], str) for each in container["env"])
    assert len(images) == 1, "one image on all nodes"


def test_the_command_of_the_manifest_is_a_run_on_ray() -> None:
    words = shlex.split(yaml.safe_load(KUBERAY.read_text())["spec"]["entrypoint"])
    assert words[:2] == ["lockstep", "train"]
    values = {"recipe": "sft", "name": "x", "steps": 1, "model": {"path": "m"}, "data": {"path": "d"}}
    config = check_config(apply_overrides(values, words[3:]), "the manifest")
    assert config.cluster.kind == "ray" and config.cluster.address == "auto" and Path(config.folder).is_absolute()


def test_the_script_is_bash_and_prints_its_usage() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    assert os.access(SLURM, os.X_OK)
    done = subprocess.run(["bash", str(SLURM)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr
    options = re.findall(r"^#SBATCH (--[a-z-]+)", SLURM.read_text(), re.MULTILINE)
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node"} <= set(options)


STUBS = {
    "scontrol": "#!/usr/bin/env bash\necho here\n",
    "srun": '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "lockstep": f'#!/usr/bin/env bash\nexec {sys.executable} -m lockstep "$@"\n',
}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_the_script_starts_ray_and_the_run_uses_its_nodes(tmp_path: Path) -> None:
    """On one node, with an `srun` that runs its command on this host. No process of Ray is left behind."""
    make_tiny(
        tmp_path / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789="
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    (tmp_path / "run.yaml").write_text(
        "{recipe: grpo, name: x, steps: 1, model: {path: model}, data: {path: data.jsonl}, token_budget: 64,"
        " rollout: {sampling: {max_tokens: 4}}, reward: {terms: [{kind: exact_match}], workers: 1}}"
    )
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as short:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        environment = {
            **os.environ, "RAY_PORT": str(port), "COLUMNS": "200",
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "here", "SLURM_CPUS_ON_NODE": "4", "OMP_NUM_THREADS": "1",
            "RAY_OPTIONS": f"--temp-dir={short} --object-store-memory=100000000",
        }  # fmt: skip
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [str(SLURM), "run.yaml", "--dry-run"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 of 1 nodes are there" in done.stdout
        assert "policy-0, engine-0, scorer-0" in done.stdout and "3 of 4" in done.stdout, done.stdout + done.stderr
        left = [command for command in commands() if short in command]
        assert left == []


def commands() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
