"""Prompts, documents and pairs with images, from the formats of other frameworks, for models of each family."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer
from vision_folders import load, picture, png, transformers_processor, vision_folder

from lockstep.config.data import DatasetConfig, TrainingDataConfig
from lockstep.data.dataset_rows import DataError
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_store import ImageStore
from lockstep.data.images.restored_images import ImageChanged, restore_images
from lockstep.data.mixture import open_training_source
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.source_factory import SourceOptions, open_source
from lockstep.models.vision.tiny_families import VISION_FAMILIES

FAMILIES = ("qwen3_vl", "idefics3", "gemma3", "llava_onevision")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


class Opener:
    """Opens rows as samples of a model of one family."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.folder, self.tmp_path = folder, tmp_path
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = load(folder)
        self.store = ImageStore(tmp_path / "store")
        self.image_token = AutoConfig.from_pretrained(folder).image_token_id
        for name, size in (("a.png", (30, 50)), ("b.png", (64, 40))):
            (tmp_path / name).write_bytes(png(size))

    def open(self, kind: Any, rows: Any, limit: int = 2000, processor: bool = True, **options: Any) -> Any:
        if isinstance(rows, list):
            path = self.tmp_path / "data.jsonl"
            path.write_text("\n".join(json.dumps(row) for row in rows))
        else:
            path = rows
        cfg = DatasetConfig.model_validate({"path": str(path), "shuffle": False, **options})
        shown = SourceOptions(images=self.processor if processor else None, image_store=self.store)
        return open_source(kind, load_rows(cfg), cfg, self.tokenizer, 0, LengthLimit(limit), shown)

    def expected(self, messages: list[Any], sizes: list[tuple[int, int]], open_turn: bool = True) -> list[int]:
        """The tokens that transformers' template and processor make of messages with parts."""
        processor = transformers_processor(self.folder)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn)
        images = [[picture(size) for size in sizes]] if sizes else None
        found = processor(images=images, text=[text], add_special_tokens=False)["input_ids"][0]
        return list(found)

    def check(self, tokens: np.ndarray, images: list[Any], sizes: list[tuple[int, int]]) -> None:
        """Checks that images have places at all features in order, and that their pixels are in the store."""
        assert [image.size for image in images] == sizes
        places = np.concatenate([np.empty(0, np.int32), *(image.places for image in images)])
        np.testing.assert_array_equal(places, np.flatnonzero(tokens == self.image_token))
        for image in images:
            prepared = self.store.read(image.digest)
            assert prepared.features == image.places.size
            assert (prepared.size, prepared.resized) == (image.size, image.resized)


@pytest.fixture(params=FAMILIES)
def opener(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Opener:
    return Opener(vision_folder(home, request.param), tmp_path)


@pytest.fixture
def qwen(home: Path, tmp_path: Path) -> Opener:
    return Opener(vision_folder(home, "qwen3_vl"), tmp_path)


def parts(*content: str) -> list[dict[str, str]]:
    return [{"type": "image"} if each == "image" else {"type": "text", "text": each} for each in content]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vlm_r1(home: Path, tmp_path: Path, family: str) -> None:
    """VLM-R1's JSONL: one image, several, none; a marker in the text or not."""
    opener = Opener(vision_folder(home, family), tmp_path)
    ask = {"from": "human", "value": "<image>where is it?"}
    say = {"from": "gpt", "value": "there"}
    rows = [
        {"id": 1, "image": "a.png", "conversations": [ask, say]},
        {"id": 2, "image": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "<image>or<image>?"}, say]},
        {"id": 3, "image": "b.png", "conversations": [{"from": "human", "value": "where?"}, say]},
        {"id": 4, "conversations": [{"from": "human", "value": "hello"}, say]},
    ]
    contents = [parts("image", "where is it?"), parts("image", "or", "image", "?"), parts("image", "where?"), "hello"]
    sizes = [[(30, 50)], [(30, 50), (64, 40)], [(64, 40)], []]
    prompts = opener.open("prompts", rows).take(0, 4)
    for prompt, content, expected in zip(prompts, contents, sizes, strict=True):
        assert prompt.tokens.tolist() == opener.expected([{"role": "user", "content": content}], expected)
        opener.check(prompt.tokens, prompt.images, expected)
        assert prompt.answer == "there"
    assert prompts[0].images[0].source == str(tmp_path / "a.png")
    assert prompts[0].columns["image"] == "a.png"
    assert json.loads(json.dumps(prompts[1].messages)) == [{"role": "user", "content": contents[1]}]


