"""The plan of a run with several trained roles, and the processes that the launcher starts for them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_run_plan import HOST, MODEL

from lockstep.cluster.placement.bundles import PlacementError, make_bundles
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.recipes import GRPOConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.doctor.check.cluster.collective_test import planned_communicators
from lockstep.run.planning.run_plan import InfeasibleError, make_plan
from lockstep.run.run_id import claim_run_id
from lockstep.run.worker_launcher import POLICY_SERVICE, ROLE_SERVICE, RunWorkerLauncher
from lockstep.train.fsdp.fsdp_plan import FSDP2Planner

VALUE = replace(MODEL, parameters=300_000, layers=1)


class CriticConfig(GRPOConfig):
    """GRPO with a second trained model."""

    critic_trainer: TrainerConfig = TrainerConfig(ranks=3)

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        changes = {"name": "critic", "trainer": self.critic_trainer}
        return self.policy, self.policy.model_copy(update=changes)


def config(**changes: Any) -> CriticConfig:
    values = {
        "recipe": "grpo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
        "reward": {"terms": [{"kind": "exact_match"}], "workers": 1}, "trainer": {"ranks": 2}, **changes,
    }  # fmt: skip
    return CriticConfig.model_validate(values)


def test_every_trained_role_has_its_ranks_memory_and_collectives() -> None:
    wanted = config()
    plan = make_plan(wanted, MODEL, HOST, {"critic": VALUE})
    names = ["policy-0", "policy-1", "critic-0", "critic-1", "critic-2", "engine-0", "scorer-0"]
    assert [process.name for process in plan.processes] == names
    critic = plan.processes[2]
    assert (critic.role, critic.rank, critic.threads) == ("critic", 0, HOST.cores // 3)
    assert critic.memory == sum(FSDP2Planner().memory(wanted.train_roles[1], VALUE, wanted.token_budget).values())
    assert critic.memory < plan.processes[0].memory
    assert plan.memory_copy == 24 * (MODEL.parameters + VALUE.parameters)
    assert plan.shared_memory == 2 * 4 * MODEL.parameters, "only the policy is published"
    assert {each.communicator for each in plan.collectives} == {
        *("policy fsdp", "policy trainer", "critic fsdp", "critic trainer")
    }
    scatters = {each.communicator: each.times for each in plan.collectives if each.operation == "reduce_scatter"}
    assert scatters == {"policy fsdp": "3 (3 per optimizer step)", "critic fsdp": "2 (2 per optimizer step)"}


def test_every_role_has_gpus_of_its_own_as_long_as_there_are_enough() -> None:
    def devices(gpus: int, **changes: Any) -> list[str]:
        plan = make_plan(config(**changes), MODEL, replace(HOST, device="cuda", gpus=gpus), {"critic": VALUE})
        return [process.device.removeprefix("cuda:") for process in plan.processes if process.device != "cpu"]

    assert devices(6) == ["0", "1", "2", "3", "4", "5"]
    assert devices(3) == ["0", "1", "2", "0", "1", "2"]
    assert devices(5, placement={"colocate": ["policy", "rollout"]}) == ["0", "1", "2", "3", "4", "0"]
    same = {"critic_trainer": {"ranks": 2}}
    assert devices(2, placement={"colocate": "all"}, **same) == ["0", "1", "0", "1", "0"]
    assert devices(3, placement={"colocate": ["policy", "critic"]}, **same) == ["0", "1", "0", "1", "2"]
    with pytest.raises(PlacementError, match=r"trainer.ranks 2, critic.trainer.ranks 3\): set critic.trainer.ranks=2"):
        devices(8, placement={"colocate": "all"})
    with pytest.raises(InfeasibleError, match=r"2 \(policy \+ critic\) \+ 1 \(rollout\) = 3 GPUs, and this host has 2"):
        devices(2, placement={"colocate": ["policy", "critic"]}, **same)
    with pytest.raises(InfeasibleError, match=r"critic.trainer.ranks 3 needs as many GPUs.* has 2"):
        devices(2)


def test_the_largest_role_is_named_with_its_own_fields() -> None:
    large = replace(VALUE, parameters=1_000_000_000)
    with pytest.raises(
        InfeasibleError, match=r"the largest part is critic-0 .*critic.trainer.activation_checkpointing"
    ):
        make_plan(config(), MODEL, replace(HOST, memory=1 << 20), {"critic": large})
    with pytest.raises(InfeasibleError, match=r"the largest part is policy-0 .*or turn on trainer.activation_checkp"):
        make_plan(
            config(),
            replace(MODEL, parameters=10**9),
            replace(HOST, memory=1 << 20, shared_memory=1 << 40),
            {"critic": VALUE},
        )


def test_placement_of_the_critic_on_ray() -> None:
    wanted = config(cluster="ray", placement={"critic": {"nodes": 1, "cpus": 2}})
    plan = make_plan(wanted, MODEL, HOST, {"critic": VALUE})
    assert [each.cpus for each in plan.wanted if each.role == "critic"] == [2, 2, 2]
    bundles = make_bundles(plan.wanted, wanted.placement)
    assert ("critic-0", "critic-1", "critic-2") in [bundle.processes for bundle in bundles]
    assert ("policy-0",) in [bundle.processes for bundle in bundles]


def test_check_tests_the_communicators_of_every_role() -> None:
    found = {each.name: each.members for each in planned_communicators(config(weights={"transport": "gloo"}), "cpu")}
    critic = ("critic-0", "critic-1", "critic-2")
    assert found["policy trainer"] == ("policy-0", "policy-1")
    assert found["critic trainer"] == found["critic checkpoint"] == critic
    assert found["weights engine-0"] == ("policy-0", "engine-0")


def test_ranks_are_started_and_replaced_by_role(tmp_path: Path) -> None:
    wanted, started = config(), []

    def start(specs: list[WorkerSpec]) -> list[Any]:
        started.extend(specs)
        return [SimpleNamespace(spec=spec) for spec in specs]

    claim_run_id(tmp_path, "x")
    cluster: Any = SimpleNamespace(start=start, store=lambda: "tcp://127.0.0.1:1")
    prepared: Any = SimpleNamespace(
        config=wanted, plan=make_plan(wanted, MODEL, HOST, {"critic": VALUE}), folder=tmp_path, images=None
    )
    launcher = RunWorkerLauncher(prepared, cluster, generation=2)
    ranks, served, engines = launcher.launch_all()
    assert served == []
    names = [worker.spec.name for worker in ranks]
    assert names == ["policy-0", "policy-1", "critic-0", "critic-1", "critic-2"]
    assert [worker.spec.name for worker in engines] == ["engine-0"]
    services = {spec.role: spec.service for spec in started if spec.role != "rollout"}
    assert services == {"policy": POLICY_SERVICE, "critic": ROLE_SERVICE}
    assert [spec.arguments["world"] for spec in started[:5]] == [2, 2, 3, 3, 3]
    assert [spec.arguments["role"]["name"] for spec in started[:5]] == ["policy"] * 2 + ["critic"] * 3
    again = [worker.spec for worker in launcher.launch("critic", range(2))]
    assert [spec.name for spec in again] == ["critic-0.1", "critic-1.1"]
    assert [(spec.arguments["world"], spec.arguments["restarts"]) for spec in again] == [(2, 1), (2, 1)]
    (policy, _) = [worker.spec for worker in launcher.launch("policy", range(2))]
    assert (policy.name, policy.arguments["restarts"]) == ("policy-0.1", 1), "each role counts its own starts"
