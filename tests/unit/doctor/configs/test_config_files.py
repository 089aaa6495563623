"""Kinds of config files, and the errors about broken, hostile and foreign files."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.doctor.configs import model_memory
from lockstep.doctor.configs.config_advisor import advise_configs
from lockstep.doctor.configs.config_settings import ConfigNotReadable
from lockstep.doctor.configs.option_tables import option_programs, option_table, read_option_data
from tests.unit.doctor.configs.sample_configs import (
    ACCELERATE,
    DEEPSPEED,
    OPENRLHF,
    TRL,
    VERL,
    ConfigWriter,
    bad,
    changed,
    openrlhf,
    verl,
)


@pytest.mark.parametrize(
    ("name", "content", "line", "said"),
    [
        ("a.json", "", 0, "empty"),
        ("a.json", '{"a": 1,\n "b": }', 2, "not JSON"),
        ("a.json", "[1]", 1, "at the top level"),
        ("a.json", "[" * 100_000, 0, "nested more than 60 levels"),
        ("a.yaml", "a: [1, 2\nb: 3", 2, "not valid YAML"),
        ("a.yaml", "a:\n  - b\n c: 3", 3, "not valid YAML"),
        ("a.yaml", "- 1", 1, "no `key: value`"),
        ("a.yaml", "a: " + "[" * 50_000, 1, "nested more than 60 levels"),
        ("a.yaml", "a: !!python/object/apply:os.system [x]", 1, "none of its settings"),
        ("a.yaml", "learning_rate: !!python/name:os.system", 1, "unknown tag"),
        ("a.yaml", "frob: 1", 1, "none of its settings is known to OpenRLHF"),
        ("a.yaml", "a: &a [*a, *a]\nlearning_rate: 1", 1, "contains the alias itself"),
        ("a.sh", "echo 'hello", 1, "never closed"),
        ("a.sh", "echo hello", 0, "starts no training"),
        ("a.sh", "a\n\0", 2, "NUL"),
        (
            "a.sh",
            """ray job submit --runtime-env-json='{"a": }' -- python -m openrlhf.cli.train_ppo_ray""",
            1,
            "not JSON",
        ),
    ],
)
def test_broken_files_are_refused_with_name_and_line(
    writer: ConfigWriter, name: str, content: str, line: int, said: str
) -> None:
    path = writer.write(name, content)
    with pytest.raises(ConfigNotReadable, match=said) as caught:
        advise_configs([path], versions={})
    assert caught.value.file == str(path) and caught.value.line == line


def test_files_that_expand_without_end_are_refused(writer: ConfigWriter) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)
    ]
    with pytest.raises(ConfigNotReadable, match="more than 100,000 values"):
        advise_configs([writer.write("a.yaml", "\n".join(lines))], versions={})
    with pytest.raises(ConfigNotReadable, match="larger than"):
        advise_configs([writer.write("b.yaml", "a: " + "x" * (5 << 20))], versions={})


def test_folders_binary_and_empty_files_are_refused(writer: ConfigWriter) -> None:
    with pytest.raises(ConfigNotReadable, match="no such file"):
        advise_configs([writer.folder / "none.yaml"], versions={})
    with pytest.raises(ConfigNotReadable, match="not a file"):
        advise_configs([writer.folder], versions={})
    path = writer.folder / "latin.sh"
    path.write_bytes("a\nb\n# é".encode("latin-1"))
    with pytest.raises(ConfigNotReadable, match=r"latin.sh:3: not UTF-8 text"):
        advise_configs([path], versions={})


def test_several_files_are_judged_together(writer: ConfigWriter) -> None:
    report = writer.report(
        80, {}, run_sh=openrlhf(OPENRLHF), more_sh=verl(VERL), ds_json=DEEPSPEED, acc_yaml=ACCELERATE
    )
    assert [section.name for section in report.sections] == ["accelerate", "openrlhf", "verl", "deepspeed"]
    assert bad(report.findings) == []


# ---------------------------------------------------------------- anything

TREES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["auto", "${a.b}"])
    ),
    lambda inside: st.one_of(st.lists(inside, max_size=3), st.dictionaries(st.text(max_size=8), inside, max_size=3)),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("a.yaml", TRL),
        ("b.yaml", ACCELERATE),
        ("c.json", DEEPSPEED),
        ("d.yaml", {"actor_rollout_ref": {}, "data": {}, "trainer": {}}),
    ],
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.data())
def test_any_values_are_judged_or_refused(
    writer: ConfigWriter, name: str, base: dict[str, Any], changes: st.DataObject
) -> None:
    tree = json.loads(json.dumps(base))
    for key in list(tree):
        if changes.draw(st.booleans()):
            tree[key] = changes.draw(TREES)
    path = writer.folder / name
    path.write_text(json.dumps(tree) if name.endswith("json") else yaml.safe_dump(tree))
    try:
        advise_configs([path], 80, {})
    except ConfigNotReadable as error:
        assert error.file == str(path)


@pytest.mark.parametrize(("base", "write"), [(OPENRLHF, openrlhf), (VERL, verl)])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.data())
def test_any_options_are_judged_or_refused(
    writer: ConfigWriter, base: dict[str, Any], write: Any, changes: st.DataObject
) -> None:
    some = changes.draw(st.lists(st.sampled_from(sorted(base)), max_size=4))
    value = st.one_of(
        st.integers(-5, 10**20),
        st.sampled_from(["''", "0", "-1", "1e9", "nan", "inf", "null", "$X", "[]", "{a:1}", "true", "x" * 200]),
    )
    path = writer.write("run.sh", write(changed(base, {name: changes.draw(value) for name in some})))
    advise_configs([path], 80, {})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200), suffix=st.sampled_from([".sh", ".yaml", ".json", ""]))
def test_any_bytes_are_refused(writer: ConfigWriter, raw: bytes, suffix: str) -> None:
    path = writer.folder / f"any{suffix}"
    path.write_bytes(raw)
    with pytest.raises(ConfigNotReadable):
        advise_configs([path], versions={})


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("framework", ["openrlhf", "verl", "trl", "transformers", "accelerate", "deepspeed"])
def test_option_tables_are_consistent(framework: str) -> None:
    for program in option_programs(framework):
        options = option_table(framework, program)
        assert options.source.startswith("https://github.com/") and len(options.options) > 15
        for option in options.options.values():
            for version in (option.since, option.until):
                assert version is None or version in options.versions, option
    known = {name for program in option_programs(framework) for name in option_table(framework, program).options}
    known |= {name.rpartition(".")[0] for name in known} | (
        set(option_table("transformers", "TrainingArguments").options) if framework == "trl" else set()
    )
    for name, renamed in option_table(framework, option_programs(framework)[0]).renamed.items():
        assert set(renamed.to) <= known, name


PUBLISHED = {
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2,
    "qwen3-14b": 14.8, "qwen3-32b": 32.8, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6, "llama-3.2-1b": 1.23, "llama-3.2-3b": 3.21, "llama-3.3-70b": 70.6, "llama-2-7b": 6.74,
    "llama-2-13b": 13.0, "llama-2-70b": 69.0, "mistral-7b-v0.1": 7.24, "mistral-7b-v0.3": 7.25,
    "qwen2-0.5b": 0.49, "qwen2-1.5b": 1.54, "qwen2-7b": 7.62, "qwen2-72b": 72.7,
    "deepseek-r1-distill-qwen-1.5b": 1.78, "deepseek-r1-distill-qwen-7b": 7.62,
    "deepseek-r1-distill-qwen-14b": 14.8, "deepseek-r1-distill-qwen-32b": 32.8, "deepseek-r1-distill-llama-8b": 8.03,
    "deepseek-r1-distill-llama-70b": 70.6, "deepseek-llm-7b": 6.91, "deepseek-math-7b": 6.91, "gemma-2b": 2.51,
    "gemma-7b": 8.54, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2, "gemma-3-1b": 1.0,
    "phi-3-mini": 3.82, "phi-3-medium": 14.0, "phi-3.5-mini": 3.82, "phi-4": 14.7, "phi-4-mini": 3.84,
}  # fmt: skip
"""Billions of parameters according to the models' own pages."""