def test_trl_with_columns_and_parts(opener: Opener) -> None:
    url = "data:image/png;base64," + base64.b64encode(png((30, 50))).decode()
    question = [{"role": "system", "content": "be brief"}]
    rows = [
        {"prompt": [*question, {"role": "user", "content": "where?"}], "images": ["a.png"], "answer": "x"},
        {"prompt": [*question, {"role": "user", "content": parts("see", "image")}], "images": ["a.png"], "answer": "x"},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, *parts("ok?")]}],
         "images": [], "answer": "x"},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "b.png"}, *parts("ok?")]}], "answer": "x"},
    ]  # fmt: skip
    texts = [{"role": "system", "content": "be brief"}]
    expected = [
        ([*texts, {"role": "user", "content": parts("image", "where?")}], [(30, 50)]),
        ([*texts, {"role": "user", "content": parts("see", "image")}], [(30, 50)]),
        ([{"role": "user", "content": parts("image", "ok?")}], [(30, 50)]),
        ([{"role": "user", "content": parts("image", "ok?")}], [(64, 40)]),
    ]
    for prompt, (messages, sizes) in zip(opener.open("prompts", rows).take(0, 4), expected, strict=True):
        assert prompt.tokens.tolist() == opener.expected(messages, sizes)
        opener.check(prompt.tokens, prompt.images, sizes)


def test_verls_parquet(opener: Opener, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "geo", "prompt": [{"role": "user", "content": "<image>find x"}],
            "images": [{"bytes": png((30, 50)), "path": None}], "reward_model": {"ground_truth": "5"},
        },
        {
            "data_source": "geo", "prompt": [{"role": "user", "content": "what is x"}],
            "images": [], "reward_model": {"ground_truth": "6"},
        },
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    first, second = opener.open("prompts", tmp_path / "train.parquet").take(0, 2)
    assert first.tokens.tolist() == opener.expected([{"role": "user", "content": parts("image", "find x")}], [(30, 50)])
    opener.check(first.tokens, first.images, [(30, 50)])
    assert (first.answer, second.answer, second.images) == ("5", "6", [])
    assert Path(first.images[0].source).read_bytes() == png((30, 50)), "a file that reward functions can read"
    assert json.loads(json.dumps(first.columns))["images"] == ["image 0"]


def test_easyr1_with_and_without_the_chat_template(opener: Opener) -> None:
    rows = [{"problem": "<image>find x", "answer": "5", "images": ["a.png"]}]
    (chat,) = opener.open("prompts", rows, chat=True, template="solve: {prompt}").take(0, 1)
    message = {"role": "user", "content": parts("solve: ", "image", "find x")}
    assert chat.tokens.tolist() == opener.expected([message], [(30, 50)])
    opener.check(chat.tokens, chat.images, [(30, 50)])
    (plain,) = opener.open("prompts", rows).take(0, 1)
    expected = opener.processor.expansion((30, 50)).text + "find x"
    assert plain.tokens.tolist() == opener.tokenizer(expected)["input_ids"]
    opener.check(plain.tokens, plain.images, [(30, 50)])


def test_datasets_with_image_features(qwen: Opener, tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"prompt": datasets.Value("string"), "answer": datasets.Value("string"),
         "images": datasets.List(datasets.Image())}
    )  # fmt: skip
    rows = {"prompt": ["see?", "no"], "answer": ["x", "y"], "images": [[picture((30, 50))], []]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(tmp_path / "saved"))
    source = qwen.open("prompts", tmp_path / "saved")
    first, second = source.take(0, 2)
    qwen.check(first.tokens, first.images, [(30, 50)])
    np.testing.assert_array_equal(np.asarray(Image.open(first.images[0].source)), np.asarray(picture((30, 50))))
    assert second.images == [] and json.dumps(first.columns)


def test_documents(opener: Opener) -> None:
    """Answers are learned, and images and what stands around them are not."""
    talk = [
        {"role": "user", "content": "<image>what?"},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": "and <image> here?"},
        {"role": "assistant", "content": "a dog"},
    ]
    source = opener.open("documents", [{"messages": talk, "images": ["a.png", "b.png"]}])
    (document,) = source.take(0, 1)
    messages = [
        {"role": "user", "content": parts("image", "what?")}, talk[1],
        {"role": "user", "content": parts("and ", "image", " here?")}, talk[3],
    ]  # fmt: skip
    assert document.tokens.tolist() == opener.expected(messages, [(30, 50), (64, 40)], open_turn=False)
    opener.check(document.tokens, document.images, [(30, 50), (64, 40)])
    learned = opener.tokenizer.decode(document.tokens[document.loss_mask])
    end = opener.tokenizer.eos_token
    assert learned.replace(" ", "") == f"acat{end}adog{end}"


