"""Bad input on the command line: it is refused before anything starts (exit code 2, nothing on disk), or the run ends
with an error that names problem, location and reason (exit code 1) and can be resumed."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from gated_rewards import Gate
from harness import Launched, config, prompts_used, task, write
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("bad input"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("bad"))


# ---------------------------------------------------------------- refused before anything starts


def snapshot(folder: Path) -> dict[str, str]:
    """Digests of all files in a folder."""
    return {str(path): sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in folder.rglob("*")}


def refused(folder: Path, *arguments: str) -> str:
    """Check that `lockstep ARGUMENTS` is refused, starts nothing and leaves nothing behind; returns its message on one
    line."""
    before, children = snapshot(folder), psutil.Process().children(recursive=True)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert isinstance(result.exception, SystemExit) and "Traceback" not in result.stderr
    assert snapshot(folder) == before
    assert psutil.Process().children(recursive=True) == children
    return " ".join(result.stderr.split())


def grpo(folder: Path, **changes: Any) -> dict[str, Any]:
    return config(folder, "grpo", name="bad", **changes)


def sft(folder: Path, **changes: Any) -> dict[str, Any]:
    return config(folder, "sft", name="bad", **changes)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepps=3", ["stepps", "unknown key", "did you mean 'steps'?"]),
        ("trainer.learning_rate=1e-4", ["trainer.learning_rate", "unknown key", "'trainer.optimizer.lr'"]),
        ("rollout.sampling.temprature=1", ["unknown key", "did you mean 'temperature'?"]),
        ("steps=many", ["steps: 'many'", "valid integer"]),
        ("steps=-1", ["steps: -1", "greater than 0"]),
        ("trainer.reshard_after_forward=perhaps", ["trainer.reshard_after_forward: 'perhaps'", "valid boolean"]),
        ("trainer.optimizer.lr=fast", ["trainer.optimizer.lr: 'fast'", "valid number"]),
        ("cluster.device=gpu", ["cluster.device: 'gpu'", "'auto', 'cpu' or 'cuda'"]),
        ("recipe=gpro", ["recipe: 'gpro' is unknown", "sft, grpo"]),
        ("reward.terms.0.kind=exactmatch", ["reward.terms.0", "exactmatch", "exact_match"]),
        ("reward.terms.7.weight=2", ["command line", "reward.terms.7.weight=2", "no item '7'"]),
        ("reward.terms.0.pattern=(", ["reward.terms.0.pattern", "unknown key"]),
        ("reward.terms.1.pattern='('", ["reward.terms.1.pattern: '('", "not a regular expression"]),
        ("minibatch_size=3", ["minibatch_size 3", "multiple of group_size 4"]),
        ("token_budget=4", ["token_budget 4", "does not hold one sample", "rollout.sampling.max_tokens 4"]),
        ("name=../elsewhere", ["name: '../elsewhere'", "pattern"]),
        ("steps", ["command line", "steps: expected section.key=value"]),
        ("steps=[1,", ["command line", "steps: '[1,' is not a YAML value"]),
        ("rollout.sampling.max_tokens=32", ["rollout.sampling.max_tokens 32", "context of 32", "31 at most"]),
        (
            "evaluation.sampling={max_tokens: 40}",
            ["evaluation.sampling.max_tokens 40", "context of 32 tokens", "31 at most"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_values_are_refused(folder: Path, override: str, words: list[str]) -> None:
    message = refused(folder, "train", str(write(folder, grpo(folder))), override)
    assert all(word in message for word in words), message


def test_all_errors_are_reported_at_once(folder: Path) -> None:
    message = refused(folder, "train", str(write(folder, grpo(folder, stepps=3, seed="x"))), "trainer.ranks=0")
    assert all(word in message for word in ("stepps", "seed: 'x'", "trainer.ranks: 0")), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["cannot be read", "No such file"]),
        ("", ["expected a mapping", "an empty file"]),
        ("recipe: grpo\nsteps: [1,\n", ["not valid YAML", "line 3"]),
        ("recipe: grpo\nsteps: 1\nsteps: 2\n", ["the key 'steps' is given twice", "line 3"]),
        ("- recipe\n", ["expected a mapping", "found list"]),
        ("steps: 3\n", ["recipe: is missing", "sft, grpo"]),
    ],
    ids=["missing", "empty", "malformed", "twice", "list", "no recipe"],
)
def test_files_that_are_no_config(folder: Path, text: str | None, words: list[str]) -> None:
    file = folder / "file.yaml"
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)
    message = refused(folder, "train", str(file))
    assert str(file) in message and all(word in message for word in words), message


GOOD = '{"prompt": "1=", "answer": "1"}\n'
LONG = '{"prompt": "' + 29 * "1" + '=", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "settings", "words"),
    [
        ("gropo.jsonl", None, {}, ["no such file", "Did you mean 'grpo.jsonl'?"]),
        ("a.jsonl", "", {}, ["the file is empty"]),
        ("a.jsonl", "\n \n", {}, ["has no rows", "one JSON object per line"]),
        ("a.jsonl", GOOD + '{"prompt": "2=", "ans\n', {}, ["line 2", "not JSON"]),
        ("a.jsonl", "\n" + GOOD + "[1, 2]\n", {}, ["line 3", "expected an object", "found list"]),
        ("a.jsonl", GOOD + '{"prompt": 7, "answer": "1"}\n', {}, ["line 2", "'prompt'", "expected text", "found int"]),
        ("a.jsonl", GOOD + '{"prompt": "", "answer": "1"}\n', {}, ["line 2", "'prompt'", "is empty"]),
        ("a.jsonl", GOOD + '{"answer": "1"}\n', {}, ["line 2", "'prompt'", "no such column"]),
        ("a.jsonl", GOOD + '{"prompt": "2=", "answer": null}\n', {}, ["line 2", "no answer", "data.answer_column"]),
        ("a.jsonl", '{"prompt": "1="}\n', {}, ["line 1", "no answer", "data.answer_column"]),
        ("a.jsonl", '{"promt": "1=", "answer": "1"}\n', {}, ["no known prompt column", "promt", "data.prompt_column"]),
        ("a.jsonl", GOOD, {"answer_column": "anser"}, ["'anser'", "no such column", "Did you mean 'answer'?"]),
        ("a.jsonl", GOOD + LONG, {}, ["line 2", "30 tokens", "28 that fit (the model's context of 32 tokens, less "
          "rollout.sampling.max_tokens 4). Take a model with a longer context, or lower rollout.sampling.max_tokens, "
          "or set data.overlong to drop"]),
        ("a.jsonl", LONG, {"overlong": "drop"}, ["the only row is longer than 28 tokens (the model's context"]),
        ("a.jsonl", "\x00\x01\x02", {}, ["line 1", "not JSON"]),
        ("a.parquet", "no parquet", {}, ["cannot be read as a Parquet file"]),
        ("a.txt", GOOD, {}, ["'.txt'", "unknown file suffix", "data.kind"]),
        ("a.json", '[{"prompt": "1=",\n"answer"}]', {}, ["line 2", "not JSON"]),
    ],
    ids=[
        "missing", "empty", "blank", "malformed", "no object", "type", "empty prompt", "no prompt", "null answer",
        "no answer", "columns", "named column", "too long", "all too long", "binary", "parquet", "suffix", "array",
    ],
)  # fmt: skip
def test_unusable_data_is_refused(
    folder: Path, name: str, content: str | None, settings: dict[str, Any], words: list[str]
) -> None:
    path = folder / "data" / name
    if content is not None:
        path.write_text(content)
    message = refused(folder, "train", str(write(folder, grpo(folder, data={"path": str(path), **settings}))))
    assert str(path) in message and all(word in message for word in words), message


def test_supervised_data_without_anything_to_learn(folder: Path) -> None:
    path = folder / "data" / "nothing.jsonl"
    path.write_text('{"prompt": "1=", "completion": "1"}\n{"prompt": "2=", "completion": ""}\n')
    message = refused(folder, "train", str(write(folder, sft(folder, data={"path": str(path)}))))
    assert f"{path}, line 2, column 'completion': is empty" in message


def test_a_document_longer_than_the_budget(folder: Path) -> None:
    message = refused(folder, "train", str(write(folder, sft(folder, token_budget=4, rollout={}, evaluation=None))))
    words = (
        "line 1",
        "the document has 5 tokens",
        "4 that fit (token_budget 4). Raise token_budget, or set data.overlong",
    )
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"token_budget": 16}, "token_budget 16", "Raise token_budget, or lower rollout.sampling.max_tokens"),
        ({"model.max_length": 20}, "model.max_length 20", "Raise model.max_length, or lower"),
        ({"model.max_length": 20, "token_budget": 20}, "model.max_length 20 and token_budget 20",
         "Raise model.max_length and raise token_budget, or lower"),
    ],
    ids=["budget", "length", "both"],
)  # fmt: skip
def test_an_overlong_prompt_names_the_limit_that_it_exceeds(
    folder: Path, changes: dict[str, Any], reason: str, remedy: str
) -> None:
    path = folder / "data" / "limits.jsonl"
    path.write_text(GOOD + '{"prompt": "' + 17 * "1" + '=", "answer": "1"}\n')
    file = write(folder, grpo(folder, data={"path": str(path)}, evaluation=None))
    message = refused(folder, "train", str(file), *(f"{name}={value}" for name, value in changes.items()))
    assert f"({reason}, less rollout.sampling.max_tokens 4). {remedy}" in message, message


def test_an_overlong_prompt_of_evaluation_names_its_own_settings(folder: Path) -> None:
    path = folder / "data" / "limits.jsonl"
    path.write_text(GOOD + '{"prompt": "' + 17 * "1" + '=", "answer": "1"}\n')
    evaluation = {"data": {"path": str(path)}, "sampling": {"max_tokens": 20}}
    message = refused(folder, "train", str(write(folder, grpo(folder, evaluation=evaluation))))
    assert "less evaluation.sampling.max_tokens 20)" in message and "evaluation.data.overlong" in message, message


COLUMNS = """
def strict(completions, level, **kwargs):
    return [0.0 for _ in completions]

