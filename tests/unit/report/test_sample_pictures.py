"""Images and boxes in the report: drawn to scale, few and small, and harmless whatever the files and names are."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from report_helpers import CONFIG
from test_html_report import Page

from lockstep.data.samples import Completion, Group, PlacedImage, Prompt
from lockstep.ledger import CompletionSample, Ledger
from lockstep.ledger.sample_boxes import SampleBoxes, box_reading, sample_boxes
from lockstep.ledger.step_samples import choose_samples
from lockstep.report.html_report import render_html
from lockstep.report.sample_pictures import MOST_BOXES, MOST_THUMBNAILS, PictureBook, make_thumbnail

IOU = {"reward": {"terms": [{"kind": "iou", "coordinates": "resized"}]}}


def image(path: Path, size: tuple[int, int] = (200, 100), resized: tuple[int, int] = (100, 100)) -> dict[str, Any]:
    if not path.exists():
        PIL.Image.new("RGB", size, (200, 30, 30)).save(path)
    return {"source": str(path), "digest": path.stem, "size": list(size), "resized": list(resized)}


def sample(completion: str, answer: Any, *images: dict[str, Any], uid: str = "0:0") -> CompletionSample:
    return CompletionSample("Where?", completion, answer, 1.0, {"iou": 1.0}, uid, images=list(images))


def decoded(address: str) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def test_boxes_are_in_pixels_of_the_file(tmp_path: Path) -> None:
    reading = box_reading(IOU)
    assert reading is not None
    shown = sample("<answer>[10, 10, 50, 50]</answer>", [20, 10, 100, 50], image(tmp_path / "a.png"))
    assert sample_boxes(shown, reading, 9) == SampleBoxes([(20, 10, 100, 50)], [(20, 10, 100, 50)])
    odd = sample("[5, 5, 1, 1] [1e, 2] [1, 1, 2, 99999999999]", "a cat", image(tmp_path / "a.png"))
    assert sample_boxes(odd, reading, 9) == SampleBoxes([(2, 1, 4, 99999999999)], [])
    unknown = sample("[1, 1, 2, 2]", "[]", {**image(tmp_path / "a.png"), "resized": [0, 0]})
    assert sample_boxes(unknown, reading, 9) == SampleBoxes()


def test_the_reward_says_how_boxes_are_written() -> None:
    vlm_r1 = {"kind": "function", "path": "a.py:f", "signature": "vlm_r1"}
    assert box_reading({"reward": {"terms": [{"kind": "count"}]}}) is box_reading({}) is None
    assert box_reading({"reward": {"terms": [vlm_r1]}}).coordinates == "resized"  # type: ignore[union-attr]
    full = {"kind": "iou", "answer_coordinates": "0-1", "extract": "answer", "image": 2, "weight": 3.0}
    found = box_reading({"reward": {"terms": [vlm_r1, full]}})
    assert (found.coordinates, found.answer_coordinates, found.image) == ("original", "0-1", 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(("size", "kind", "made"), [((40, 30), "PNG", (40, 30)), ((2000, 1000), "JPEG", (320, 160))])
def test_thumbnails_are_small(tmp_path: Path, size: tuple[int, int], kind: str, made: tuple[int, int]) -> None:
    PIL.Image.new("RGB", size, (200, 30, 30)).save(tmp_path / "a.png")
    address, width, height = make_thumbnail(tmp_path / "a.png")
    picture = decoded(address)
    assert (picture.format, picture.size, (width, height)) == (kind, made, made)
    red, green, _ = picture.convert("RGB").getpixel((5, 5))  # type: ignore[misc]
    assert abs(red - 200) < 5 and abs(green - 30) < 5
    assert len(address) < 20_000


def test_pictures_that_cannot_be_shown_say_why(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnot really")
    (tmp_path / "text.jpg").write_text("<svg onload=alert(1)>")
    bomb = tmp_path / "bomb.png"
    PIL.Image.new("1", (9000, 9000)).save(bomb)
    names = ["broken.png", "text.jpg", "bomb.png", "gone.png", "image 0 of row 7"]
    found = PictureBook(IOU, tmp_path).of(
        sample("", "", *({"source": name, "digest": name, "size": [2, 2], "resized": [2, 2]} for name in names[:4]))
    )
    assert [each.problem for each in found] == [
        "it cannot be read",
        "it cannot be read",
        "it has 9000 x 9000 pixels",
        "the file is not there any more",
    ]
    (bare,) = PictureBook(IOU, tmp_path).of(sample("", "", {"source": names[4]}))
    assert bare.problem == "the data had it without a file" and bare.thumbnail is None


def test_pictures_and_boxes_are_few(tmp_path: Path) -> None:
    book = PictureBook(IOU)
    many = ["[1, 1, 9, 9]"] * 500
    for number in range(MOST_THUMBNAILS + 5):
        (picture,) = book.of(sample(" ".join(many), many, image(tmp_path / f"{number}.png", (20, 20), (20, 20))))
        assert len(picture.boxes) <= 2 * MOST_BOXES
    assert len(book.thumbnails) == MOST_THUMBNAILS and "shows 60 images" in picture.problem
    several = [image(tmp_path / f"{number}.png", (20, 20), (20, 20)) for number in range(7)]
    assert [each.name for each in book.of(sample("", [], *several))][-1] == "3 more"


def test_the_page_shows_images_with_boxes_before_and_after(tmp_path: Path) -> None:
    picture = image(tmp_path / "<b>&\"'.png", (40, 30), (20, 15))
    wrong, right = (sample(text, [8, 6, 16, 12], picture) for text in ("[0, 0, 4, 3]", "[4, 3, 8, 6]"))
    with Ledger.create(tmp_path / "run", {**CONFIG, **IOU}) as ledger:
        ledger.record_evaluation(-1, {}, [wrong])
        ledger.record_samples(0, [wrong, right])
        ledger.commit(0, {})
        ledger.record_evaluation(0, {}, [right])
        text = render_html(ledger)
    parsed = Page(text)
    assert parsed.open == [] and "b" not in parsed.tags and "img-src data:" in text
    assert any("<b>&\"'.png" in each for each in parsed.text)
    drawn = re.findall(r'<rect class="(\w+)" x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', text)
    expected, before = ("expected", "8", "6", "8", "6"), ("predicted", "0", "0", "8", "6")
    after = ("predicted", *expected[1:])
    assert drawn == [expected, before, expected, after] * 2
    assert 'viewBox="0 0 40 30" width="160"' in text and 'transform="scale(1 1)"' in text
    addresses = [each for each in parsed.references if each.startswith("data:")]
    assert len(addresses) == 1 and parsed.references.count("#picture-0") == 4


def test_a_page_without_images_allows_none(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {**CONFIG, **IOU}) as ledger:
        ledger.record_evaluation(-1, {}, [sample("[1, 2, 3, 4]", [1, 2, 3, 4])])
        text = render_html(ledger)
    assert "img-src" not in text and "<image" not in text and 'class="pictures"' not in text


def test_samples_keep_their_images() -> None:
    placed = PlacedImage("ab" * 8, np.arange(4, dtype=np.int32), "a.png", (40, 30), (20, 15))
    prompt = Prompt("0:0", 0, np.zeros(5, np.int32), "Where?", images=[placed])
    zeros = np.zeros(1, np.int32)
    done = Completion("r", zeros, np.zeros(1, np.float32), zeros, "stop", "x")
    (found,) = choose_samples([Group(prompt, [done], np.ones(1, np.float32))], 1)
    assert found.images == [{"digest": "ab" * 8, "source": "a.png", "size": [40, 30], "resized": [20, 15]}]