def test_documents_of_text_and_of_prompts(qwen: Opener) -> None:
    rows = [{"prompt": "<image>what?", "completion": "a cat", "images": ["a.png"]}]
    (document,) = qwen.open("documents", rows).take(0, 1)
    qwen.check(document.tokens, document.images, [(30, 50)])
    learned = qwen.tokenizer.decode(document.tokens[document.loss_mask])
    assert learned == "a cat" + qwen.tokenizer.eos_token
    cfg = DatasetConfig(path=str(qwen.tmp_path / "data.jsonl"), shuffle=False)
    options = SourceOptions(learns_prompts=True, images=qwen.processor)
    source = open_source("documents", load_rows(cfg), cfg, qwen.tokenizer, 0, LengthLimit(999), options)
    (whole,) = source.take(0, 1)
    assert not whole.loss_mask[whole.images[0].places].any() and whole.loss_mask.sum() > document.loss_mask.sum()


def test_pairs(opener: Opener) -> None:
    question = [{"role": "user", "content": "what?"}]
    rows = [
        {"prompt": question, "chosen": [{"role": "assistant", "content": "cat"}],
         "rejected": [{"role": "assistant", "content": "dog!"}], "images": ["a.png"]},
        {"prompt": question, "chosen": [{"role": "assistant", "content": "cat"}],
         "rejected": [{"role": "assistant", "content": "dog!"}], "images": None},
    ]  # fmt: skip
    seen, plain = opener.open("pairs", rows).take(0, 2)
    asked = [{"role": "user", "content": parts("image", "what?")}]
    assert seen.prompt.tolist() == opener.expected(asked, [(30, 50)])
    answered = [*asked, rows[0]["chosen"][0]]
    expected = opener.expected(answered, [(30, 50)], open_turn=False)
    assert [*seen.prompt, *seen.chosen] == expected[: seen.prompt.size + seen.chosen.size]
    opener.check(seen.prompt, seen.images, [(30, 50)])
    assert plain.images == [] and plain.chosen.tolist() == seen.chosen.tolist()


def test_truncation_never_cuts_an_image(qwen: Opener) -> None:
    rows = [{"prompt": "<image>what?", "chosen": "c" * 30, "rejected": "d" * 9, "images": ["a.png"]}]
    whole = qwen.open("pairs", rows).take(0, 1)[0]
    limit = whole.prompt.size + 5
    source = qwen.open("pairs", rows, limit=limit, overlong="truncate")
    (cut,) = source.take(0, 1)
    assert source.truncated == 1 and cut.chosen.size == cut.rejected.size == 5
    qwen.check(cut.prompt, cut.images, [(30, 50)])
    with pytest.raises(DataError, match="the only row is longer than"):
        qwen.open("pairs", rows, limit=whole.prompt.size, overlong="truncate")


def test_labelled_completions(qwen: Opener) -> None:
    rows = [{"prompt": "<image>what?", "completion": "cat", "label": True, "images": ["a.png"]}]
    (sample,) = qwen.open("labelled", rows).take(0, 1)
    qwen.check(sample.prompt, sample.images, [(30, 50)])


def test_too_long_prompts_are_dropped_and_counted_without_decoding(qwen: Opener) -> None:
    rows = [
        {"prompt": f"<image>{'a' * n}", "answer": "x", "images": [name]}
        for n, name in ((1, "a.png"), (1, "b.png"), (30, "a.png"))
    ]
    lengths = [prompt.tokens.size for prompt in qwen.open("prompts", rows).take(0, 3)]
    assert len(set(lengths)) == 3
    for limit in range(min(lengths), max(lengths) + 1):
        source = qwen.open("prompts", rows, limit=limit, overlong="drop")
        kept = [n for n, length in enumerate(lengths) if length <= limit]
        assert source.dropped == 3 - len(kept)
        assert [prompt.row for prompt in source.take(0, len(kept))] == kept
    # Half of a file is enough to measure it, and not to train with it.
    (qwen.tmp_path / "a.png").write_bytes(png((30, 50))[:2000])
    source = qwen.open("prompts", rows, overlong="drop")
    with pytest.raises(DataError, match=r"data.jsonl, line 1: image '.*a.png' is truncated or damaged"):
        source.sample(0)


