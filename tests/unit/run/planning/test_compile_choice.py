"""When `trainer.compile: auto` compiles the layers of a trained role."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.data.samples import Document, Pair, Prompt
from lockstep.ledger.ledger import Ledger
from lockstep.models.model_facts import AdapterFacts, ModelFacts
from lockstep.models.tiny_model import make_tiny
from lockstep.run.planning import compile_choice
from lockstep.run.planning.compile_choice import MARGIN, compile_obstacle, tokens_per_step, weigh
from lockstep.run.planning.prepare import PreparedRun, dry_run, prepare_run
from lockstep.run.planning.working_folder import START_EVENT
from lockstep.run.run_id import claim_run_id
from lockstep.run.worker_launcher import RunWorkerLauncher

MODEL = ModelFacts(
    parameters=3_000_000, layers=4, hidden=256, vocabulary=64, kv_heads=2, head_dim=64, context=512, dtype="float32",
    largest_layer=700_000, root=20_000, device="cpu",
)  # fmt: skip


def config(recipe: str = "sft", **changes: Any) -> RunConfig:
    values = {
        "recipe": recipe, "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
        "trainer": {"compile": "auto"}, **changes,
    }  # fmt: skip
    return check_config(values, "test")


def obstacle(model: ModelFacts = MODEL, device: str = "cpu", here: bool = True, compiler: bool = True) -> str | None:
    return compile_obstacle(config().policy, replace(model, device=device), here, compiler)


def test_layers_are_compiled_only_where_the_gain_is_known() -> None:
    assert obstacle() is None
    assert "compiler (CXX, g++, clang++)" in str(obstacle(compiler=False))
    assert "hosts without" in str(obstacle(here=False))
    assert "measured on cuda" in str(obstacle(device="cuda"))
    assert "measured in bfloat16" in str(obstacle(replace(MODEL, dtype="bfloat16")))
    assert "with an adapter" in str(obstacle(replace(MODEL, adapter=AdapterFacts(8, 4, 0))))
    assert "routers" in str(obstacle(replace(MODEL, router_aux_loss=0.01)))
    assert "Mamba has no attention" in str(obstacle(replace(MODEL, layout_refusal="Mamba has no attention")))
    for stage, compiles in ((0, True), (1, True), (2, False), (3, False)):
        settings = {"zero_optimization": {"stage": stage}}
        deepspeed = config(trainer={"compile": "auto", "kind": "deepspeed", "deepspeed": settings}).policy
        found = compile_obstacle(deepspeed, MODEL, True, True)
        assert (found is None) == compiles and (compiles or "deepspeed" in str(found))


@given(
    tokens=st.floats(1, 1e9), layers=st.integers(1, 80), hidden=st.integers(16, 8192), threads=st.integers(1, 64),
    fused=st.booleans(),
)  # fmt: skip
def test_compiling_pays_from_a_length_on_that_depends_on_model_and_threads(
    tokens: float, layers: int, hidden: int, threads: int, fused: bool
) -> None:
    model = replace(MODEL, layers=layers, hidden=hidden, fused_layers=fused)
    per_value = compile_choice.SAVED_FUSED_S if fused else compile_choice.SAVED_S
    cost = compile_choice.COMPILE_S + compile_choice.COMPILE_LAYER_S * (layers - 1)
    least = MARGIN * cost * threads / (layers * hidden * per_value)
    assert weigh(1.01 * least, model, threads).compile == "layers"
    assert weigh(0.99 * least, model, threads).compile == "off"
    if weigh(tokens, model, threads).compile == "layers":
        assert weigh(2 * tokens, model, threads).compile == "layers"
    assert f"{tokens:,.0f} tokens" in weigh(tokens, model, threads).reason


class Samples:
    """Samples of known lengths."""

    def __init__(self, *samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, start: int, count: int) -> list[Any]:
        return list(self._samples[start : start + count])


def of(length: int) -> np.ndarray:
    return np.zeros(length, np.int32)


def test_the_tokens_of_a_step_are_those_that_the_trainer_computes() -> None:
    documents: Any = Samples(Document("0:0", 0, of(10), of(10) > 0), Document("0:1", 1, of(30), of(30) > 0))
    assert tokens_per_step(config(batch_size=8), documents) == 8 * 20
    pairs: Any = Samples(Pair("0:0", 0, of(10), of(3), of(5)))
    assert tokens_per_step(config("preference", batch_size=8), pairs) == 8 * 18
    prompts: Any = Samples(Prompt("0:0", 0, of(12), ""))
    rollout = {"sampling": {"max_tokens": 40}}
    online = config(
        "grpo", prompts_per_step=2, group_size=4, rollout=rollout, reward={"terms": [{"kind": "exact_match"}]}
    )
    assert tokens_per_step(online, prompts) == 2 * (12 + 4 * 10)
    best = config(
        "rejection_sampling", prompts_per_step=2, group_size=4, rollout=rollout,
        reward={"terms": [{"kind": "exact_match"}]},
    )  # fmt: skip
    assert tokens_per_step(best, prompts) == 2 * (12 + 10), "only the best of four completions is trained on"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("auto")
    make_tiny(home / "model", hidden=32, layers=2, heads=2, kv_heads=1, ffn=48, max_length=64, alphabet="0123456789=")
    rows = [json.dumps({"prompt": f"{n % 10}=", "completion": "1"}) for n in range(20)]
    (home / "data.jsonl").write_text("\n".join(rows) + "\n")
    return home


def local(home: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "folder": str(home), "steps": 2, "batch_size": 4, "model": {"path": str(home / "model")},
        "data": {"path": str(home / "data.jsonl")}, "cluster": {"device": "cpu"},
    }  # fmt: skip
    return config(**values | changes)


def started_with(prepared: PreparedRun, folder: Path) -> str:
    """The setting that the first trainer rank gets."""
    started: list[WorkerSpec] = []

    def start(specs: list[WorkerSpec]) -> list[Any]:
        started.extend(specs)
        return [SimpleNamespace(spec=spec) for spec in specs]

    cluster: Any = SimpleNamespace(start=start, store=lambda: "tcp://127.0.0.1:1")
    folder.mkdir()
    claim_run_id(folder, "x")
    prepared.folder = folder
    RunWorkerLauncher(prepared, cluster, generation=1).launch_all()
    return str(started[0].arguments["role"]["trainer"]["compile"])


def test_ranks_get_what_was_chosen_and_the_user_reads_why(home: Path, tmp_path: Path) -> None:
    short = prepare_run(local(home), None)
    assert any(note.startswith("trainer.compile auto is off: compiling saves about 0 s") for note in short.notes)
    assert started_with(short, tmp_path / "short") == "off"
    assert short.model.fused_layers
    long = prepare_run(local(home, steps=100_000_000, trainer={"compile": "auto", "threads": 1}), None)
    (note,) = [note for note in long.notes if "compile" in note]
    assert note.startswith("trainer.compile auto is layers: compiling saves about")
    assert started_with(long, tmp_path / "long") == "layers"
    assert prepare_run(local(home, trainer={"compile": "layers"}), None).plan.compile == {}


@pytest.mark.parametrize("began_with", ["off", "layers"])
def test_a_resumed_run_keeps_its_choice_if_it_is_made_longer_or_shorter(
    began_with: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = 2, 100_000_000
    began, then = local(home, name=began_with, steps=few if began_with == "off" else many), home / began_with
    choice = dict(prepare_run(began, None).plan.compile)
    with Ledger.create(then, began.model_dump(mode="json")) as ledger:
        ledger.record_event(START_EVENT, rows=20, row_counts=[20], compile=choice)
    other = prepare_run(local(home, name=began_with, steps=many if began_with == "off" else few), then)
    assert other.plan.compile == {"policy": began_with}
    assert f"trainer.compile auto is {began_with}: the run began with it" in other.notes
    monkeypatch.setattr(compile_choice, "has_compiler", lambda: False)
    assert prepare_run(began, then).plan.compile == {"policy": "off"}, "what is not possible any more is not kept"


def test_without_a_compiler_it_is_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "has_compiler", lambda: False)
    found = dry_run(local(home, steps=100_000_000), None)
    assert found.plan.compile == {"policy": "off"}
    assert "trainer.compile auto is off: there is no C++ compiler (CXX, g++, clang++)" in found.notes
