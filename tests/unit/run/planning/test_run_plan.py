"""The plan of a run: processes, memory, collectives, and what does not fit."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep.cluster.placement.bundles import PlacementError
from lockstep.config.loader import check_config
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.models.model_facts import AdapterFacts, ModelFacts
from lockstep.run.planning.resources import HostResources
from lockstep.run.planning.run_plan import InfeasibleError, make_plan, weight_devices
from lockstep.weights.weight_transport import DevicePlacement

MODEL = ModelFacts(
    parameters=1_000_000, layers=2, hidden=128, vocabulary=64, kv_heads=2, head_dim=32, context=512, dtype="float32",
    largest_layer=450_000, root=100_000,
)  # fmt: skip
HOST = HostResources(cores=8, memory=8 << 30, shared_memory=1 << 30, device="cpu", gpus=0)


def config(**changes: Any) -> SFTConfig | GRPOConfig:
    values = {
        "recipe": "grpo",
        "name": "x",
        "steps": 3,
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "reward": {"terms": [{"kind": "exact_match"}], "workers": 2},
        "trainer": {"ranks": 2},
        **changes,
    }
    return check_config(values, "test")


def test_every_role_has_its_processes() -> None:
    plan = make_plan(config(rollout={"engine": {"count": 3}}), MODEL, HOST)
    assert [process.name for process in plan.processes] == [
        *("policy-0", "policy-1"),
        *("engine-0", "engine-1", "engine-2"),
        *("scorer-0", "scorer-1"),
    ]
    assert [process.threads for process in plan.processes] == [4, 4, 2, 2, 2, 1, 1]


def test_sft_needs_an_engine_only_for_its_evaluation() -> None:
    values: dict[str, Any] = {"recipe": "sft", "reward": None}
    assert {process.role for process in make_plan(config(**values), MODEL, HOST).processes} == {"policy"}
    values["evaluation"] = {"data": {"path": "e.jsonl"}}
    assert {process.role for process in make_plan(config(**values), MODEL, HOST).processes} == {"policy", "rollout"}


def test_optimizer_state_is_sharded_and_published_weights_are_double() -> None:
    one = make_plan(config(trainer={"ranks": 1}), MODEL, HOST)
    two = make_plan(config(), MODEL, HOST)
    saved = one.processes[0].memory - two.processes[0].memory
    assert saved == 16 * MODEL.parameters // 2 - 4 * (100_000 + 2 * 450_000), "two ranks gather two layers and the root"
    assert two.shared_memory == 2 * 4 * MODEL.parameters


def test_the_schedule_of_collectives_follows_sharding_and_updates() -> None:
    plan = make_plan(config(prompts_per_step=8, group_size=4, minibatch_size=8, epochs=2), MODEL, HOST)
    assert [(line.operation, line.times.split()[0]) for line in plan.collectives] == [
        ("all_gather", "5"),  # two layers, forward and backward, and the root
        ("reduce_scatter", "24"),  # 3 units x 2 epochs x 4 mini-batches
        ("all_gather", "8"),
    ]
    kept = make_plan(config(trainer={"ranks": 2, "reshard_after_forward": False}), MODEL, HOST)
    assert kept.collectives[0].times.startswith("3 (")
    assert make_plan(config(trainer={"ranks": 1}), MODEL, HOST).collectives == []


def test_an_adapter_needs_optimizer_state_for_itself_only_and_no_reference_model() -> None:
    model = replace(
        MODEL, dtype="bfloat16", adapter=AdapterFacts(parameters=20_000, trained_blocks=2, first_trained_layer=0)
    )
    penalised = config(loss={"kl": {"coefficient": 0.1}})
    whole, adapter = make_plan(penalised, replace(model, adapter=None), HOST), make_plan(penalised, model, HOST)
    saved = whole.processes[0].memory - adapter.processes[0].memory
    states = 16 * 1_000_000 // 2 - (2 * 1_000_000 + 16 * 20_000) // 2 - 4 * 20_000
    assert saved == states + 2 * 1_000_000 // 2  # and the reference in bfloat16
    assert adapter.shared_memory == whole.shared_memory, "engines serve merged weights"
    assert adapter.collectives[-1].bytes == 4 * 20_000
    assert not any("adapter" in line.times for line in whole.collectives)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (replace(HOST, device="cuda", gpus=1), ["trainer.ranks 2", "trainer.ranks=1"]),
        (replace(HOST, shared_memory=1 << 20), ["/dev/shm", "8 MiB", "1 MiB"]),
        (replace(HOST, memory=1 << 20), ["GiB", "engine-0", "rollout.engine.max_rows"]),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(host: HostResources, words: list[str]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(config(), MODEL, host)
    for word in words:
        assert word in str(caught.value)


def test_gpu_processes_share_gpus_in_turn() -> None:
    plan = make_plan(config(), MODEL, replace(HOST, device="cuda", gpus=2))
    assert [process.device for process in plan.processes[:3]] == ["cuda:0", "cuda:1", "cuda:0"]


def test_colocated_engines_share_the_gpus_of_ranks() -> None:
    def devices(gpus: int, **changes: object) -> list[str]:
        plan = make_plan(config(**changes), MODEL, replace(HOST, device="cuda", gpus=gpus))
        return [each.device for each in plan.processes if each.role == "rollout"]

    wide: dict[str, object] = {"engine": {"kind": "vllm", "count": 2, "tensor_parallel_size": 2}}
    wide |= {"sampling": {"max_tokens": 8}}
    together = {"colocate": "all"}
    assert devices(8, rollout=wide) == ["cuda:2", "cuda:4"]
    assert devices(4, rollout=wide) == ["cuda:2", "cuda:0"]
    assert devices(3, rollout=wide)[0] == "cuda:1", "the last two"
    with pytest.raises(PlacementError, match=r"2 engines with 2 GPUs each need 4: set rollout.engine.count=1 or fewer"):
        devices(8, rollout=wide, placement=together)
    assert devices(8, rollout=wide, placement=together, trainer={"ranks": 4}) == ["cuda:0", "cuda:2"]
    with pytest.raises(InfeasibleError, match="tensor_parallel_size 4 needs as many GPUs, and this host has 2"):
        devices(2, rollout=wide | {"engine": {"kind": "vllm", "tensor_parallel_size": 4}})


def test_gpu_weight_transport_is_refused_on_cpus() -> None:
    with pytest.raises(InfeasibleError, match=r"weights\.transport nccl copies from GPU to GPU"):
        make_plan(config(weights={"transport": "nccl"}), MODEL, HOST)
    gpus = replace(HOST, device="cuda", gpus=2)
    with pytest.raises(InfeasibleError, match=r"weights\.transport nccl needs a GPU of its own"):
        make_plan(config(weights={"transport": "nccl"}), MODEL, gpus)
    for count, transport, expected in ((2, "cuda_ipc", "all"), (8, "nccl", "none")):
        chosen = config(weights={"transport": transport})
        plan = make_plan(chosen, MODEL, replace(gpus, gpus=count))
        assert weight_devices(chosen, plan.processes) == DevicePlacement(True, expected)


def test_copies_of_the_trainers_state_count_as_memory() -> None:
    """Two copies of fp32 weights and two Adam moments; what does not fit is left out, or refused where it is wanted."""
    size = 2 * 12 * MODEL.parameters
    plan = make_plan(config(), MODEL, HOST)
    assert plan.memory_copy == size
    assert make_plan(config(recovery={"memory_copy": False}), MODEL, HOST).memory_copy == 0
    assert make_plan(config(recovery={"enable": False}), MODEL, HOST).memory_copy == 0
    assert make_plan(config(), replace(MODEL, adapter=AdapterFacts(1000, 2, 0)), HOST).memory_copy == 24_000
    copies = {"trainer": {"ranks": 4, "replicas": 2}}
    assert make_plan(config(**copies), MODEL, HOST).memory_copy == 2 * size

    needed = plan.memory + plan.shared_memory + size
    for tight in (replace(HOST, memory=needed - 1), replace(HOST, shared_memory=plan.shared_memory + size - 1)):
        assert make_plan(config(), MODEL, tight).memory_copy == 0
        with pytest.raises(InfeasibleError, match=r"recovery.memory_copy needs 23 MiB"):
            make_plan(config(recovery={"memory_copy": True}), MODEL, tight)
    assert make_plan(config(), MODEL, replace(HOST, memory=needed)).memory_copy == size


def test_a_prompt_needs_room_beside_its_completion() -> None:
    for field, changes in (
        ("rollout.sampling.max_tokens", {"rollout": {"sampling": {"max_tokens": 512}}}),
        (
            "evaluation.sampling.max_tokens",
            {"evaluation": {"data": {"path": "e.jsonl"}, "sampling": {"max_tokens": 512}}},
        ),
    ):
        with pytest.raises(InfeasibleError, match=f"{field} 512 leaves no room .* context of 512 .* 511 at most"):
            make_plan(config(**changes), MODEL, HOST)
    sft = {"recipe": "sft", "reward": None, "rollout": {"sampling": {"max_tokens": 512}}}
    make_plan(config(**sft), MODEL, HOST)  # generates nothing


def test_cuda_without_a_gpu_is_refused_for_any_number_of_ranks() -> None:
    with pytest.raises(InfeasibleError, match=r"finds no GPU .* cluster\.device=cpu"):
        make_plan(config(), MODEL, replace(HOST, device="cuda", gpus=0))