class Judge:
    def __call__(self, completions, level, **kwargs):
        return [0.0 for _ in completions]

judge = Judge()
"""


def test_a_reward_function_that_requires_a_missing_column_is_refused(folder: Path) -> None:
    (folder / "columns.py").write_text(COLUMNS)
    terms = [{"kind": "function", "path": f"{folder}/columns.py:strict"}]
    message = refused(folder, "train", str(write(folder, grpo(folder, reward={"terms": terms}))))
    assert "columns.py:strict: requires the column 'level'" in message and "add the column" in message, message


def test_a_callable_that_requires_a_missing_column_fails_before_the_first_rollout(folder: Path) -> None:
    """Its signature is known only in a scorer process."""
    (folder / "columns.py").write_text(COLUMNS)
    terms = [{"kind": "function", "path": f"{folder}/columns.py:judge"}]
    values = config(folder, "grpo", name="late-column", reward={"terms": terms})
    launched = Launched.start(Path(values["folder"]) / "late-column", str(write(folder, values)))
    assert launched.finish() == 1
    assert "requires the column 'level'" in launched.text(), launched.text()
    assert "evaluation after" not in launched.text()
    assert not (Path(values["folder"]) / "late-column").exists()


def changed(folder: Path, name: str, change: Callable[[Path], object]) -> Path:
    """A copy of the tiny model with something wrong in it."""
    copy = folder / name
    if not copy.exists():
        shutil.copytree(folder / "model", copy)
        change(copy)
    return copy


def set_in(file: str, **values: Any) -> Callable[[Path], object]:
    def change(copy: Path) -> None:
        found = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps({**found, **values}))

    return change


def without_a_weight(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})


def without_tokenizer(copy: Path) -> None:
    for path in copy.glob("tokenizer*"):
        path.unlink()


def mamba(copy: Path) -> None:
    """A state-space model, whose layers ignore any layout. Its config has no longest sequence."""
    vocabulary = json.loads((copy / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    MambaForCausalLM(MambaConfig(**sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0)).save_pretrained(copy)


def bert(copy: Path) -> None:
    BertModel(
        BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(copy)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("no-weights", lambda copy: (copy / "model.safetensors").unlink(), ["no model.safetensors", "safetensors"]),
        (
            "torn-weights",
            lambda copy: (copy / "model.safetensors").write_bytes(b"x"),
            ["model.safetensors cannot be read"],
        ),
        ("one-weight-less", without_a_weight, ["1 weight missing", "model.norm.weight"]),
        ("other-shape", set_in("config.json", intermediate_size=48), ["has shape (64, 32)", "expected (48, 32)"]),
        ("no-config", lambda copy: (copy / "config.json").unlink(), ["its config cannot be loaded"]),
        ("torn-config", lambda copy: (copy / "config.json").write_text("{"), ["not a valid JSON file"]),
        ("odd-config", set_in("config.json", hidden_size="wide"), ["hidden_size", "expected int", "'wide'"]),
        ("new-kind", set_in("config.json", model_type="gpt9"), ["`gpt9`", "does not recognize"]),
        ("encoder", bert, ["bert attends in both directions", "use a causal language model"]),
        ("no-tokenizer", without_tokenizer, ["has no tokenizer", "model.tokenizer"]),
        ("torn-tokenizer", lambda copy: (copy / "tokenizer.json").write_text("x"), ["tokenizer cannot be loaded"]),
        ("no-end", set_in("tokenizer_config.json", eos_token=None), ["no end-of-sequence token", "`eos_token`"]),
        ("no-length", mamba, ["model.max_length", "mamba has no longest sequence", "set it"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unusable_models_are_refused(
    folder: Path, name: str, change: Callable[[Path], object], words: list[str]
) -> None:
    model = changed(folder, name, change)
    message = refused(folder, "train", str(write(folder, grpo(folder, model={"path": str(model)}))))
    assert all(word in message for word in words), message
    assert str(model) in message or name == "no-length"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere/model", ["'/nowhere/model'", "there is no such folder", "`owner/name`"]),
        ("{folder}/modell", ["there is no such folder", "did you mean {folder}/model?"]),
        ("nobody/nothing-here", ["'nobody/nothing-here'", "the hub does not provide it", "`owner/name`"]),
    ],
)
def test_a_missing_model_is_refused(folder: Path, path: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = path.format(folder=folder)
    message = refused(folder, "train", str(write(folder, grpo(folder, model={"path": path}))))
    assert all(word.format(folder=folder) in message for word in ["model.path", *words]), message


def test_conversations_without_a_chat_template(folder: Path) -> None:
    path = folder / "data" / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]}\n')
    message = refused(folder, "train", str(write(folder, sft(folder, data={"path": str(path)}))))
    assert all(word in message for word in (str(folder / "model"), "no chat template", "model.chat_template")), message


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.py:f", ["there is no file", "nowhere.py", "relative to the current folder"]),
        ("{folder}/functions.py:scoer", ["defines no 'scoer'", "did you mean 'score'?", "It defines score"]),
        ("{folder}/broken.py:f", ["not valid Python", "line 1"]),
        ("{folder}/functions.py", ["does not name a function", "file.py:name"]),
        ("no_such_package.rewards:f", ["no package 'no_such_package'", "install it"]),
    ],
    ids=["file", "name", "syntax", "form", "package"],
)
def test_missing_reward_functions_are_refused(folder: Path, path: str, words: list[str]) -> None:
    (folder / "functions.py").write_text("def score(prompts, completions, **columns):\n    return 0\n")
    (folder / "broken.py").write_text("def f(:\n")
    path = path.format(folder=folder)
    reward = {"terms": [{"kind": "function", "path": path}]}
    message = refused(folder, "train", str(write(folder, grpo(folder, reward=reward))))
    assert f"reward function {path}" in message and all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has GPUs")
def test_missing_gpus_are_refused(folder: Path) -> None:
    message = refused(folder, "train", str(write(folder, grpo(folder))), "cluster.device=cuda")
    assert all(word in message for word in ("cluster.device is cuda", "no GPU", "cluster.device=cpu")), message


@pytest.mark.parametrize("kind", ["a run", "a folder", "a file"])
def test_a_folder_that_exists_is_not_touched(folder: Path, kind: str, tmp_path: Path) -> None:
    values = grpo(folder) | {"folder": str(tmp_path)}
    target = tmp_path / "bad"
    if kind == "a run":
        Ledger.create(target, values).close()
    elif kind == "a folder":
        target.mkdir()
        (target / "thesis.txt").write_text("three years of work")
    else:
        target.write_text("notes")
    before = snapshot(tmp_path)
    message = refused(folder, "train", str(write(folder, values)))
    assert snapshot(tmp_path) == before
    assert str(target) in message and "name=" in message
    assert (f"--resume {target}" in message) == (kind == "a run"), message


def test_commands_on_a_folder_without_a_run(folder: Path) -> None:
    for command in (("train", "--resume"), ("top",), ("report",)):
        assert str(folder / "data") in refused(folder, *command, str(folder / "data"))
    assert "--resume" in refused(folder, "train")


# ---------------------------------------------------------------- real runs that fail


def short(folder: Path, name: str, *terms: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with three steps on one rank and nothing else."""
    values = config(folder, "grpo", name=name, steps=3, evaluation=None, checkpoint={"every": 0, "export": False})
    values["trainer"]["ranks"] = 1
    return {**values, "reward": {"terms": list(terms)}, **changes}


