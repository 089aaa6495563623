"""The plan of a run with a served model: its processes, what they need, and the models that are refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_run_plan import HOST, MODEL

from lockstep.cluster.placement.assignment import relax_placement
from lockstep.cluster.placement.bundles import PlacementError, make_bundles
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.loader import check_config
from lockstep.config.recipes import GRPOConfig
from lockstep.config.serve_role import ServeRole
from lockstep.doctor.check.cluster.collective_test import planned_communicators
from lockstep.models.errors import ModelError
from lockstep.models.tiny_model import make_tiny
from lockstep.run.planning.prepare import prepare_run
from lockstep.run.planning.run_plan import InfeasibleError, RunPlan, make_plan
from lockstep.run.run_id import claim_run_id
from lockstep.run.worker_launcher import SERVED_MODEL_SERVICE, RunWorkerLauncher
from lockstep.train.served_model_service import ServedModelService

ALPHABET = "0123456789="


def config(**changes: Any) -> GRPOConfig:
    values = {
        "recipe": "grpo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
        "reward": {"terms": [{"kind": "exact_match"}], "workers": 1}, "trainer": {"ranks": 2},
        "loss": {"kl": {"coefficient": 0.1}}, "reference": {"ranks": 3}, **changes,
    }  # fmt: skip
    made = check_config(values, "test")
    assert isinstance(made, GRPOConfig)
    return made


def plan(wanted: GRPOConfig, **host: Any) -> RunPlan:
    others = {role.name: MODEL for role in wanted.serve_roles}
    return make_plan(wanted, MODEL, replace(HOST, **host), others)


def test_a_served_model_has_its_processes_memory_and_collectives() -> None:
    wanted, inside = plan(config()), plan(config(reference=None))
    names = ["policy-0", "policy-1", "reference-0", "reference-1", "reference-2", "engine-0", "scorer-0"]
    assert [process.name for process in wanted.processes] == names
    reference = wanted.processes[2]
    assert (reference.role, reference.rank, reference.threads) == ("reference", 0, HOST.cores // 3)
    assert 0 < reference.memory < wanted.processes[0].memory
    freed = inside.processes[0].memory - wanted.processes[0].memory
    assert freed == 4 * MODEL.parameters // 2, "the policy's ranks hold no reference"
    assert wanted.memory_copy == inside.memory_copy, "no part of a checkpoint"
    (gathers,) = [each for each in wanted.collectives if each.communicator == "reference fsdp"]
    assert (gathers.operation, gathers.times) == ("all_gather", "2 per micro-batch, and 1 (reference_logprob)")
    before = [each.times for each in inside.collectives if "before training" in each.times]
    assert before and not [each for each in wanted.collectives if "before training" in each.times]


def test_its_ranks_have_gpus_of_their_own() -> None:
    def devices(gpus: int, **changes: Any) -> list[str]:
        found = plan(config(**changes), device="cuda", gpus=gpus).processes
        return [process.device.removeprefix("cuda:") for process in found if process.device != "cpu"]

    shared = {"colocate": ["policy", "rollout"]}
    assert devices(6) == ["0", "1", "2", "3", "4", "5"]
    assert devices(5, placement=shared) == ["0", "1", "2", "3", "4", "0"]
    with pytest.raises(InfeasibleError, match=r"reference.ranks 3 needs as many GPUs.* has 2: set reference.ranks=2"):
        devices(2)
    with pytest.raises(InfeasibleError, match=r"2 \(policy \+ rollout\) \+ 3 \(reference\) = 5 GPUs, .* has 4"):
        devices(4, placement=shared)
    assert devices(2, placement={"colocate": "all"}, reference={"ranks": 2}) == ["0", "1", "0", "1", "0"]
    with pytest.raises(PlacementError, match=r"reference.ranks 3\): set reference.ranks=2, or leave reference out"):
        devices(8, placement={"colocate": "all"})


def test_placement_on_ray() -> None:
    wanted = config(cluster="ray", placement={"reference": {"nodes": 1, "cpus": 2}})
    found = plan(wanted)
    assert [each.cpus for each in found.wanted if each.role == "reference"] == [2, 2, 2]
    bundles = [bundle.processes for bundle in make_bundles(found.wanted, wanted.placement)]
    assert ("reference-0", "reference-1", "reference-2") in bundles
    relaxed = [bundle.processes for bundle in make_bundles(found.wanted, relax_placement(wanted.placement))]
    assert ("reference-0",) in relaxed and len(relaxed) == len(found.wanted)


def test_every_reward_model_is_placed_as_the_config_says() -> None:
    term = {"kind": "model", "path": "m", "ranks": 2}
    reward = {"terms": [{"kind": "exact_match"}, {**term, "name": "a"}, {**term, "name": "b"}], "workers": 1}
    placement = {"reward_model": {"nodes": 2, "cpus": 2}, "reference": {"cpus": 1}}
    wanted = config(cluster="ray", reward=reward, placement=placement)
    found = plan(wanted)
    models = ["reward_model", "reward_model_2"]
    assert [each.cpus for each in found.wanted if each.role in models] == [2] * 4
    alone = {bundle.processes for bundle in make_bundles(found.wanted, wanted.placement) if bundle.one_per_node}
    assert alone == {(f"{role}-{rank}",) for role in models for rank in range(2)}
    odd = config(cluster="ray", reward=reward, placement={"reward_model": {"nodes": 3}})
    with pytest.raises(PlacementError, match=r"reward.terms.1.ranks 2 cannot be .*placement.reward_model.nodes 3"):
        make_bundles(plan(odd).wanted, odd.placement)


def test_check_tests_its_communicator() -> None:
    found = {each.name: each for each in planned_communicators(config(), "cpu")}
    assert found["reference"].members == ("reference-0", "reference-1", "reference-2")
    assert "reference" not in {each.name for each in planned_communicators(config(reference={}), "cpu")}


def test_its_ranks_are_started_and_replaced_together(tmp_path: Path) -> None:
    def start(specs: list[WorkerSpec]) -> list[Any]:
        return [SimpleNamespace(spec=spec) for spec in specs]

    wanted = config()
    claim_run_id(tmp_path, "x")
    cluster: Any = SimpleNamespace(start=start, store=lambda: "tcp://127.0.0.1:1")
    prepared: Any = SimpleNamespace(config=wanted, plan=plan(wanted), folder=tmp_path, images=None)
    launcher = RunWorkerLauncher(prepared, cluster, generation=2)
    _, served, _ = launcher.launch_all()
    assert [(worker.spec.name, worker.spec.service) for worker in served] == [
        (f"reference-{rank}", SERVED_MODEL_SERVICE) for rank in range(3)
    ]
    arguments = served[1].spec.arguments
    assert (arguments["rank"], arguments["world"], arguments["restarts"], arguments["generation"]) == (1, 3, 0, 2)
    role = ServeRole.model_validate(arguments["role"])
    assert role == wanted.serve_roles[0].model_copy(update={"threads": HOST.cores // 3})
    again = [worker.spec for worker in launcher.launch("reference", range(3))]
    assert [(spec.name, spec.arguments["restarts"]) for spec in again] == [(f"reference-{r}.1", 1) for r in range(3)]
    service = ServedModelService(**arguments | {"device": "cpu"})
    with pytest.raises(RuntimeError, match="call setup"):
        service.info()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy; the same with other weights; one with another alphabet; one whose vocabulary is smaller."""
    made = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32, "max_length": 32}
    for name, alphabet in (("policy", ALPHABET), ("older", ALPHABET), ("letters", "abcdefghij="), ("few", "0123")):
        make_tiny(made / name, **shape, alphabet=alphabet, seed=len(name))
    (made / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    return made


def prepared_with(home: Path, reference: str) -> Any:
    changes: dict[str, Any] = {
        "folder": str(home / "runs"), "model": {"path": str(home / "policy")}, "token_budget": 64,
        "data": {"path": str(home / "data.jsonl")}, "rollout": {"sampling": {"max_tokens": 4}},
        "cluster": {"device": "cpu"}, "reference": {"path": str(home / reference)},
    }  # fmt: skip
    return prepare_run(config(**changes), None)


def test_another_model_with_the_same_tokens_is_accepted(home: Path) -> None:
    assert prepared_with(home, "older").other_models["reference"].vocabulary == 14


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("letters", r"reference.path = .*its tokenizer differs from the policy's in 20 tokens, such as '0'"),
        ("small", r"reference.path = .*it has 7 token ids, and the policy can sample 14"),
        ("bare", r"reference.path = .*has no tokenizer"),
        ("missing", r"reference.path = "),
    ],
)
def test_a_model_with_other_tokens_is_refused_before_anything_starts(home: Path, reference: str, why: str) -> None:
    for name, weights in (("small", "few"), ("bare", "policy")):
        shutil.copytree(home / weights, home / name, dirs_exist_ok=True)
    for path in home.glob("bare/*token*"):
        path.unlink()
    for path in home.glob("policy/*token*"):
        shutil.copy(path, home / "small")
    with pytest.raises(ModelError, match=why):
        prepared_with(home, reference)
    assert not (home / "runs").exists()
