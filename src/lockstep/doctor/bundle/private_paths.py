"""Replaces the folders in paths that people name, and buckets. File names and the folders of systems stay."""

import re

_SYSTEM_TOPS = frozenset(("usr", "lib", "lib64", "bin", "sbin", "etc", "proc", "sys", "dev", "boot", "snap", "nix"))
"""What is below them is the same on many machines."""
_STORAGE_TOP = re.compile(
    r"(?:home|Users|users?|root|mnt|media|data|datasets?|disk|disks|nvme|ssd|hdd|raid|scratch|lustre|gpfs|fsx|nfs|efs|nas"
    r"|weka|beegfs|ceph|cephfs|cpfs|pfs|gfs|juicefs|vast|netapp|storage|stores?|share|shared|vol|volumes?|work|works"
    r"|workspaces?|projects?|proj|groups?|teams?|export|net|opt|srv|var|tmp|local|cluster|clusterfs|app|apps|code|repos?"
    r"|src|checkpoints?|models?|outputs?|results?|logs?|cache|gscratch|orcd|leonardo|pscratch)(?:[_-]?\d{1,3})?"
)
_KNOWN_FOLDERS = frozenset((
    "fsw", "project", "proj", "work", "workspace", "code", "src", "source", "repo", "repos", "app", "apps", "git",
    "train", "training", "trainer", "trainers", "rl", "rlhf", "sft", "dpo", "ppo", "grpo", "kto", "orpo", "reward",
    "rewards", "eval", "evals", "evaluation", "infer", "inference", "serve", "serving", "server", "engine", "engines",
    "data", "dataset", "datasets", "loader", "loaders", "dataloader", "model", "models", "modeling", "weights",
    "checkpoint", "checkpoints", "ckpt", "ckpts", "latest", "best", "save", "saves", "saved", "export", "hf",
    "output", "outputs", "out", "result", "results", "log", "logs", "run", "runs", "job", "jobs", "exp", "exps",
    "experiments", "experiment", "tmp", "temp", "cache", "caches", "hub", "huggingface", "snapshots", "blobs", "refs",
    "home", "user", "users", "mnt", "share", "shared", "local", "scratch", "public", "common", "portfolios", "root",
    "bin", "lib", "lib64", "include", "etc", "libs", "third_party", "vendor", "build", "dist", "target",
    "script", "scripts", "tools", "example", "examples", "recipe", "recipes", "config", "configs", "conf", "cfg",
    "util", "utils", "core", "test", "tests", "python", "venv", "venvs", "env", "envs", "conda", "anaconda3",
    "miniconda", "miniconda3", "miniforge3", "mambaforge", "micromamba", "pyenv", "versions", "pkgs", "session_latest",
    "spool", "slurm", "slurmd", "kubelet", "pods", "containers", "docker", "containerd", "overlay", "overlay2",
    "incidents", "incident", "dumps", "traces", "profiles", "tensorboard", "wandb", "mlruns", "optimizer", "optim",
    "global_step", "actor", "critic", "policy", "main", "default", "sockets", "worker", "workers", "node", "nodes",
))  # fmt: skip
_PACKAGES = frozenset((
    "torch", "pytorch", "torchvision", "torchaudio", "torchtitan", "torchtune", "triton", "vllm", "sglang", "deepspeed",
    "DeepSpeed", "transformers", "trl", "accelerate", "peft", "datasets", "ray", "verl", "openrlhf", "OpenRLHF",
    "slime", "skyrl", "SkyRL", "nemo", "nemo_rl", "NeMo", "NeMo-RL", "megatron", "Megatron-LM", "lightning",
    "pytorch_lightning",
    "ms-swift", "swift", "llamafactory", "LLaMA-Factory", "axolotl", "unsloth", "prime-rl", "lockstep", "flash_attn",
    "flash-attention", "xformers", "bitsandbytes", "apex", "gloo", "nccl", "csrc", "c10d", "jax", "flax", "tensorflow",
    "horovod", "paddle", "xgboost", "site-packages", "dist-packages", "conda-bld", "tensorrt_llm", "TensorRT-LLM",
))  # fmt: skip
"""Public software: what is below these folders is its own."""
_NUMBERED = re.compile(
    r"(?i)\d+|v\d+|\.[a-z]{2,12}|python\d?(?:\.\d+)*|\d+(?:\.\d+)+|[0-9a-f]{40}"
    r"|(?:global_?step|step|checkpoint|ckpt|iter|epoch|rank|attempt|node|worker|job|run|version|shard|part|trial|gpu)"
    r"(?:[_-]?\d+)*|(?:user|machine|run-name|project|team|folder|bucket)-\d+|none_\w{8}|session_[\d_-]+"
)
"""Folders whose names count something or are substitutes."""
_PATH = re.compile(
    r"(?P<frame>(?<=File \"))?(?<![\w./~<-])/(?P<inside>[\w@+-][\w.@+-]*(?:/[\w.@+-]+){1,30})(?P<end>/?)"
)
_WINDOWS_PATH = re.compile(r"\b(?P<drive>[A-Za-z]:)(?P<slash>\\\\?)(?P<inside>[\w.@+-]+(?:(?P=slash)[\w.@+-]+){1,30})")
_FILE = re.compile(r".+\.[A-Za-z][A-Za-z0-9]{0,11}|lib[\w.+-]+\.so[\d.]*")
_BUCKET = re.compile(
    r"\b(?P<scheme>s3[an]?|gs|gcs|oss|cos|cosn|obs|tos|r2|b2|az|abfss?|wasbs?|adl|hdfs|viewfs|swift)://"
    r"(?P<bucket>[A-Za-z0-9][\w.-]*)(?P<key>(?:/[\w.@+=%-]+)*/?)"
)
_BUCKET_HOST = re.compile(
    r"(?<=://)(?P<bucket>[a-z0-9][a-z0-9.-]{1,62})(?P<rest>\.(?:s3[.-][a-z0-9.-]*amazonaws\.com|storage\.googleapis\.com))"
    r"(?P<key>(?:/[\w.@+=%-]+)*/?)"
)
_BUCKET_PATH = re.compile(
    r"(?<=://)(?P<rest>s3[.-][a-z0-9.-]*amazonaws\.com|storage\.(?:googleapis|cloud\.google)\.com)/(?P<bucket>[\w.-]+)"
    r"(?P<key>(?:/[\w.@+=%-]+)*/?)"
)


