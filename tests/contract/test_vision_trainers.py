"""Trainers of vision-language models: equal gradients and weights wherever the images are, whatever is frozen, with
both kinds of trainers; and what is published, resumed and exported.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_ranks as tr
import vision_ranks as vr
from test_trainer import NEEDS_DEEPSPEED
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from lockstep.data.images.image_store import ImageStore
from lockstep.data.samples import Document
from lockstep.models.vision.row_images import row_images

pytestmark = [pytest.mark.timeout(600)]
Results = dict[str, list[tr.Result]]


def marks(kind: str) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.xdist_group(f"vision-{kind}")]
    found += NEEDS_DEEPSPEED if kind in tr.DEEPSPEED else []
    return [*found, pytest.mark.slow] if kind in tr.LONG else found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision")
    vr.make_models(made)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], tr.Result]:
    """One rank of the FSDP2 trainer, in this process, by the name of a case."""
    return cache(lambda name: vr.CASES[f"fsdp2:{name}"](folder, tr.alone(), 0))


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=marks(kind)) for kind in vr.KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def pair(folder: Path, kind: str) -> Results:
    """Two ranks."""
    return on_two_ranks(folder, kind, list(vr.suite(kind)))


@pytest.fixture(scope="module")
def other_families(folder: Path, kind: str) -> Results:
    """Two ranks, with the families of the long suites."""
    vr.make_models(folder, vr.OTHERS)
    return on_two_ranks(folder, kind, list(vr.LONG))


def on_two_ranks(folder: Path, kind: str, names: list[str]) -> Results:
    found = tr.launch(folder, 2, [f"{kind}:{name}" for name in names], module="vision_ranks", limit_s=400)
    return {name.partition(":")[2]: results for name, results in found.items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the norm of each tensor, but not less than a thousandth of that of all: some gradients are zero but
    for rounding, such as those of the keys' biases."""
    assert found.keys() == expected.keys()
    total = float(torch.stack([each.norm() for each in expected.values()]).norm())
    for name, value in expected.items():
        distance = float((found[name] - value).norm())
        assert distance <= tolerance * max(float(value.norm()), 1e-3 * total), name


STEPS = [name for name, case in vr.SUITE.items() if isinstance(case, vr.Case)]


