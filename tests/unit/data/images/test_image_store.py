"""Prepared images are stored exactly, once, and a missing or damaged one is named."""

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.images.image_store import ImageStore, ImageUnavailable, PreparedImage

DIGEST = "0123456789abcdef"


def prepared(fill: float = 0.5) -> PreparedImage:
    inputs = {"pixel_values": np.full((16, 12), fill, np.float32), "image_grid_thw": np.array([[1, 4, 4]])}
    return PreparedImage(DIGEST, inputs, 4, (40, 30), (32, 32))


def test_an_image_is_read_as_it_was_put(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    assert DIGEST not in store
    store.write(prepared())
    found = ImageStore(tmp_path / "images").read(DIGEST)
    assert DIGEST in store
    assert (found.features, found.size, found.resized) == (4, (40, 30), (32, 32))
    assert found.inputs.keys() == prepared().inputs.keys()
    for name, values in prepared().inputs.items():
        assert found.inputs[name].dtype == values.dtype
        assert np.array_equal(found.inputs[name], values)


def test_one_input_is_read_alone(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    store.write(prepared())
    assert store.read(DIGEST, only=("image_grid_thw", "tiles")).inputs.keys() == {"image_grid_thw"}
    assert store.read(DIGEST, only=()).inputs == {}


def test_an_image_is_written_once(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    store.write(prepared())
    store.write(prepared(fill=9.0))
    assert store.read(DIGEST).inputs["pixel_values"][0, 0] == 0.5
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".safetensors"]


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageUnavailable, match=rf"image {DIGEST}: .*{DIGEST}\.safetensors does not exist") as caught:
        ImageStore(tmp_path).read(DIGEST)
    assert pickle.loads(pickle.dumps(caught.value)).digest == DIGEST


@pytest.mark.parametrize("damage", [b"", b"\x10" + 7 * b"\0" + 16 * b"x", None])
def test_a_damaged_image_is_named(tmp_path: Path, damage: bytes | None) -> None:
    store = ImageStore(tmp_path)
    store.write(prepared())
    path = store.path(DIGEST)
    path.write_bytes(path.read_bytes()[:-7] if damage is None else damage)
    with pytest.raises(ImageUnavailable, match="is damaged"):
        store.read(DIGEST)


@pytest.mark.parametrize("digest", ["", "abc", "../../../etc/passwd", "0123456789ABCDEF"])
def test_only_digests_become_names_of_files(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ValueError, match="is not a digest"):
        ImageStore(tmp_path).path(digest)


def test_threads_may_put_the_same_image(tmp_path: Path) -> None:
    store, errors = ImageStore(tmp_path), []
    image = PreparedImage("ab" * 8, {"pixel_values": np.zeros((400, 400), np.float32)}, 1, (1, 1), (1, 1))

    def put() -> None:
        try:
            store.write(image)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=put) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == [] and store.read("ab" * 8).features == 1
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".safetensors"]