class PrivatePaths:
    """Replaces the folders of paths and the names of buckets, the same name with the same substitute.

    Only what stands in a path is replaced: a folder may have the name of any word of a log.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """The substitutes that were given, by name."""
        self._counts: dict[str, int] = {}

    def text(self, text: str) -> str:
        """Returns a text without private folders and buckets."""
        if "://" in text:
            text = _BUCKET.sub(lambda at: f"{at['scheme']}://{self._bucket(at['bucket'])}{self._key(at['key'])}", text)
            text = _BUCKET_HOST.sub(lambda at: f"{self._bucket(at['bucket'])}{at['rest']}{self._key(at['key'])}", text)
            text = _BUCKET_PATH.sub(lambda at: f"{at['rest']}/{self._bucket(at['bucket'])}{self._key(at['key'])}", text)
        if "\\" in text:
            text = _WINDOWS_PATH.sub(self._windows, text)
        return _PATH.sub(self._path, text) if "/" in text else text

    def _path(self, found: re.Match[str]) -> str:
        parts = found["inside"].split("/")
        top = parts[0]
        if top in _SYSTEM_TOPS or not (_STORAGE_TOP.fullmatch(top) or found["frame"] is not None):
            return found[0]
        if _STORAGE_TOP.fullmatch(top):
            return "/".join(("", top, *self._folders(parts[1:], ends=bool(found["end"])))) + found["end"]
        return "/".join(("", *self._folders(parts, ends=False))) + found["end"]

    def _windows(self, found: re.Match[str]) -> str:
        parts = found["inside"].split(found["slash"])
        return found["drive"] + found["slash"] + found["slash"].join(self._folders(parts, ends=False))

    def _key(self, key: str) -> str:
        """Replaces the folders of what follows a bucket."""
        return "/" + "/".join(self._folders(key[1:].split("/"), ends=False)) if key else ""

    def _folders(self, parts: list[str], *, ends: bool) -> list[str]:
        """Replaces folders up to those of public software. The last part is a file if it has an extension and no slash
        `ends` it."""
        kept: list[str] = []
        for at, part in enumerate(parts):
            if part in _PACKAGES:
                return kept + parts[at:]
            is_file = at == len(parts) - 1 and not ends and _FILE.fullmatch(part) is not None
            kept.append(part if is_file else self._folder(part))
        return kept

    def _folder(self, name: str) -> str:
        if name.lower() in _KNOWN_FOLDERS or _NUMBERED.fullmatch(name) or not name.strip("."):
            return name
        return self._substitute(name, "folder")

    def _bucket(self, name: str) -> str:
        return name if _NUMBERED.fullmatch(name) else self._substitute(name, "bucket")

    def _substitute(self, name: str, kind: str) -> str:
        if name not in self.names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self.names[name] = f"{kind}-{self._counts[kind]}"
        return self.names[name]
