"""Prepared images are stored exactly, once, and a missing or damaged one is named."""

import pickle
import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors.numpy import save

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


def of(digest: str) -> PreparedImage:
    return replace(prepared(), digest=digest)


def stored(folder: Path) -> dict[str, int]:
    """The digests in a store's folder, with the bytes of their files."""
    found: dict[str, int] = {}
    for path in folder.glob("??/*"):
        found[path.stem] = found.get(path.stem, 0) + path.stat().st_size
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_folder_is_bounded_and_keeps_what_is_in_flight(tmp_path: Path, seed: int) -> None:
    """Random steps that hold and release images, with images prepared ahead, and restarts in between: all that is held
    is there at any time, and the rest fits the room."""
    chance = Random(seed)
    digests = [f"{n:02x}{n:014x}" for n in range(40)]
    size = len(save(prepared().inputs, {"image": "x" * 60}))
    room = chance.randrange(0, 12) * size
    store, held, ahead = ImageStore(tmp_path, room=room), dict[int, list[str]](), list[str]()
    for step in range(60):
        taken = ahead + chance.sample(digests, chance.randrange(1, 6))
        for digest in taken:
            store.expect(digest)
            store.write(of(digest))
            if chance.random() < 0.2 and not store.original_path(digest).is_file():
                store.write_original(digest, b"x" * chance.randrange(200))
        store.hold(step, taken)
        held[step] = taken
        ahead = chance.sample(digests, chance.randrange(0, 3))
        for digest in ahead:
            store.expect(digest)
            store.write(of(digest))
        if chance.random() < 0.7:
            done = list(range(step - chance.randrange(0, 3)))
            store.release(done)
            held = {owner: own for owner, own in held.items() if owner not in done}
        else:
            store.hold(step, ())
        needed, found = set(ahead).union(*held.values()), stored(tmp_path)
        assert needed <= found.keys()
        assert sum(found.values()) <= max(room, sum(found[digest] for digest in needed))
        assert all(store.read(digest).features == 4 for digest in needed)
        if chance.random() < 0.1:  # the run is killed and resumed
            store = ImageStore(tmp_path, room=room)
            held, ahead = {step: taken}, []
            store.hold(step, taken)


def test_what_was_used_longest_ago_is_deleted_first_and_pictures_of_the_data_last(tmp_path: Path) -> None:
    digests = [f"{n:016x}" for n in range(4)]
    size = len(save(prepared().inputs, {"image": "x" * 60}))
    store = ImageStore(tmp_path, room=3 * size)
    for digest in digests[:3]:
        store.write(of(digest))
        store.write_original(digest, b"picture")
    store.hold(0, digests[:1])
    store.release([0])
    store.write(of(digests[3]))
    store.hold(1, digests[3:])
    assert [digest in store for digest in digests] == [True, False, False, True]
    assert all(store.original_path(digest).is_file() for digest in digests[:3])
    other = ImageStore(tmp_path, room=0)
    other.hold(0, [])
    assert not stored(tmp_path)


def test_files_of_others_and_of_a_killed_writer(tmp_path: Path) -> None:
    """Files that the store has not written stay; a draft that a killed process has left goes."""
    ImageStore(tmp_path).write(prepared())
    folder = tmp_path / DIGEST[:2]
    (folder / f"{DIGEST}.other").write_text("kept")
    (folder / f".{DIGEST}.safetensors.1.ab").write_text("half")
    ImageStore(tmp_path, room=0).hold(0, [])
    assert [path.name for path in folder.iterdir()] == [f"{DIGEST}.other"]