def test_unusable_images_are_skipped_and_counted(qwen: Opener, caplog: pytest.LogCaptureFixture) -> None:
    whole = png((30, 50))
    for name, content in (("cut.png", whole[:2000]), ("text.png", b"hello")):
        (qwen.tmp_path / name).write_bytes(content)
    rows = [
        {"prompt": "<image>a", "answer": "x", "images": [name]}
        for name in ("a.png", "gone.png", "cut.png", "text.png", "b.png", "https://example.org/a.png")
    ]
    source = qwen.open("prompts", rows, images={"on_error": "skip"})
    assert source.dropped == 4
    assert [prompt.row for prompt in source.take(0, 2)] == [0, 4]
    (warning,) = caplog.messages
    assert "data.jsonl: left out 4 rows with unusable images, of 6; the first, line 2: image '" in warning
    assert warning.endswith("gone.png' does not exist"), "nothing is to be done: the rows are left out as configured"
    with pytest.raises(DataError, match=r"line 2: image '.*gone.png' does not exist"):
        qwen.open("prompts", rows)
    with pytest.raises(DataError, match=r"line 1: image '.*gone.png' does not exist"):
        qwen.open("prompts", rows[1:4], images={"on_error": "skip"})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "<image>a<image>", "images": ["a.png"]}, "2 markers <image> and the row has 1 image"),
        ({"prompt": [{"role": "user", "content": "<image>a"}], "images": ["a.png"] * 3}, "1 marker <image>"),
        ({"prompt": [{"role": "user", "content": "<image>a"}], "images": []}, "1 marker <image> and the row has 0"),
        ({"prompt": "<image>a", "images": None}, "1 marker <image> and the row has 0 images"),
        ({"prompt": [{"role": "user", "content": parts("image", "a")}], "images": []}, "there is no image for it"),
        ({"prompt": [{"role": "user", "content": parts("image", "a")}], "images": ["a.png"] * 2}, "2 images for 1"),
        ({"prompt": [{"role": "system", "content": "a"}], "images": ["a.png"]}, "no message of a user"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "v"}]}], "images": []}, "type 'audio'"),
        ({"prompt": "<|image_pad|>a", "images": ["a.png"]}, r"2 times, and there are 1 images"),
    ],
)
def test_other_numbers_of_images_are_named(qwen: Opener, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"line 1.*{problem}"):
        qwen.open("prompts", [{**row, "answer": "x"}])


@pytest.mark.parametrize("kind", ["prompts", "documents", "pairs", "labelled"])
def test_images_with_no_text_between_them(home: Path, tmp_path: Path, kind: Any) -> None:
    """Their positions would be those of one image, if positions have three axes. Chat templates write text around each
    image."""
    row = {"images": ["a.png", "b.png"], "prompt": "what?"}
    row |= {"prompts": {"answer": "x"}, "documents": {"completion": "x"}, "pairs": {"chosen": "x", "rejected": "y"},
            "labelled": {"completion": "x", "label": True}}[kind]  # fmt: skip
    rows = [{**row, "prompt": "<image>or<image>?"}, row]
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        opener = Opener(vision_folder(home, family), tmp_path)
        assert len(opener.open(kind, rows[:1])) == 1
        with pytest.raises(DataError, match=r"line 2: images 0 and 1 of a prompt have no text .*\. Write text between"):
            opener.open(kind, rows)
    assert len(Opener(vision_folder(home, "gemma3"), tmp_path).open(kind, rows)) == 2
    in_messages = [{**row, "prompt": [{"role": "user", "content": parts("image", "image", "what?")}]}]
    if kind == "prompts":
        assert len(opener.open(kind, in_messages)) == 1


def test_placeholders_in_rows_without_images_are_text(qwen: Opener) -> None:
    rows = [{"prompt": [{"role": "user", "content": "what is <|image_pad|> and a?"}], "answer": "x"}]
    (prompt,) = qwen.open("prompts", rows).take(0, 1)
    assert np.count_nonzero(prompt.tokens == qwen.image_token) == 1 and prompt.images == []


def test_a_model_that_reads_no_images(qwen: Opener) -> None:
    rows = [{"prompt": "a", "answer": "x", "image": None}, {"prompt": "a", "answer": "x", "image": "a.png"}]
    assert len(qwen.open("prompts", rows[:1], processor=False)) == 1
    with pytest.raises(DataError, match="line 2: the row has an image, and the model reads none"):
        qwen.open("prompts", rows, processor=False)