def test_shapes_give_the_published_number_of_parameters(tmp_path: Path) -> None:
    assert set(PUBLISHED) == set(read_option_data("models")["models"])
    for name, entry in read_option_data("models")["models"].items():
        shape = model_memory.find_model(entry["hub"], tmp_path)
        assert shape is not None and abs(shape.parameters / 1e9 - PUBLISHED[name]) < 0.012 * PUBLISHED[name] + 0.005, (
            name
        )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7.61), ("meta-llama/Meta-Llama-3-8B-Instruct", 8.03),
        ("OpenRLHF/Llama-3-8b-sft-mixture", 8.03),
        ("me/my-model-13b", 13), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7.61), ("me/x-7b", 7),
        ("Qwen/Qwen3-30B-A3B", None), ("mistralai/Mixtral-8x7B-v0.1", None), ("gpt2", None), ("", None),
    ],
)  # fmt: skip
def test_models_are_known_by_their_names(tmp_path: Path, name: str, billions: float | None) -> None:
    shape = model_memory.find_model(name, tmp_path)
    assert (shape is None) == (billions is None)
    assert shape is None or billions is None or abs(shape.parameters / 1e9 - billions) < 0.02 * billions


def test_the_size_is_read_from_the_config_in_a_folder(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "tiny")
    shape = model_memory.find_model("tiny", tmp_path)
    assert shape is not None and (shape.layers, shape.heads, shape.max_positions) == (3, 4, 512)
    real = sum(each.numel() for each in Qwen2ForCausalLM(config).parameters())
    assert abs(shape.parameters - real) < 0.01 * real
    (tmp_path / "tiny" / "config.json").write_text("[" * 9999)
    assert model_memory.find_model("tiny", tmp_path) is None


# ---------------------------------------------------------------- the command


def test_exit_codes_of_the_command(writer: ConfigWriter) -> None:
    run = CliRunner().invoke
    good = str(writer.write("good.sh", openrlhf(OPENRLHF)))
    wrong = str(writer.write("wrong.sh", openrlhf(changed(OPENRLHF, {"train.batch_size": 100}))))
    assert run(app, ["explain", "--config", good, "--gpu-memory", "80"]).exit_code == 0
    result = run(app, ["explain", "--config", good, "--config", wrong, "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and not answer["passed"] and answer["counts"]["error"] == 1
    assert {"rung", "id", "severity", "host", "seen", "why", "fix", "source"} == set(answer["findings"][0])
    for arguments in (["--config", str(writer.folder / "none")], ["--config", good, "logs"], []):
        result = run(app, ["explain", *arguments])
        assert result.exit_code == 2 and "refused" in result.stderr and "Traceback" not in result.output


def test_escapes_of_a_hostile_file_do_not_reach_the_terminal(writer: ConfigWriter) -> None:
    path = writer.write("evil.sh", openrlhf(changed(OPENRLHF, {"x\x1b[2Jy": 1})))
    result = CliRunner().invoke(app, ["explain", "--config", str(path)])
    assert result.exit_code == 1 and "\x1b[2J" not in result.stdout