MODES = """
import time
from pathlib import Path


def score(prompts, completions, trainer_state, **columns):
    mode = (Path(__file__).parent / "mode").read_text()
    rewards = [float(len(completion) % 3) for completion in completions]
    if trainer_state.global_step == 1 and mode == "raise":
        return divide(rewards)
    if trainer_state.global_step == 1 and mode == "short":
        return rewards[1:]
    if trainer_state.global_step == 1 and mode == "nan":
        rewards[-1] = float("nan")
    if trainer_state.global_step == 1 and mode == "hang":
        never_return()
    return rewards


def divide(rewards):
    return [reward / 0 for reward in rewards]


def never_return():
    while True:
        time.sleep(0.1)
"""
EXPECTED = {
    "raise": ["raised ZeroDivisionError", "in divide", "return [reward / 0 for reward in rewards]", "(row ", "sample"],
    "short": ["returned 15 values for 16 samples", "returned"],
    "nan": ["returned NaN as a reward", "(row ", "completion"],
    "hang": ["did not finish a sample for 1 s (reward.timeout_s)", "in never_return", "(row "],
}


@pytest.mark.parametrize(
    "modes",
    [("raise",), *(pytest.param(each, marks=pytest.mark.slow) for each in (("raise", "hang"), ("short", "nan")))],
    ids=" and ".join,
)
def test_a_failing_reward_function_is_named_and_the_run_resumes_once_it_is_fixed(
    folder: Path, modes: tuple[str, ...]
) -> None:
    target = folder / "-".join(modes)
    target.mkdir()
    (target / "functions.py").write_text(MODES)
    path = f"{target}/functions.py:score"
    values = short(folder, target.name, {"kind": "function", "path": path})
    arguments = [str(write(folder, values))]
    run = Path(values["folder"]) / target.name
    for mode in modes:
        (target / "mode").write_text(mode)
        launched = Launched.start(run, *arguments, *(["reward.timeout_s=1"] if mode == "hang" else []))
        assert launched.finish() == 1, launched.text()
        message = launched.printed()
        assert all(word in message for word in (f"error reward {path}: ", *EXPECTED[mode])), message
        assert message.rstrip().endswith(f"{run}/logs") and f"lockstep train --resume {run}" in message
        assert "lockstep/rewards" not in message, "only the user's own lines are shown"
        assert path in (run / "logs" / "controller.log").read_text()
        assert launched.has_ended(10)
        with Ledger.reader(run) as ledger:
            assert (ledger.last_committed_step(), ledger.collected_steps()) == (0, [0]), "no zero in place of a reward"
        summary = json.loads((run / "summary.json").read_text())
        assert summary["exit_reason"].startswith("failed: RewardError: ") and summary["steps"]["done"] == 1
        arguments = ["--resume", str(run)]
    (target / "mode").write_text("mended")
    launched = Launched.start(run, *arguments, "reward.timeout_s=60")
    assert launched.finish() == 0, launched.text()
    assert sorted(prompts_used(run).values()) == sorted([0, 1, 2] * 4)


