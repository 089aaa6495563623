"""Tiny models are ordinary folders; the same settings give the same bits."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.models.tiny_model import DEFAULT_ALPHABET, TINY_FAMILIES, TinyModel, make_tiny

SMALL = {"hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "layers": 1}


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("alphabet", [DEFAULT_ALPHABET, "0123456789=", "abé日🙂 \n"])
def test_one_token_per_character_and_back(tmp_path, family: str, alphabet: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "m", family=family, alphabet=alphabet, **SMALL))
    text = alphabet + alphabet[::-1]
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens([tokenizer.eos_token_id, tokenizer.pad_token_id]) == ["<eos>", "<pad>"]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer(alphabet[0] + "<eos>")["input_ids"] == [ids[0], tokenizer.eos_token_id]


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_loads_with_transformers(tmp_path, family: str, tied: bool) -> None:
    folder = make_tiny(tmp_path / "m", family=family, tie_embeddings=tied, **SMALL)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.model_type == family
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.config.vocab_size == len(tokenizer) == model.lm_head.weight.shape[0]
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 256
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    folders = [make_tiny(tmp_path / str(i), seed=seed, **SMALL) for i, seed in enumerate((0, 0, 1))]
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second, third = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second != third


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_chat_template_marks_the_assistant(tmp_path, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "m", family=family, chat=True, **SMALL))
    messages = [{"role": "user", "content": "ab c"}, {"role": "assistant", "content": "d\ne"}]
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode(found["input_ids"]) == "<user>ab c<assistant>d\ne<eos>"
    assert found["assistant_masks"] == [0] * 6 + [1] * 4
    rendered = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert rendered == "<user>ab c<assistant>"


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_bos(tmp_path, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "m", family=family, bos=True, **SMALL))
    assert tokenizer("ab")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == tokenizer("ab")["input_ids"][1:]


def test_the_same_recipe_is_made_once_and_another_refused(tmp_path) -> None:
    folder = make_tiny(tmp_path / "m", **SMALL)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny(folder, **SMALL) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(FileExistsError, match="another folder"):
        make_tiny(folder, seed=1, **SMALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        make_tiny(tmp_path / "mine", **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "mine"]
    assert json.loads((folder / "lockstep_tiny.json").read_text())["hidden"] == 16


def test_a_tiny_model_is_replaced_only_on_request(tmp_path) -> None:
    folder = make_tiny(tmp_path / "m", **SMALL)
    (folder / "chat_template.jinja").write_text("of an earlier model")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="other settings; choose another folder, or replace it with --overwrite"):
        make_tiny(folder, seed=1, **SMALL)
    assert (folder / "model.safetensors").read_bytes() == before
    assert make_tiny(folder, seed=1, overwrite=True, **SMALL) == folder
    assert (folder / "model.safetensors").read_bytes() != before
    assert not (folder / "chat_template.jinja").exists() and [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="holds no tiny model"):
        make_tiny(tmp_path / "mine", overwrite=True, **SMALL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "gpt"}, "qwen2, llama"),
        ({"hidden": 30, "heads": 4}, "nearest: 32"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads"),
        ({"layers": 0}, "layers"),
        ({"alphabet": ""}, "alphabet"),
    ],
)
def test_invalid_sizes_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyModel(**fields)
