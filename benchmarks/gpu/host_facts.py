"""What a result on a GPU depends on, and what a machine lacks to run it."""

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "requirements-gpu.txt"
"""What is needed beside the packages that an image with PyTorch has."""
BESIDE_TORCH = [
    "absl-py", "accelerate", "annotated-doc", "anyio", "attrs", "certifi", "charset-normalizer", "click",
    "contourpy", "cycler", "filelock", "fonttools", "fsspec", "grpcio", "h11", "hf-xet", "httpcore", "httpx",
    "huggingface-hub", "hypothesis", "idna", "iniconfig", "jinja2", "kiwisolver", "markdown", "markdown-it-py",
    "markupsafe", "matplotlib", "mdurl", "mpmath", "networkx", "numpy", "packaging", "pandas", "peft", "pillow",
    "pluggy", "protobuf", "psutil", "pyarrow", "pygments", "pyparsing", "pytest", "pytest-timeout",
    "python-dateutil", "pyyaml", "regex", "requests", "rich", "safetensors", "setuptools", "shellingham", "six",
    "sortedcontainers", "sympy", "tensorboard", "tensorboard-data-server", "tokenizers", "torch", "tqdm",
    "transformers", "typer", "typing-extensions", "urllib3", "werkzeug", "xxhash",
]  # fmt: skip
"""Packages that an image with PyTorch is expected to have."""
SOURCES = ("src", "tests/gpu", "tests/contract", "benchmarks")
QUERY = "name,driver_version,memory.total,power.limit,clocks.max.sm"


def host_facts() -> dict[str, Any]:
    """What any benchmark's numbers depend on, and the GPUs, driver, CUDA and NCCL of this host."""
    import torch  # only here: `--wheels` needs no packages

    from benchmarks.results import facts

    smi = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(smi, capture_output=True, text=True, timeout=60, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    return {
        **facts(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }


def source_digest() -> str:
    """Digest of the files on which results depend."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def wanted_wheels(path: Path = WHEELS) -> list[str]:
    """The requirements of the file, without comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def missing_wheels() -> list[str]:
    """Those that are not installed here, in any version."""
    return [each for each in wanted_wheels() if not _installed(each.partition("==")[0])]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
