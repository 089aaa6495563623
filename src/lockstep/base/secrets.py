"""Finds secrets in configs, so that these are refused, and redacts secrets in other texts."""

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

HIDDEN = "[hidden]"


class _SecretForm(NamedTuple):
    """What a kind of secret looks like. A text without one of each group of `parts` contains no such secret: to look
    for the parts takes a fraction of the time of a match."""

    pattern: str
    parts: tuple[tuple[str, ...], ...]


_SECRET_FORMS: Mapping[str, _SecretForm] = {
    "an API key": _SecretForm(r"\b(?:sk|pk|rk)-(?:[A-Za-z0-9]+-){0,3}(?=\w*\d)\w{16,}[\w-]*", (("sk-", "pk-", "rk-"),)),
    "a service's key": _SecretForm(
        r"\b(?:gsk_|nvapi-|xai-|wandb_v1_|r8_)[A-Za-z0-9_-]{20,}", (("gsk_", "nvapi-", "xai-", "wandb_v1_", "r8_"),)
    ),
    "a Hugging Face token": _SecretForm(r"\bhf_[A-Za-z0-9]{24,}", (("hf_",),)),
    "a GitHub token": _SecretForm(
        r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}",
        (("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),),
    ),
    "a GitLab token": _SecretForm(r"\bglpat-[A-Za-z0-9_-]{18,}", (("glpat-",),)),
    "a cloud key": _SecretForm(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}", (("AKIA", "ASIA", "AIza"),)),
    "a Slack token": _SecretForm(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", (("xox",),)),
    "a signed token": _SecretForm(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}", (("eyJ",),)),
    "a private key": _SecretForm(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----)?", (("PRIVATE KEY-----",),)
    ),
    "a bearer token": _SecretForm(r"(?<=[Bb]earer )\s*[A-Za-z0-9._~+/=-]{16,}", (("earer ",),)),
    "an URL with a password": _SecretForm(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)", (("://",), ("@",))),
    "an URL with a token": _SecretForm(
        r"(?<=[?&])(?:[a-z_-]*(?:key|token|secret|password|signature))=[^\s&#]{8,}",
        (("?", "&"), ("key=", "token=", "secret=", "password=", "signature=")),
    ),
}
_SECRET_NAME = re.compile(
    r"""(?:^|[_.-])(?:(?:api|access|account|client|encryption|private|secret|shared|signing|ssh|storage)_?key(?:_?id)?|key
    |pass|pwd|pw|passphrase|cred|credentials?|auth|authorization|pat|dsn|jwt|sas|cookie|conn(?:ection)?_?str(?:ing)?
    |(?:webhook|database|db|redis|mongo(?:db)?|postgres(?:ql)?|mysql|amqp|broker)_?ur[il])
    (?:_?(?:\d+|b64|base64|base|v\d+|value|json|prod|dev|test))?$
    |(?:password|passwd|passcode|secret|token|api_?key|credentials)s?
    (?:_?(?:\d+|b64|base64|base|v\d+|value|json|prod|dev|test))?$
    |(?:^|_)secrets?_""",
    re.IGNORECASE | re.VERBOSE,
)
_NO_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:eos|bos|pad|unk|sep|cls|mask|stop|image|video|vision|special|max|min|num|new|total|prompt|output"
    r"|input|answer|per)_tokens?$|(?:^|_)tokens$",
    re.IGNORECASE,
)
"""Names about tokens of text."""
_SHOWN_VARIABLES = re.compile(
    r"""(?:ACCELERATE|BNB|CONDA|CUBLAS|CUDA|CUDNN|DEEPSPEED|DS|FI|FSDP|GLIBC|GLOO|GOMP|HF|HIP|HUGGINGFACE|HUGGING_FACE|HYDRA
    |KMP|LC|LD|LOCKSTEP|MALLOC|MASTER|MKL|MPI|MPICH|NCCL|NUMEXPR|NVIDIA|NVTE|OFI|OMP|OMPI|OPENBLAS|OPENRLHF|PMI|PMIX
    |PRTE|PYTHON|PYTORCH|RAY|RCCL|ROCM|ROCR|SBATCH|SGLANG|SLURM|TOKENIZERS|TORCH|TORCHELASTIC|TORCHINDUCTOR|TP|TRANSFORMERS
    |TRITON|TRL|UCX|VERL|VLLM|WANDB|XDG|XLA)_\w*
    |CPU_BIND|CUDAHOSTCXX|CXX|CC|DEBUG|GROUP_RANK|GROUP_WORLD_SIZE|HOME|HOSTNAME|LANG|LANGUAGE|LOCAL_RANK|LOCAL_WORLD_SIZE
    |LOGNAME|NODE_RANK|NO_COLOR|OLDPWD|PATH|PWD|PYTHON[A-Z]*|RANK|ROLE_NAME|ROLE_RANK|ROLE_WORLD_SIZE|SHELL|SHLVL|TERM|TMPDIR
    |TZ|USER|VIRTUAL_ENV|WORLD_SIZE|(?:http|https|no|all)_proxy""",
    re.IGNORECASE | re.VERBOSE,
)
"""Variables whose values say how a job runs. The value of any other variable may be a secret with a name of its own."""
_MIN_DIGITS = 3
"""The minimum number of digits in a random text; ordinary names have one or two."""
_MIN_VALUE_LENGTH = 8
"""Shorter values of variables are not redacted, because they may be ordinary words."""


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name usually holds a secret: `WANDB_API_KEY`, `token`, `db.password`."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def secret_kind(text: str) -> str | None:
    """The kind of secret that the text contains, by its form (`a Hugging Face token`); None if it contains none."""
    return next((kind for kind in _possible_kinds(text) if _compiled((kind,)).search(text)), None)