def test_images_are_prepared_ahead(qwen: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step's prompts are taken, the next step's are prepared without being asked for."""
    from lockstep.base import waits

    for number in range(12):
        (qwen.tmp_path / f"{number}.png").write_bytes(png((30, 50), number))
    rows = [{"prompt": "<image>a", "answer": "x", "images": [f"{n}.png"]} for n in range(12)]
    source = qwen.open("prompts", rows)
    digests = [qwen.processor.digest(png((30, 50), number)) for number in range(12)]
    first = source.take(0, 4)
    assert [prompt.images[0].digest for prompt in first] == digests[:4]
    for digest in digests[4:8]:
        waits.file(qwen.store.path(digest), waits_for="threads", why="images of the next step", timeout_s=20)
    assert not any(digest in qwen.store for digest in digests[8:])
    assert [prompt.images[0].digest for prompt in source.take(4, 4)] == digests[4:8]
    assert [prompt.images[0].digest for prompt in source.take(8, 8)] == digests[8:] + digests[:4]


def test_a_mixture_with_and_without_images(qwen: Opener) -> None:
    (qwen.tmp_path / "seen").mkdir()
    (qwen.tmp_path / "seen" / "c.png").write_bytes(png((16, 16)))
    for name, row in (
        ("text", {"prompt": "a", "answer": "x"}),
        ("images", {"prompt": "b", "answer": "x", "images": "c.png"}),
    ):
        (qwen.tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    cfg = TrainingDataConfig.model_validate(
        {"mixture": [{"path": f"{qwen.tmp_path}/text.jsonl"}, {"path": f"{qwen.tmp_path}/images.jsonl"}],
         "images": {"folder": str(qwen.tmp_path / "seen")}}
    )  # fmt: skip
    options = SourceOptions(images=qwen.processor, image_store=qwen.store)
    source = open_training_source("prompts", cfg, qwen.tokenizer, 3, LengthLimit(99), options)
    prompts = source.take(0, 8)
    assert sorted(len(prompt.images) for prompt in prompts) == [0] * 4 + [1] * 4
    for prompt in prompts:
        qwen.check(prompt.tokens, prompt.images, [(16, 16)] * len(prompt.images))
        again = source.usable_by_uid(prompt.uid)
        assert [image.to_json() for image in again.images] == [image.to_json() for image in prompt.images]


def test_templates_that_read_only_texts_or_only_parts(qwen: Opener) -> None:
    rows = [{"prompt": [{"role": "user", "content": "<image>where?"}], "images": ["a.png"], "answer": "x"},
            {"prompt": [{"role": "user", "content": "where?"}], "answer": "x"}]  # fmt: skip
    texts = "{% for m in messages %}{{ '<user>' + m['content'] }}{% endfor %}"
    lists = (
        "{% for m in messages %}<user>{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}<|image_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    found = []
    for template in (texts, lists):
        qwen.tokenizer.chat_template = template
        found.append([prompt.tokens.tolist() for prompt in qwen.open("prompts", rows).take(0, 2)])
        assert qwen.tokenizer.decode(found[-1][1]).replace(" ", "") == "<user>where?"
    assert found[0] == found[1]


@pytest.mark.parametrize("nested", [False, True])
def test_images_of_datasets_are_not_decoded_to_measure_prompts(
    qwen: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    import datasets

    kind = datasets.List(datasets.Image()) if nested else datasets.Image()
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "answer": datasets.Value("string"), "image": kind}
    )
    image = {"bytes": png((30, 50))[:2000], "path": None}
    rows = {"prompt": ["see?"], "answer": ["x"], "image": [[image] if nested else image]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(tmp_path / "saved"))
    source = qwen.open("prompts", tmp_path / "saved")
    with pytest.raises(DataError, match="row 0: image 'image 0' is truncated"):
        source.take(0, 1)


def test_recorded_prompts_get_the_same_images_again_or_an_error(qwen: Opener) -> None:
    rows = [{"prompt": "<image>a", "answer": "x", "images": [name]} for name in ("a.png", "b.png")]
    source = qwen.open("prompts", rows)
    prompts = source.take(0, 2)
    before = qwen.store.read(prompts[0].images[0].digest)
    assert restore_images(prompts, source, qwen.store) == (0, set())
    qwen.store.path(before.digest).unlink()
    assert restore_images(prompts, source, qwen.store) == (1, set())
    again = qwen.store.read(before.digest)
    assert all(np.array_equal(again.inputs[name], before.inputs[name]) for name in before.inputs)
    qwen.store.path(before.digest).unlink()
    (qwen.tmp_path / "a.png").write_bytes(png((30, 50), seed=9))
    with pytest.raises(ImageChanged, match=r"image '.*a.png' of sample 0:0 is not the one that the run prepared"):
        restore_images(prompts, source, qwen.store)
