"""Files from elsewhere that are built to use all memory or time, or to end a command with a traceback, are refused at
once with the file, the line, the limit and a remedy."""

import gzip
import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import config, task
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.data import dataset_rows
from lockstep.data.dataset_rows import DataError

pytestmark = pytest.mark.xdist_group("hostile files")
DEEP = "[" * 100_000
DEEP_VALUE = "[" * 900 + "]" * 900
LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 12))
EARLIER = Path(__file__).parents[1] / "e2e" / "earlier_run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A test may neither take long nor grow much."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < 20.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10, "more than 600 MiB"


def refused(*arguments: object, code: int = 2) -> str:
    """Check that a command ends with an error and no traceback; returns its message on one line."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def run_file(folder: Path, **changes: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config(folder, "grpo", name="bad", **changes)))
    return path


def chat_model(folder: Path, template: str = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}") -> Any:
    """The model of the folder with a chat template, as the section of a config."""
    file = folder / f"{hash(template)}.jinja"
    file.write_text(template)
    return {"path": str(folder / "model"), "chat_template": str(file)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "line 6: stands for more than 100,000 values, those behind aliases included (write fewer"),
        (f"recipe: sft\nsteps: {DEEP}", "line 2: is nested more than 60 levels deep (make it flatter)"),
        ("recipe: sft\ndata: &a {path: *a}", "line 2: an alias stands for a value that contains the alias itself"),
        ("x" * (5 << 20), "is larger than 4 MiB, the limit for YAML"),
    ],
    ids=["laughs", "deep", "cycle", "size"],
)
def test_configs_are_bounded(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    for command in (("train",), ("check",)):
        message = refused(*command, file)
        assert words in message and str(file) in message, message


def test_overrides_and_devices_are_bounded(folder: Path) -> None:
    message = refused("train", run_file(folder), f"steps={DEEP}")
    assert "command line" in message and "nested more than 60 levels deep" in message and len(message) < 500
    assert "/dev/zero" in refused("train", "/dev/zero")


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("deep.jsonl", f'{{"prompt": "1=", "answer": {DEEP}', "line 2: lists and objects are nested more than 100"),
        ("value.jsonl", f'{{"prompt": "1=", "answer": {DEEP_VALUE}}}', "line 2: lists and objects are nested more"),
        ("tools.jsonl", json.dumps({"prompt": [{"role": "user", "content": "1="}], "answer": "1", "tools": DEEP}),
         "line 2, column 'tools': not JSON: is nested more than 100 levels deep"),
        ("content.jsonl", f'{{"prompt": [{{"role": "user", "content": {DEEP_VALUE}}}], "answer": "1"}}',
         "line 2: lists and objects are nested more than 100"),
        ("text.jsonl", json.dumps({"prompt": "1" * (9 << 20), "answer": "1"}),
         "line 2: the text has 9,437,184 characters, and the limit is 8,388,608. Split it"),
    ],
    ids=lambda value: value.partition(".")[0] if isinstance(value, str) and value.endswith(".jsonl") else "",
)  # fmt: skip
def test_rows_are_bounded(folder: Path, name: str, row: str, words: str) -> None:
    file = folder / "data" / name
    good = (
        row.replace(DEEP, "[]").replace(DEEP_VALUE, "[]")
        if name == "tools.jsonl"
        else '{"prompt": "1=", "answer": "1"}'
    )
    file.write_text(f"{good}\n{row}\n")
    message = refused("train", run_file(folder, model=chat_model(folder), data={"path": str(file)}), "--dry-run")
    assert words in message and str(file) in message, message[:2000]


def test_a_line_of_300_mb_is_not_read(folder: Path) -> None:
    file = folder / "data" / "long.jsonl"
    with file.open("wb") as out:
        out.write(b'{"prompt": "1=", "answer": "1"}\n{"prompt": "')
        out.truncate(300 << 20)
    message = refused("train", run_file(folder, data={"path": str(file)}), "--dry-run")
    assert f"{file}, line 2: the line is longer than 64 MiB, the limit for a row. Leave it out" in message


def test_a_gzip_file_that_would_fill_the_disk_is_not_uncompressed(folder: Path) -> None:
    file = folder / "data" / "bomb.jsonl.gz"
    file.write_bytes(gzip.compress(bytes(16 << 20)) * 64)
    message = refused("train", run_file(folder, data={"path": str(file)}), "--dry-run")
    assert f"{file}: its content has more than 268,435,456 bytes, the limit: data is not compressed" in message


def test_a_gzip_file_must_fit_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "data" / "large.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "1=", "answer": "1"}\n' * 100_000))
    monkeypatch.setattr(dataset_rows, "free_space", lambda path: (1 << 20, 1, 1))
    message = refused("train", run_file(folder, data={"path": str(file)}), "--dry-run")
    assert f"{file}: its content has more than 943,719 bytes, the limit: " in message
    assert "has 1,048,576 bytes free. Uncompress it yourself (gunzip)" in message
    monkeypatch.undo()

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DataError, match=r"cannot be written to a temporary file: .* over 1,048,576 bytes"):
            dataset_rows.uncompressed_file(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_json_array_is_bounded(folder: Path) -> None:
    for name, text in (("open.json", "[" + DEEP), ("value.json", f'[{{"prompt": "1=", "answer": {DEEP_VALUE}}}]')):
        file = folder / "data" / name
        file.write_text(text)
        message = refused("train", run_file(folder, data={"path": str(file)}), "--dry-run")
        assert "nested more than 100 levels deep" in message and str(file) in message


@pytest.mark.parametrize("template", ["{prompt:>9999999999}", "{prompt.__class__}", "{prompt!r}", "{prompt[0]}", "{}"])
def test_a_data_template_is_only_filled_in(folder: Path, template: str) -> None:
    data = {"path": str(folder / "data" / "grpo.jsonl"), "template": template}
    message = refused("train", run_file(folder, data=data), "--dry-run")
    assert "data.template" in message and "the only placeholder is {prompt}" in message


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json", "lockstep_tiny.json",
     "special_tokens_map.json", "model.safetensors.index.json"],
)  # fmt: skip
@pytest.mark.parametrize(
    "content", [DEEP, DEEP_VALUE, '{"a": ' * 900 + "1" + "}" * 900], ids=["open", "lists", "objects"]
)
def test_files_of_a_model_are_bounded(folder: Path, tmp_path: Path, name: str, content: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    (model / name).write_text(content)
    result = CliRunner().invoke(app, ["train", str(run_file(folder, model={"path": str(model)})), "--dry-run"])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    if name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        assert result.exit_code == 2 and str(model) in " ".join(result.output.split()), result.output


@pytest.mark.parametrize("text", ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
                                  "{{ 'a' * 10**10 }}"], ids=["loop", "memory"])  # fmt: skip
def test_a_models_chat_template_is_bounded(folder: Path, tmp_path: Path, text: str) -> None:
    model, file = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(folder / "model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": text}))
    file.write_text('{"prompt": [{"role": "user", "content": "1="}], "answer": "1"}\n')
    run = run_file(
        folder, model={"path": str(model)}, data={"path": str(file)}, evaluation={"data": {"path": str(file)}}
    )
    message = refused("train", run, "--dry-run")
    assert f"{file}, line 1: the chat template of {model}" in message and "Set model.chat_template" in message


@pytest.mark.parametrize(
    "content", [DEEP, DEEP_VALUE, "[1, 2]", "\x00\xff", "{"], ids=["open", "lists", "list", "bytes", "cut"]
)
def test_small_files_of_a_run_folder_are_bounded(tmp_path: Path, content: str) -> None:
    home = tmp_path / "home"
    shutil.copytree(EARLIER, home)
    run = home / "runs" / "begun"
    files = ["summary.json", "tracking.json", "lock", "metrics.jsonl", "run-id", "config.yaml", "cluster/agent.json",
             "cluster/supervisor.json", "cluster/state.json", "cluster/environment.json"]  # fmt: skip
    for name in files:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(content, encoding="latin-1")
    for command in (["report", run], ["top", "--once", run], ["train", "--resume", run, "--dry-run"]):
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, repr(result.exception))
        assert "Traceback" not in result.output


@pytest.mark.parametrize("content", [DEEP, DEEP_VALUE, "[1, 2]", "{}", '{"kind": {}, "culprits": 3}'])
def test_incidents_are_bounded(tmp_path: Path, content: str) -> None:
    incident = tmp_path / "incidents" / "20261121-231502-absent-policy-1"
    incident.mkdir(parents=True)
    for name in ("verdict.json", "environment.json", "run.json", "findings.json", "timeline.json", "beacons.json"):
        (incident / name).write_text(content)
    for path in (incident, incident.parent, incident / "verdict.json"):
        result = CliRunner().invoke(app, ["explain", str(path)])
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        assert "Traceback" not in result.output


def test_rules_and_configs_given_to_explain_are_bounded(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    (tmp_path / "job.log").write_text("step 1 loss 2\n")
    for text, words in ((LAUGHS, "more than 100,000 values"), (f"a: {DEEP}", "nested more than 60 levels deep")):
        (rules / "mine.yaml").write_text(text)
        message = refused("explain", tmp_path / "job.log", "--rules", rules)
        assert words in message and "mine.yaml" in message
        message = refused("explain", "--config", rules / "mine.yaml")
        assert words in message and "mine.yaml" in message


def test_a_schema_of_a_reward_is_bounded(folder: Path) -> None:
    schema = folder / "schema.json"
    for text in (DEEP, '{"items": ' * 900 + "{}" + "}" * 900):
        schema.write_text(text)
        terms = [{"kind": "json_schema", "file": str(schema)}]
        message = refused("train", run_file(folder, reward={"terms": terms}), "--dry-run")
        assert "schema.json" in message and "nested more than 100 levels deep" in message
