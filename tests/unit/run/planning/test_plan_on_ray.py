"""The plan of a run on the nodes of a Ray cluster."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.cluster.placement.assignment import DoesNotFit
from lockstep.cluster.placement.bundles import NodeResources, PlacementError
from lockstep.config.loader import check_config
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.models.model_facts import ModelFacts
from lockstep.models.tiny_model import make_tiny
from lockstep.run.planning.prepare import placement_notes, prepare_run
from lockstep.run.planning.resources import HostResources, local_node
from lockstep.run.planning.run_plan import InfeasibleError, assign_nodes, make_plan

MODEL = ModelFacts(
    parameters=1_000_000, layers=2, hidden=128, vocabulary=64, kv_heads=2, head_dim=32, context=512, dtype="float32",
    largest_layer=450_000, root=100_000,
)  # fmt: skip
HOST = HostResources(cores=2, memory=1 << 20, shared_memory=1 << 20, device="cpu", gpus=0)
"""Too small for any run: a Ray cluster is not held against it."""
CLUSTER = HostResources(cores=2, memory=1 << 20, shared_memory=1 << 20, device="cuda", gpus=16)


def config(**changes: Any) -> SFTConfig | GRPOConfig:
    values: dict[str, Any] = {
        "recipe": "grpo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
        "reward": {"terms": [{"kind": "exact_match"}], "workers": 2}, "trainer": {"ranks": 8}, "cluster": "ray",
        "rollout": {"engine": {"kind": "vllm", "count": 4, "tensor_parallel_size": 2}}, **changes,
    }  # fmt: skip
    return check_config(values, "test")


def node(number: int, cpus: float = 32, gpus: float = 8) -> NodeResources:
    return NodeResources(f"id-{number}", f"node-{number}", f"address-{number}", cpus, gpus, cpus, gpus)


def test_what_processes_need() -> None:
    plan = make_plan(config(placement={"policy": {"cpus": 4}, "rollout": {"cpus": 2}}), MODEL, CLUSTER)
    needs = {each.name: (each.cpus, each.gpus, each.memory) for each in plan.wanted}
    assert needs["policy-7"] == (4, 1, 0) and needs["engine-3"] == (4, 2, 0) and needs["scorer-1"] == (1, 0, 0)
    assert len(needs) == 8 + 4 + 2
    by_name = {process.name: process for process in plan.processes}
    assert by_name["policy-5"].device == "cuda:0" and by_name["policy-5"].threads == 4
    on_cpus = make_plan(config(), MODEL, HOST)
    assert [each.gpus for each in on_cpus.wanted] == [0] * 14
    of_engine = next(each for each in on_cpus.wanted if each.name == "engine-0")
    planned = next(process for process in on_cpus.processes if process.name == "engine-0")
    assert of_engine.cpus == 2 and of_engine.memory == 2 * planned.memory > 0
    assert make_plan(config(cluster="local", trainer={"ranks": 1}), None, HOST).wanted == []


def test_every_process_gets_a_node_or_the_error_says_what_would_fit() -> None:
    plan = make_plan(config(), MODEL, CLUSTER)
    assignment = assign_nodes(plan, config().placement, [node(0), node(1)]).assignment
    assert assignment is not None and set(assignment.node_of) == {process.name for process in plan.processes}
    with pytest.raises(DoesNotFit, match=r"Would fit: placement.colocate=all"):
        assign_nodes(plan, config().placement, [node(0)])
    assert assign_nodes(plan, config().placement, None) is plan
    used = NodeResources("b", "b", "address", 32, 8, 32, 0)
    waiting = assign_nodes(plan, config().placement, [node(0), used])
    assert waiting.assignment is None and "b has 8 of 8 GPUs in use" in waiting.busy


def test_ranks_are_checked_against_the_placement() -> None:
    wrong = config(placement={"policy": {"nodes": 2, "gpus_per_node": 8}})
    with pytest.raises(PlacementError, match=r"are 16 GPUs, and trainer\.ranks 8 needs 8: set trainer\.ranks=16"):
        assign_nodes(make_plan(wrong, MODEL, CLUSTER), wrong.placement, None)


def test_processes_of_the_runs_own_ray_share_the_cores() -> None:
    plan = make_plan(config(trainer={"ranks": 2}), None, HOST)
    own = local_node(plan.wanted, HOST)
    assert own.cpus == sum(each.cpus for each in plan.wanted) > HOST.cores
    assert assign_nodes(plan, config().placement, [own]).assignment is not None


def test_memory_checkpoints_are_refused_on_ray() -> None:
    assert make_plan(config(), MODEL, CLUSTER).memory_copy == 0
    with pytest.raises(InfeasibleError, match=r"recovery\.memory_copy is in the shared memory of one host"):
        make_plan(config(recovery={"memory_copy": True}), MODEL, CLUSTER)


def test_placement_settings_without_effect_on_one_host_are_noted() -> None:
    local = config(cluster="local", placement={"strategy": "spread", "colocate": "all"})
    assert "only `colocate` applies outside Ray" in placement_notes(local)[0]
    for said in (config(cluster="local"), config(placement={"strategy": "spread"})):
        assert placement_notes(said) == []
    assert placement_notes(config(cluster="local", placement={"colocate": "all"})) == [], "engines sleep here as well"
    said = placement_notes(config(cluster="local", placement={"colocate": [["policy", "critic"]]}))
    assert said == ["placement.colocate names critic, of which this run has no processes: the set has no effect"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    make_tiny(Path("model"), hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789=")
    Path("data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    Path("run.yaml").write_text(
        "{recipe: grpo, name: x, steps: 1, model: {path: model}, data: {path: data.jsonl}, token_budget: 64,"
        " rollout: {sampling: {max_tokens: 4}, engine: {count: 2}}, trainer: {ranks: 2},"
        " reward: {terms: [{kind: exact_match}], workers: 1}}"
    )
    return Path("run.yaml")


def test_a_dry_run_shows_the_node_of_every_process(file: Path) -> None:
    own = CliRunner().invoke(app, ["train", str(file), "cluster=ray", "cluster.device=cpu", "--dry-run"])
    assert own.exit_code == 0, own.output
    assert "placement" in own.stdout and "policy-0..1, engine-0..1, scorer-0" in own.stdout
    args = ["train", str(file), "cluster=ray", "cluster.device=cpu", "cluster.address=127.0.0.1:1", "--dry-run"]
    unknown = CliRunner().invoke(app, [*args, "placement.colocate=all"])
    assert unknown.exit_code == 0, unknown.output
    assert "nodes are unknown" in unknown.stderr and "bundles, each on one node" in unknown.stdout
    assert "policy-0, engine-0, policy-1, engine-1" in unknown.stdout and "2 CPUs" in unknown.stdout


def test_nodes_are_listed_before_the_run(file: Path) -> None:
    values = {"cluster": {"kind": "ray", "address": "auto"}}
    asked = check_config(yaml.safe_load(file.read_text()) | values, "test")
    prepared = prepare_run(asked, None, list_nodes=lambda cluster: [node(0, 8, 4)])
    assert prepared.host.device == "cuda" and prepared.plan.assignment is not None
    with pytest.raises(DoesNotFit):
        prepare_run(asked, None, list_nodes=lambda cluster: [node(0, 8, 2)])