def find_secrets(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The secrets in nested mappings and lists, as (dotted path, kind). A text is a secret by its form, or if its key
    has the name of a secret and the text looks random."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from find_secrets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from find_secrets(value, f"{path}.{index}")
    elif isinstance(values, str):
        kind = secret_kind(values)
        if kind is None and is_secret_name(path) and _looks_random(values):
            kind = "a key or password"
        if kind is not None:
            yield path, kind


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables that are probably secrets, longest first, for `redact_text`: by the variable's name, or
    because the value looks random and the variable is not one of those that say how a job runs."""
    values = {
        value.strip()
        for name, value in environment.items()
        if (is_secret_name(name) and not (name == "PWD" and value.startswith("/")))  # the shell's working folder
        or (not _SHOWN_VARIABLES.fullmatch(name) and _looks_random(value.strip()))
    }
    return tuple(sorted((value for value in values if len(value) >= _MIN_VALUE_LENGTH), key=len, reverse=True))


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process with the values of those that say how a job runs, such as `NCCL_DEBUG`. All other
    values are hidden, because a secret may be in a variable of any name."""
    known = secret_values(environment)
    shown = {name for name in environment if _SHOWN_VARIABLES.fullmatch(name) and not is_secret_name(name)}
    return {
        name: HIDDEN if value and (name not in shown or _looks_random(value)) else redact_text(value, known)
        for name, value in environment.items()
    }


def may_have_secrets(text: str) -> bool:
    """Whether the text has the parts of a secret's form. Takes a fraction of the time of `redact_text`."""
    return bool(_possible_kinds(text))


def redact_text(text: str, known: Collection[str] = ()) -> str:
    """The text with everything hidden that looks like a secret or is a known one."""
    for value in known:
        text = text.replace(value, HIDDEN)
    kinds = _possible_kinds(text)
    return _compiled(kinds).sub(HIDDEN, text) if kinds else text


def redact(values: Any, known: Collection[str] = (), name: str = "") -> Any:
    """A copy of nested mappings and lists in which texts under names of secrets are hidden, and others redacted."""
    if isinstance(values, Mapping):
        return {key: redact(value, known, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact(value, known, name) for value in values]
    if isinstance(values, str):
        return HIDDEN if values and is_secret_name(name) else redact_text(values, known)
    return values


def _possible_kinds(text: str) -> tuple[str, ...]:
    """The kinds of secrets whose parts are in the text; it contains no others."""
    return tuple([kind for kind, form in _SECRET_FORMS.items() if _has_parts(text, form.parts)])


def _has_parts(text: str, groups: tuple[tuple[str, ...], ...]) -> bool:
    for group in groups:
        for part in group:
            if part in text:
                break
        else:
            return False
    return True


@functools.lru_cache(maxsize=256)
def _compiled(kinds: tuple[str, ...]) -> re.Pattern[str]:
    """What matches a secret of one of these kinds."""
    return re.compile("|".join(f"(?:{_SECRET_FORMS[kind].pattern})" for kind in kinds), re.DOTALL)


def _looks_random(text: str) -> bool:
    """Whether a text looks random: long, with the characters of keys, with letters and several digits, and with a
    Shannon entropy above 3 bits per character."""
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]{16,}", text) or not re.search(r"[A-Za-z]", text):
        return False
    if len(re.findall(r"\d", text)) < _MIN_DIGITS:
        return False
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares) > 3.0