@pytest.mark.slow
def test_a_run_that_cannot_start_frees_its_name(folder: Path) -> None:
    """The function's module is only imported in a scorer process."""
    file = folder / "needs.py"
    file.write_text("import a_package_nobody_has\n\n\ndef score(prompts, completions):\n    return [0.0]\n")
    values = short(folder, "needs", {"kind": "function", "path": f"{file}:score"})
    run = Path(values["folder"]) / "needs"
    launched = Launched.start(run, str(write(folder, values)))
    assert launched.finish() == 1
    message = launched.printed()
    assert f"error reward {file}:score: importing it raised ModuleNotFoundError" in message
    assert f'File "{file}", line 1' in message and "importlib" not in message
    assert launched.has_ended(10)
    assert not run.exists()
    (kept,) = run.parent.glob("needs.failed-*")
    assert f"{run} is kept as {kept}" in message
    log = (kept / "logs" / "controller.log").read_text()
    assert "a_package_nobody_has" in log and "rewards/scorer.py" in log, "the full traceback is in the log"


@pytest.mark.slow
def test_a_model_that_ignores_the_layout_is_packed_singly_and_this_is_reported(folder: Path) -> None:
    model = changed(folder, "no-length", mamba)
    file = folder / "by_length.py"
    file.write_text("def score(completions, **columns):\n    return [float(len(each)) for each in completions]\n")
    values = short(folder, "mamba", {"kind": "function", "path": f"{file}:score"})
    values |= {"model": {"path": str(model), "max_length": 32}, "steps": 2}
    run = Path(values["folder"]) / "mamba"
    launched = Launched.start(run, str(write(folder, values)))
    assert launched.finish() == 0, launched.text()
    message = launched.printed()
    assert "packing single: one sample per row, which is slower (MambaForCausalLM" in message
    assert "packing single" in (run / "logs" / "controller.log").read_text()
    assert "MambaForCausalLM decodes without the KV cache" in message
    assert "MambaForCausalLM decodes without the KV cache" in (run / "logs" / "engine-0.log").read_text()
    with Ledger.reader(run) as ledger:
        rows = [row.values for row in ledger.metrics_rows()]
    gaps = [row["policy/engine_gap_max"] for row in rows if row["policy/tokens"]]
    assert max(gaps) < 1e-4, "engine and trainer agree on what the model computes"


