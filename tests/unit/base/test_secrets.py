"""Secrets are refused in configs, and redacted elsewhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.base.secrets import (
    _SECRET_FORMS,
    HIDDEN,
    find_secrets,
    is_secret_name,
    redact,
    redact_environment,
    redact_text,
    secret_kind,
    secret_values,
)
from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config

# Made up; put together here so that scanners of repositories do not take them for real ones.
SECRETS = {
    "an API key": ["sk-" + "proj-7Gq1vR4nTz8LxWc2Yb5M", "sk-" + "ant-api03-AAAAbbbbCCCCdddd1111"],
    "a service's key": ["gsk_" + "a1B2" * 12],
    "a Hugging Face token": ["hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"],
    "a GitHub token": ["ghp_" + "0123456789abcdefghijABCDEFGHIJ012345", "github_pat_" + "11ABCDEFG0" * 4],
    "a GitLab token": ["glpat-" + "x1Y2z3A4b5C6d7E8f9G0"],
    "a cloud key": ["AKIA" + "IOSFODNN7EXAMPLE", "AIza" + "SyA1bC2dE3fG4hI5jK6lM7nO8pQ9rS0tU1"],
    "a Slack token": ["xoxb-" + "123456789012-abcdefGHIJKL"],
    "a signed token": ["eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0." + "dBjftJeZ4CVPmB92K27u"],
    "a private key": ["-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"],
    "a bearer token": ["Bearer 9f8e7d6c5b4a39281706f5e4"],
    "an URL with a password": ["https://me:hunter2hunter2@models.example/v1"],
    "an URL with a token": ["http://models.example/score?x=1&api_key=abcdefgh12"],
}
HARMLESS = [
    "sk-experiment-with-a-long-name-2",
    "Qwen/Qwen2.5-0.5B-Instruct", "runs/sk-learn", "hf_hub", "user@example", "https://host:8000/v1", "task-sk-1",
    "0123456789=", "<|im_end|>", "git@host:repo.git", "https://host/a?tokens=12", "Score: 10", "the bearer of news",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, each in SECRETS.items() for text in each])
def test_secrets_are_known_by_their_form(kind: str, text: str) -> None:
    assert secret_kind(text) == kind
    for around in (text, f"before {text} after", json.dumps({"x": text})):
        assert secret_kind(around) is not None
        hidden = redact_text(around)
        assert HIDDEN in hidden
        assert not any(part in hidden for part in (text, "hunter2", "9f8e7d6c", "abcdefgh12", "MIIEow"))
    assert list(find_secrets({"a": [{"b": text}]})) == [("a.0.b", kind)]


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_values_are_kept(text: str) -> None:
    assert secret_kind(text) is None and redact_text(text) == text
    assert list(find_secrets({"path": text})) == []


def test_names_reveal_secrets_that_have_no_known_form() -> None:
    for name in ("api_key", "WANDB_API_KEY", "token", "db.password", "client-secret", "apikey", "auth"):
        assert is_secret_name(name), name
    for name in ("max_tokens", "eos_token", "pad_token", "api_key_env", "keyboard", "monkey", "tokenizer", "author"):
        assert not is_secret_name(name), name
    drawn = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
    assert list(find_secrets({"arguments": {"token": drawn}})) == [("arguments.token", "a key or password")]
    for value in ("<|reserved_special_token_123|>", "final_answer_column_2", "some words of 2023 and 2024"):
        assert list(find_secrets({"arguments": {"answer_key": value, "token": value}})) == []
    assert list(find_secrets({"arguments": {"token": "</s>", "key": "answer", "checksum": drawn}})) == []


COMMON_NAMES = [
    "PGPASSWORD", "DB_PASS", "MYSQL_PWD", "AZURE_STORAGE_CONNECTION_STRING", "MY_PAT", "GITHUB_PAT", "SENTRY_DSN",
    "DATABASE_URL", "REDIS_URL", "SLACK_WEBHOOK_URL", "GHTOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
    "API_KEY_2", "SECRET_KEY_BASE", "JWT_SECRET", "NPM_AUTH", "GOOGLE_CREDENTIALS_JSON", "SSH_KEY",
    "ENCRYPTION_KEY", "SESSION_COOKIE", "VAULT_TOKEN_PROD", "CLIENT_SECRET", "AZURE_SAS", "WANDB_API_KEY",
]  # fmt: skip
"""Names of variables in which services keep secrets."""


def test_names_of_services_secrets_are_known() -> None:
    assert [name for name in COMMON_NAMES if not is_secret_name(name)] == []
    ordinary = (
        "n_tokens tokens_per_second skip_special_tokens NCCL_IB_PKEY PATH head_dim passes token_budget key_padding "
        "kv_tokens auth_mode passthrough max_new_tokens pad_tokens compass bypass PWD_FILE keys monkey_patch"
    )
    assert [name for name in ordinary.split() if is_secret_name(name)] == []


def test_of_an_environment_only_what_says_how_a_job_runs_is_shown() -> None:
    environment = dict.fromkeys(COMMON_NAMES, "correct-horse-battery") | {
        "MY_OWN_THING": "swordfish", "NCCL_DEBUG": "INFO", "RANK": "3", "PATH": "/usr/bin:/bin", "EMPTY": "",
        "HTTPS_PROXY": "http://me:hunter2hunter2@proxy:3128", "LOCKSTEP_TOKEN": "abcdefgh12", "HF_TOKEN": "t",
        "RAY_EXTRA": "9f8e7d6c5b4a39281706f5e4d3c2b1a0",
    }  # fmt: skip
    shown = redact_environment(environment)
    assert shown.keys() == environment.keys()
    ordinary = {"NCCL_DEBUG": "INFO", "RANK": "3", "PATH": "/usr/bin:/bin", "EMPTY": ""}
    proxy = {"HTTPS_PROXY": f"http://{HIDDEN}@proxy:3128"}
    assert {name: value for name, value in shown.items() if value != HIDDEN} == ordinary | proxy
    assert redact_environment(shown) == shown


def test_random_values_of_unknown_variables_are_hidden_everywhere() -> None:
    drawn = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
    assert secret_values({"MY_OWN_THING": drawn}) == (drawn,)
    assert secret_values({"SLURM_JOB_UID_HASH": drawn, "HOME": "/home/somebody-with-digits-1234"}) == ()
    folder = "/home/somebody/project"  # the shell's variable: hiding it would hide every call site below it
    assert secret_values({"PWD": folder}) == () and secret_values({"PWD": "geheim-12"}) == ("geheim-12",)


def test_redacting_keeps_the_structure() -> None:
    values = {"api_key": "x", "n": 1, "list": [{"token": "y"}, "hf_" + "a" * 30], "none": None, "eos_token": "</s>"}
    assert redact(values) == {
        "api_key": HIDDEN, "n": 1, "list": [{"token": HIDDEN}, HIDDEN], "none": None, "eos_token": "</s>",
    }  # fmt: skip


def test_values_of_secret_variables_are_hidden_everywhere() -> None:
    environment = {"MY_API_KEY": "plainwords-but-secret", "HOME": "somewhere-long", "SHORT_KEY": "abc", "NO_KEY": ""}
    known = secret_values(environment)
    assert known == ("plainwords-but-secret",)
    assert (
        redact_text("401: plainwords-but-secret is wrong, somewhere-long", known)
        == f"401: {HIDDEN} is wrong, somewhere-long"
    )
    assert redact({"a": "x plainwords-but-secret"}, known) == {"a": f"x {HIDDEN}"}


BASE: dict[str, Any] = {"recipe": "grpo", "name": "x", "steps": 1, "model": {"path": "m"}, "data": {"path": "d"}}


@pytest.mark.parametrize(
    ("term", "field"),
    [
        (
            {"kind": "judge", "model": "m", "api_key_env": SECRETS["a Hugging Face token"][0]},
            "reward.terms.0.api_key_env",
        ),
        ({"kind": "judge", "model": "m", "extra": {"key": SECRETS["an API key"][0]}}, "reward.terms.0.extra.key"),
        ({"kind": "http", "url": SECRETS["an URL with a password"][0]}, "reward.terms.0.url"),
        (
            {"kind": "function", "path": "a.py:f", "arguments": {"password": "Tr0ub4dor-and-3-more"}},
            "arguments.password",
        ),
    ],
)
def test_a_config_with_a_secret_is_refused_and_the_secret_not_repeated(
    tmp_path: Path, term: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(BASE | {"reward": {"terms": [term]}}, "file.yaml")
    message = str(caught.value)
    assert field in message and "put the secret into the environment" in message
    for secret in (*(text for each in SECRETS.values() for text in each), "hunter2hunter2", "Tr0ub4dor"):
        assert secret not in message


def test_a_problem_with_a_field_does_not_repeat_its_secret() -> None:
    from lockstep.config.loader import _to_problems
    from lockstep.config.recipes import GRPOConfig

    secret = SECRETS["a Hugging Face token"][0]
    item = {"loc": ("model", "path"), "type": "string_type", "input": secret, "msg": "Input should be text"}
    assert secret not in str(_to_problems(item, GRPOConfig))
    assert yaml.safe_load(HIDDEN) == ["hidden"] or HIDDEN  # it remains readable in YAML


FRAGMENTS = [*(text for each in SECRETS.values() for text in each), *HARMLESS, "?", "&key=", "://", ":", "@", "\n", "-"]


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text("aB3-_.:/@? ", max_size=30), max_size=8).map("".join))
def test_looking_for_parts_first_changes_nothing(text: str) -> None:
    """The result is that of all patterns at once: what has not the parts of a pattern does not match it."""
    everything = re.compile("|".join(f"(?:{form.pattern})" for form in _SECRET_FORMS.values()), re.DOTALL)
    assert redact_text(text) == everything.sub(HIDDEN, text)
    assert (secret_kind(text) is not None) == bool(everything.search(text))
