"""How large a model is: by its config.json, by its name among those that are known, or by the `7B` in its name."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.doctor.configs.tables import data

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a dense decoder; what is not known is 0."""

    name: str
    parameters: float
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    vocabulary: int = 0
    longest: int = 0
    """Positions that its config allows; 0: not known."""
    source: str = ""

    @property
    def size(self) -> str:
        """Parameters as people write them."""
        return f"{self.parameters / 1e9:.3g}B"

    def cache_bytes(self, width: int = 2) -> int:
        """Keys and values of one token, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_size * width


def parameters(
    layers: int, hidden: int, heads: int, kv_heads: int, head_size: int, inner: int, vocabulary: int, tied: bool
) -> int:
    """Weights of a gated decoder: attention and MLP matrices of each layer, embeddings and head; norms and biases (a
    thousandth of it) left out."""
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    return layers * (attention + 3 * hidden * inner) + vocabulary * hidden * (1 if tied else 2)


def find(name: str | None, folder: Path) -> Shape | None:
    """The model that `name` says, a hub's name or a folder (relative to `folder`). None: nothing tells its size."""
    if not name:
        return None
    local = Path(name).expanduser()
    shape = _local(local if local.is_absolute() else folder / local, name)
    return shape or _known(name) or _by_its_name(name)


def _local(path: Path, name: str) -> Shape | None:
    file = path / "config.json"
    try:
        with file.open("rb") as stream:
            raw = json.loads(stream.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    if isinstance(raw.get("text_config"), dict):
        raw = {**raw, **raw["text_config"]}
    return from_config(raw, name, str(file))


def from_config(raw: dict[str, Any], name: str, source: str = "") -> Shape | None:
    """The shape that a config.json tells; None where it lacks what is needed, or is a mixture of experts."""

    def number(key: str, otherwise: int = 0) -> int:
        value = raw.get(key)
        return value if type(value) is int and 0 < value < 1 << 32 else otherwise

    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    inner, vocabulary = number("intermediate_size"), number("vocab_size")
    if not (layers and hidden and heads and inner and vocabulary):
        return None
    if any(number(key) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    kv, size = number("num_key_value_heads", heads), number("head_dim", hidden // heads)
    count = parameters(layers, hidden, heads, kv, size, inner, vocabulary, raw.get("tie_word_embeddings") is True)
    return Shape(name, count, layers, hidden, heads, kv, size, vocabulary, number("max_position_embeddings"), source)


def _known(name: str) -> Shape | None:
    plain = name.rstrip("/").rpartition("/")[2].lower().replace("meta-llama", "llama").removesuffix("-hf")
    plain = re.sub(r"^(qwen[\d.]+)-(?:math|coder)-", r"\1-", plain)  # of the same shape as the model they are made of
    content = data("models")
    found = [key for key in content["models"] if re.fullmatch(re.escape(key) + r"(?:-(?!\d+(?:\.\d+)?b).*)?", plain)]
    if not found:
        found = [key for key in content["models"] if re.search(r"(?:^|[-_])" + re.escape(key) + r"$", plain)]
    if not found:
        return None
    entry = content["models"][max(found, key=len)]
    layers, hidden, heads, kv, size, inner, vocabulary, tied = entry["shape"]
    count = parameters(layers, hidden, heads, kv, size, inner, vocabulary, tied)
    source = f"{content['source']}/{entry['hub']}/blob/main/config.json"
    return Shape(name, count, layers, hidden, heads, kv, size, vocabulary, 0, source)


def _by_its_name(name: str) -> Shape | None:
    plain = name.rstrip("/").rpartition("/")[2]
    if re.search(r"(?i)\d+x\d|a\d+(?:\.\d+)?b\b", plain):
        return None
    match = re.search(r"(?i)(?<![\w.])(\d{1,3}(?:\.\d{1,2})?)b(?![a-z0-9])", plain.replace("_", "-"))
    return Shape(name, float(match[1]) * 1e9) if match and float(match[1]) > 0 else None