@pytest.mark.parametrize("name", [*STEPS, "recomputed", "zero2"])
def test_two_ranks_compute_what_one_process_computes(
    name: str, kind: str, alone: Callable[[str], tr.Result], pair: Results
) -> None:
    if name not in vr.suite(kind):
        pytest.skip("only of the FSDP2 trainer")
    assert_equal(pair[name], alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("family", vr.OTHERS)
def test_the_other_families_on_two_ranks_compute_what_one_process_computes(
    family: str, alone: Callable[[str], tr.Result], other_families: Results
) -> None:
    assert_equal(other_families[family], alone(family))
    assert_images_on_first(other_families[family])
    assert all(rank.extra["packing"].mode == "forest" for rank in other_families[family])


def assert_equal(ranks: list[tr.Result], expected: tr.Result) -> None:
    """The ranks' gradients, weights and metrics are those of one process."""
    assert_near(vr.whole([r.extra["gradient"] for r in ranks]), vr.whole([expected.extra["gradient"]]), 2e-6)
    weights, after = tr.assemble([r.weights for r in ranks]), tr.assemble([expected.weights])
    assert weights.keys() == after.keys()
    assert max(float((weights[n] - after[n]).abs().max()) for n in after) < 1e-5
    for rank in ranks:
        for found, metrics in zip(rank.metrics, expected.metrics, strict=True):
            assert {each: found[each] for each in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [*vr.FAMILIES, "frozen", "adapter"])
def test_the_ranks_find_that_rows_with_images_are_exact(name: str, pair: Results) -> None:
    for rank in pair[name]:
        found = rank.extra["packing"]
        assert found.mode == "forest" and "with images, its own forward" in found.reason


@pytest.mark.parametrize("family", vr.FAMILIES)
def test_images_were_on_one_rank_only(family: str, pair: Results) -> None:
    assert_images_on_first(pair[family])


def assert_images_on_first(ranks: list[tr.Result]) -> None:
    """Images were on the first rank only, and the tower was trained."""
    first, second = (result.extra["images"] for result in ranks)
    assert sorted(first) == [0, 1, 2] and second == [0, 0, 0]
    gradient = vr.whole([each.extra["gradient"] for each in ranks])
    tower = [each for name, each in gradient.items() if "visual" in name or "vision" in name]
    assert max(float(each.abs().max()) for each in tower) > 1e-6


@pytest.mark.parametrize("name", ["resume", "resume-frozen"])
def test_resume_is_bitwise(name: str, pair: Results) -> None:
    for result in pair[name]:
        for weight, (offset, rows) in result.weights.items():
            resumed = result.extra["resumed"][weight]
            assert resumed[0] == offset and torch.equal(resumed[1], rows), weight


def test_only_parts_that_are_trained_are_published(pair: Results) -> None:
    def parts(name: str) -> set[str]:
        return {each.split(".")[1] for each in pair[name][0].extra["published"] if each != "lm_head.weight"}

    assert parts("qwen3_vl") == {"visual", "language_model"}
    assert parts("frozen") == {"language_model"}
    assert parts("projector-inside") == {"connector"}
    assert parts("adapter") == {"text_model"}
    assert all("merger" in each for each in pair["projector"][0].extra["published"])
    for results in pair.values():
        for result in results:
            assert result.weights.keys() <= set(result.extra.get("published", result.weights))


def test_text_alone_trains_the_language_model_and_leaves_the_rest(
    alone: Callable[[str], tr.Result], pair: Results
) -> None:
    """Without images, no rank calls tower and projector, and weight decay does not reach them."""
    before, after = (tr.assemble(parts) for parts in ([each.extra["before"] for each in pair["text-alone"]],
                                                      [each.weights for each in pair["text-alone"]]))  # fmt: skip
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed and not any("visual" in name for name in changed)
    expected = tr.assemble([alone("text-alone").weights])
    assert max(float((after[name] - weight).abs().max()) for name, weight in expected.items()) < 1e-5


def test_features_of_a_frozen_tower_are_constant_unless_it_is_sharded(kind: str, pair: Results) -> None:
    assert pair["frozen"][0].extra["constant"] == (kind != "deepspeed-3")
    assert not pair["qwen3_vl"][0].extra["constant"]


def test_a_served_model_is_the_reference(kind: str, pair: Results) -> None:
    if kind != "fsdp2":
        pytest.skip("served models are those of FSDP2")
    for result in pair["served"]:
        for held, served in zip(result.extra["held"], result.extra["served"], strict=True):
            np.testing.assert_allclose(served["logprobs"], held["reference_logprobs"], atol=2e-6)


def logprobs(folder: Path, model: object, document: Document) -> Tensor:
    """Of the answer's tokens, by the model's own forward."""
    tokens = torch.from_numpy(document.tokens.astype(np.int64))
    types = torch.zeros(1, len(tokens), dtype=torch.int64)
    inputs = {}
    if document.images:
        store = ImageStore(vr.images_of(folder))
        row = row_images([store.read(image.digest) for image in document.images], document.images, "cpu")
        types[0, row.places] = 1
        inputs = row.inputs
    if "pixel_attention_mask" in inputs or "idefics" in type(model).__name__.lower():
        # Idefics3 takes all images of a prompt in the second dimension.
        inputs = {name: each.flatten(0, 1)[None] for name, each in inputs.items()}
    else:
        inputs["mm_token_type_ids"] = types
    logits = model(input_ids=tokens[None], **inputs).logits[0, :-1]  # type: ignore[operator]
    return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0][torch.from_numpy(document.loss_mask[1:])]


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_one_process_computes_what_transformers_and_torch_do(
    family: str, folder: Path, alone: Callable[[str], tr.Result]
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder / family, attn_implementation="eager")
    named, settings = dict(model.named_parameters()), tr.config(folder, family, "sft").trainer
    flat, wide = ([each for each in named.values() if (each.ndim == 1) is one] for one in (True, False))
    groups = [{"params": wide, "weight_decay": settings.optimizer.weight_decay}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=tr.LR, eps=settings.optimizer.eps)
    for step, rate in enumerate((1 / 3, 2 / 3, 1.0)):
        loss = -torch.cat([logprobs(folder, model, each) for each in vr.documents(folder, family)]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or 1e9)
        for group in optimizer.param_groups:
            group["lr"] = tr.LR * rate
        optimizer.step()
        expected = {"loss": float(loss.detach()), "grad_norm": float(norm)}
        found = alone(family).metrics[step]
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    after = tr.assemble([alone(family).weights])
    assert max(float((after[name] - named[name].detach()).abs().max()) for name in after) < 2e-5


def test_an_export_loads_in_transformers_with_its_processor(kind: str, folder: Path, pair: Results) -> None:
    exported = folder / f"exported-{kind}-2"
    model = AutoModelForImageTextToText.from_pretrained(exported, attn_implementation="eager")
    weights = tr.assemble([each.weights for each in pair["qwen3_vl"]])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=0, atol=0)
    AutoTokenizer.from_pretrained(exported)
    processor = AutoImageProcessor.from_pretrained(exported, backend="pil")
    assert processor.to_dict() == AutoImageProcessor.from_pretrained(folder / "qwen3_vl", backend="pil").to_dict()
    with torch.no_grad():
        losses = [-logprobs(folder, model, each) for each in vr.documents(folder, "qwen3_vl")]
    assert float(torch.cat(losses).mean()) < pair["qwen3_vl"][0].metrics[-1]["loss"]
