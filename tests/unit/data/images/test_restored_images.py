"""Images that the data holds itself are written when the run's folder may be written, and again if they are lost."""

import base64
import json
from pathlib import Path

from transformers import AutoTokenizer
from vision_folders import load, png, vision_folder

from lockstep.config.data import DatasetConfig
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_store import ImageStore
from lockstep.data.images.restored_images import restore_images
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.source_factory import SourceOptions, open_source


def test_nothing_is_written_before_the_store_writes(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "models", "qwen3_vl")
    contents = [png((30, 50), seed) for seed in (1, 2)]
    url = "data:image/png;base64,"
    rows = [{"prompt": "a", "answer": "x", "image": url + base64.b64encode(each).decode()} for each in contents]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    cfg = DatasetConfig.model_validate({"path": str(data), "shuffle": False})
    store = ImageStore(tmp_path / "run" / "images", writes=False)
    options = SourceOptions(images=load(folder), image_store=store)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = open_source("prompts", load_rows(cfg), cfg, tokenizer, 0, LengthLimit(2000), options)
    prompts = source.take(0, 2)
    assert not (tmp_path / "run").exists()

    store.writes = True
    assert restore_images(prompts, source, store) == (2, set())
    kept = [Path(prompt.images[0].source) for prompt in prompts]
    assert [path.read_bytes() for path in kept] == contents
    assert all(prompt.images[0].digest in store for prompt in prompts)

    kept[1].unlink()
    assert restore_images(prompts, source, store) == (1, set())
    assert kept[1].read_bytes() == contents[1]
    assert restore_images(prompts, source, store) == (0, set())

    prepared = store.path(prompts[0].images[0].digest)
    for damaged in (b"", prepared.read_bytes()[:-1]):
        prepared.write_bytes(damaged)
        assert restore_images(prompts, source, store) == (1, set()), "a damaged file is prepared again"
        assert store.read(prompts[0].images[0].digest).size == prompts[0].images[0].size
    assert not list((tmp_path / "run").rglob("*.part"))
