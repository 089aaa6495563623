"""Tiny vision-language models for these tests, transformers' own processors of them, and pictures."""

import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from lockstep.config.data import TrainingDataConfig
from lockstep.config.model import ModelConfig
from lockstep.data.images.image_processor import ImageProcessor, load_image_processor
from lockstep.data.images.image_record import RECORD_FILE, ImageRecord
from lockstep.data.images.image_store import ImageStore
from lockstep.data.mixture import open_training_source
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_sources import SampleSource
from lockstep.data.source_factory import SourceOptions
from lockstep.models.vision.tiny_vision import make_tiny_vision

SMALL = {
    "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 24, "layers": 1, "alphabet": "abcdefghijklmnopqrstuvwxyz ?!.",
    "tiles": 2, "vision_hidden": 16, "vision_heads": 2, "vision_ffn": 16, "vision_layers": 1, "max_length": 4096,
}  # fmt: skip


@lru_cache(maxsize=16)
def vision_folder(home: Path, family: str) -> Path:
    return make_tiny_vision(home / family, family=family, **SMALL)


def load(folder: Path, **vision: Any) -> ImageProcessor:
    cfg = ModelConfig.model_validate({"path": str(folder), "vision": vision})
    processor = load_image_processor(cfg, AutoTokenizer.from_pretrained(folder))
    assert processor is not None
    return processor


def transformers_processor(folder: Path) -> Any:
    """transformers' processor of the folder, without the part for videos, which needs torchvision."""
    settings = json.loads((folder / "processor_config.json").read_text())
    kind = getattr(transformers, settings.pop("processor_class"))
    parts = [part for part in kind.get_attributes() if part != "video_processor"]
    own = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: parts)})
    unused = {part: None for part in kind.get_attributes() if part == "video_processor"}
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return own(image_processor=image_processor, tokenizer=AutoTokenizer.from_pretrained(folder), **unused, **settings)


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def png(size: tuple[int, int], seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    picture(size, seed).save(buffer, "PNG")
    return buffer.getvalue()


ROWS = 6


class Attempts:
    """Opens the data of a run as each of its attempts does."""

    def __init__(self, folder: Path, on_error: str = "refuse", mixed: bool = False, rows: int = ROWS) -> None:
        model = vision_folder(folder / "models", "qwen3_vl")
        self.tokenizer, self.processor = AutoTokenizer.from_pretrained(model), load(model)
        self.folder, self.on_error, self.mixed = folder, on_error, mixed
        for row in range(rows):
            self.picture(row).write_bytes(png((16, 16), row))
        lines = [{"prompt": "see?", "answer": "x", "image": self.picture(row).name} for row in range(rows)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        (folder / "text.jsonl").write_text(json.dumps({"prompt": "hello?", "answer": "y"}) + "\n")

    def picture(self, row: int) -> Path:
        return self.folder / f"{row}.png"

    def open(self, room: int | None = None, **changes: Any) -> SampleSource[Any]:
        self.store = ImageStore(self.folder / "run", writes=False, room=room)
        self.store.record = ImageRecord(self.store.folder / RECORD_FILE)
        own = {"path": str(self.folder / "data.jsonl"), "images": {"on_error": self.on_error}}
        parts = [{"path": str(self.folder / "text.jsonl")}, own]
        values = {"mixture": parts} if self.mixed else own
        cfg = TrainingDataConfig.model_validate({**values, "shuffle": False, **changes})
        options = SourceOptions(images=self.processor, image_store=self.store)
        source = open_training_source("prompts", cfg, self.tokenizer, 0, LengthLimit(2000), options)
        self.store.writes = True
        if not self.store.record.exists:
            source.record_images()
            self.store.record.write()
        return source