# ---------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    target = tmp_path / "disk"
    target.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(target)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


def fill(disk: Path, free_bytes: int) -> Path:
    """Fill the disk except for `free_bytes`."""
    facts = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - free_bytes)
    return filler


@pytest.mark.slow
def test_a_full_disk_ends_the_run_which_resumes_once_there_is_room(folder: Path, small_disk: Path) -> None:
    """The disk is full first for a step file, then for the checkpoint of the last step."""
    gate = Gate(small_disk.parent / "gate", 1, 2)
    values = short(folder, "full", {"kind": "regex", "pattern": "[0-4].*"}, gate.term)
    values |= {"folder": str(small_disk), "checkpoint": {"every": 0, "export": False}}
    run = small_disk / "full"
    file = small_disk.parent / "full.yaml"
    file.write_text(yaml.safe_dump(values))

    launched = Launched.start(run, str(file))
    gate.wait(1, launched)
    filler = fill(small_disk, free_bytes=0)
    gate.open(1)
    assert launched.finish() == 1, launched.text()
    message = launched.printed()
    assert f"error cannot write {run}/steps/00000002.arrow: " in message and "0 bytes free: make room" in message
    assert f"lockstep train --resume {run}" in message and "Traceback" not in message
    assert launched.has_ended(10)
    assert sorted(path.name for path in (run / "steps").iterdir()) == ["00000001.arrow"]

    filler.unlink()
    launched = Launched.resume(run)
    gate.wait(2, launched)
    filler = fill(small_disk, free_bytes=160_000)
    gate.open(2)
    assert launched.finish() == 1, launched.text()
    message = launched.printed()
    assert f"error policy-0: CheckpointError: checkpoint {run}/checkpoints/00000003" in message, message
    assert "No space left on device" in message and "make room" in message and "Traceback" not in message, message
    assert launched.has_ended(10)
    with Ledger.reader(run) as ledger:
        assert (ledger.last_committed_step(), ledger.checkpoints()) == (2, [])
    assert list((run / "checkpoints").iterdir()) == []

    filler.unlink()
    launched = Launched.resume(run)
    assert launched.finish() == 0, launched.text()
    with Ledger.reader(run) as ledger:
        assert [row.step for row in ledger.checkpoints()] == [2]
        assert [row.values["rollout/generated"] for row in ledger.metrics_rows()] == [0, 0, 0], (
            "trained, not drawn again"
        )
    assert sorted(prompts_used(run).values()) == sorted([0, 1, 2] * 4)
