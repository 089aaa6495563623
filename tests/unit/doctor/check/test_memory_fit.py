"""Memory and time of a config, against formulas written out by hand, and time-outs that are too short."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.loader import accepts_overrides, check_config, load_config
from lockstep.config.recipes import GRPOConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.doctor.check.rules import memory_fit, step_durations
from lockstep.doctor.check.rules.memory_fit import ProcessMemory, engine_memory_parts
from lockstep.doctor.check.rules.model_shape import model_shape_of
from lockstep.doctor.output.findings import Finding
from lockstep.models.model_facts import ModelFacts
from lockstep.train.deepspeed.deepspeed_plan import DeepSpeedPlanner
from lockstep.train.fsdp.fsdp_plan import FSDP2Planner

QWEN_7B = {  # https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPE = model_shape_of(QWEN_7B)
SHAPES = {"policy": SHAPE}
H100 = ProcessMemory("cuda", 80 << 30, "NVIDIA H100 80GB HBM3")
BASE: dict[str, Any] = {
    "recipe": "grpo", "name": "x", "steps": 1, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
    "reward": {"terms": [{"kind": "exact_match"}]}, "rollout": {"sampling": {"max_tokens": 1024}},
}  # fmt: skip


FACTS = ModelFacts(
    SHAPE.parameters, 28, 3584, 152064, 4, 128, 131072, "bfloat16", SHAPE.per_layer[0],
    SHAPE.embedding + SHAPE.head + SHAPE.last_norm,
)  # fmt: skip


def rank_memory(role: TrainRole, token_budget: int) -> dict[str, int]:
    return FSDP2Planner().memory(role, FACTS, token_budget)


def judge(run: Any, memory: ProcessMemory) -> list[Finding]:
    return memory_fit.judge_memory(run, rank_memory, SHAPE, memory)


def config(**changes: Any) -> Any:
    return check_config(BASE | changes, "x")


def by_id(findings: list[Finding]) -> dict[str, Finding]:
    return {each.id: each for each in findings}


def test_a_7b_has_the_parameters_of_its_model_card() -> None:
    assert SHAPE.parameters == 7_615_616_512
    assert SHAPE.kv_bytes(2) == 2 * 28 * 4 * 128 * 2


def test_states_are_sixteen_bytes_a_parameter_over_the_ranks_of_a_copy() -> None:
    parts = rank_memory(config(trainer={"ranks": 8, "replicas": 2}).policy, 4096)
    assert parts["weights"] + parts["gradients"] + parts["optimizer"] == 16 * SHAPE.parameters // 4
    assert parts["activations"] == 34 * 4096 * 3584 * 28
    assert parts["gathered"] == 2 * (2 * 152064 * 3584 + 3584 + 2 * SHAPE.per_layer[0])
    recomputed = rank_memory(config(trainer={"ranks": 8, "activation_checkpointing": True}).policy, 4096)
    assert parts["activations"] == 17 * recomputed["activations"]


def test_a_7b_does_not_fit_one_gpu_and_what_would_make_it_fit_does() -> None:
    policy = by_id(judge(config(), H100))["memory-policy"]
    assert policy.severity == "error" and "trainer.ranks=4" in policy.fix and policy.source
    for words in ({"trainer": {"ranks": 4}},):
        assert by_id(judge(config(**words), H100))["memory-policy"].severity == "ok"
    too_few = by_id(judge(config(trainer={"ranks": 2}), H100))["memory-policy"]
    assert too_few.severity == "error"


@pytest.mark.parametrize(
    ("usable_gb", "ranks", "zero", "expected"),
    [
        (60, 4, {"stage": 1}, {"stage": 2}),
        (50, 4, {"stage": 2}, {"stage": 3}),
        (45, 1, {"stage": 1}, {"offload_optimizer": {"device": "cpu"}}),
        (30, 1, {"stage": 1}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        (30, 1, {"stage": 3}, {"offload_optimizer": {"device": "cpu"}}),
        (20, 1, {"stage": 2}, {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
def test_deepspeed_runs_get_the_lowest_stage_that_fits(usable_gb: int, ranks: int, zero: Any, expected: Any) -> None:
    memory = ProcessMemory("cuda", int(usable_gb * 1e9 / (1 - memory_fit.RESERVE)))

    def judged(zero: Any) -> Finding:
        trainer = {"kind": "deepspeed", "ranks": ranks, "deepspeed": {"zero_optimization": zero}}
        run = config(trainer=trainer, token_budget=2048)

        def needs(role: TrainRole, token_budget: int) -> dict[str, int]:
            return DeepSpeedPlanner().memory(role, FACTS, token_budget)

        return by_id(memory_fit.judge_memory(run, needs, SHAPE, memory))["memory-policy"]

    refused = judged(zero)
    assert refused.severity == "error"
    path = "trainer.deepspeed.zero_optimization"
    words = [f"{path}.{name}={value}" for name, value in expected.items() if name == "stage"]
    words += [f"{path}.{name}.device=cpu" for name in expected if name != "stage"]
    assert " with ".join(words) in refused.fix
    assert judged(zero | expected).severity == "ok"


def test_what_is_suggested_can_be_set_where_the_settings_are_a_file(tmp_path: Path) -> None:
    file = tmp_path / "zero2.json"
    file.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}, "bf16": {}}')
    trainer = {"kind": "deepspeed", "deepspeed": str(file)}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(BASE | {"trainer": trainer, "token_budget": 2048}))

    def needs(role: TrainRole, token_budget: int) -> dict[str, int]:
        return DeepSpeedPlanner().memory(role, FACTS, token_budget)

    memory = ProcessMemory("cuda", int(20e9 / (1 - memory_fit.RESERVE)))
    refused = by_id(memory_fit.judge_memory(load_config(run_file), needs, SHAPE, memory))["memory-policy"]
    suggested = re.findall(r"trainer\.deepspeed\.[\w.]+=\w+", refused.fix)
    assert refused.severity == "error" and len(suggested) == 3
    changed = load_config(run_file, suggested)
    assert changed.trainer.deepspeed == {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "bf16": {},
    }
    assert by_id(memory_fit.judge_memory(changed, needs, SHAPE, memory))["memory-policy"].severity == "ok"


@pytest.mark.parametrize("reshards", [True, False])
def test_no_stage_is_suggested_that_the_run_would_refuse(reshards: bool) -> None:
    trainer = {"kind": "deepspeed", "ranks": 4, "reshard_after_forward": reshards}
    run = config(trainer=trainer, token_budget=2048)

    def needs(role: TrainRole, token_budget: int) -> dict[str, int]:
        return DeepSpeedPlanner().memory(role, FACTS, token_budget)

    fix = memory_fit.settings_that_fit(run, run.policy, needs, int(50e9))
    assert ("stage=3" in fix) is reshards


@pytest.mark.parametrize("trainer", [
    {"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}},
    {"deepspeed": {"zero_optimization": {"stage": 3}}, "offload": {"optimizer": True, "parameters": True}},
])  # fmt: skip
def test_offloading_saves_nothing_where_the_device_is_the_host(trainer: dict[str, Any]) -> None:
    def judged(trainer: dict[str, Any], memory: ProcessMemory) -> str:
        def needs(role: TrainRole, token_budget: int) -> dict[str, int]:
            return DeepSpeedPlanner().memory(role, replace(FACTS, device=memory.device), token_budget)

        run = config(trainer={"kind": "deepspeed", "ranks": 2, **trainer})
        return memory_fit.judge_memory(run, needs, None, memory)[0].seen

    plain = {"deepspeed": {"zero_optimization": {"stage": 3}}}
    host = ProcessMemory("cpu", 512 << 30)
    assert judged(trainer, host) == judged(plain, host)
    assert judged(trainer, H100) != judged(plain, H100)


class CriticConfig(GRPOConfig):
    """GRPO with a second trained model of the same size."""

    critic: TrainerConfig

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        return self.policy, self.policy.model_copy(update={"name": "critic", "trainer": self.critic})


def test_every_trained_role_is_judged_by_its_own_ranks() -> None:
    run = CriticConfig.model_validate(BASE | {"trainer": {"ranks": 4}, "critic": {"ranks": 1}})
    found = by_id(judge(run, H100))
    assert found["memory-policy"].severity == "ok" and found["memory-critic"].severity == "error"
    assert "critic.trainer.ranks=4" in found["memory-critic"].fix
    assert "critic.model.adapter (LoRA)" in found["memory-critic"].fix
    (host,) = judge(run, ProcessMemory("cpu", 64 << 30))
    assert host.severity == "error" and "4 policy ranks of" in host.seen and "1 critic rank of" in host.seen
    assert "critic.trainer.activation_checkpointing=true" in host.fix
    (unknown,) = judge(run, ProcessMemory("cuda", 0))
    assert "a critic rank needs" in unknown.seen


def test_an_engine_that_has_no_room_for_keys_and_values_is_found() -> None:
    small = ProcessMemory("cuda", 15 << 30, "small")
    vllm = {"engine": {"kind": "vllm"}, "sampling": {"max_tokens": 1024}}
    engine = by_id(judge(config(rollout=vllm), small))["memory-engine"]
    assert engine.severity == "error" and "tensor_parallel_size=2" in engine.fix
    fine = by_id(judge(config(rollout=vllm), H100))["memory-engine"]
    room = int((0.9 * (80 << 30) - 2 * SHAPE.parameters) // (SHAPE.kv_bytes(2) * 2048))
    assert fine.severity == "ok" and f"{room:,} sequences of 2,048 tokens" in fine.seen


def test_an_engine_and_a_trainer_that_share_gpus_must_both_have_room() -> None:
    shared: dict[str, Any] = {
        "placement": {"colocate": "all"}, "trainer": {"ranks": 4}, "cluster": {"kind": "ray"},
        "rollout": {"engine": {"kind": "vllm", "count": 4}, "sampling": {"max_tokens": 1024}},
    }  # fmt: skip
    assert "memory-shared" not in by_id(judge(config(**shared), H100)), "the trainer leaves the GPU"
    stays = shared | {"trainer": {"ranks": 4, "offload": {"parameters": False, "optimizer": False}}}
    found = by_id(judge(config(**stays), H100))["memory-shared"]
    assert found.severity == "error" and "leave trainer.offload out" in found.fix


def test_the_roles_of_a_set_need_what_computes_and_what_the_others_keep() -> None:
    values: dict[str, Any] = {"trainer": {"ranks": 2}, "placement": {"colocate": ["policy", "critic"]}}
    run = CriticConfig.model_validate(BASE | values | {"critic": {"ranks": 4}, "token_budget": 2048})
    trained = {role.name: rank_memory(role, 2048) for role in run.train_roles}
    policy, critic = (sum(parts.values()) for parts in trained.values())
    kept = 12 * SHAPE.parameters // 4  # weights and two moments in float32; gradients exist only in a step
    small = ProcessMemory("cuda", int((policy + kept / 2) / (1 - memory_fit.RESERVE)), "small")
    (found,) = memory_fit._judge_set_memory(run, trained, {"reference": 5}, small)
    assert found.severity == "error" and "leave critic.trainer.offload out" in found.fix
    assert f"{policy / 2**30:.1f} GiB of policy + {kept / 2**30:.1f} GiB that critic keeps" in found.seen
    assert f"= {(policy + kept) / 2**30:.1f} GiB" in found.seen and critic < policy
    enough = ProcessMemory("cuda", int((policy + kept * 1.1) / (1 - memory_fit.RESERVE)))
    assert [each.severity for each in memory_fit._judge_set_memory(run, trained, {}, enough)] == ["ok"]


def test_the_remedy_for_a_set_is_about_the_roles_that_are_in_its_way() -> None:
    """Not about a role with devices of its own, and not about offloading where a model alone is too large."""
    values: dict[str, Any] = {"trainer": {"ranks": 2}, "placement": {"colocate": ["policy", "reference"]}}
    run = CriticConfig.model_validate(BASE | values | {"critic": {"ranks": 4}, "token_budget": 2048})
    trained = {role.name: rank_memory(role, 2048) for role in run.train_roles}
    reference = 2 * sum(trained["policy"].values())
    for usable, fix in ((reference * 1.01, "leave trainer.offload out"), (reference / 2, "use more ranks for")):
        memory = ProcessMemory("cuda", int(usable / (1 - memory_fit.RESERVE)), "small")
        (found,) = memory_fit._judge_set_memory(run, trained, {"reference": reference}, memory)
        assert found.severity == "error" and found.fix.startswith(fix) and "critic" not in found.fix


def test_every_role_of_the_engines_set_keeps_memory_from_them() -> None:
    stays = {"ranks": 8, "offload": {"parameters": False, "optimizer": False}}
    values: dict[str, Any] = {
        **BASE, "recipe": "ppo", "cluster": "ray", "trainer": {"ranks": 8}, "critic": {"trainer": stays},
        "placement": {"colocate": "all"}, "rollout": {"engine": {"kind": "vllm", "count": 8}},
    }  # fmt: skip
    run = check_config(values, "x")
    found = by_id(judge(run, H100))["memory-shared"]
    kept = 12 * SHAPE.parameters / 8  # weights and two moments in float32
    assert found.severity == "error" and "leave critic.trainer.offload out" in found.fix
    assert f"critic keeps {kept / 2**30:.1f} GiB while the engine takes 72.0 GiB" in found.seen
    elsewhere = values | {"placement": {"colocate": ["policy", "rollout"]}}
    assert "memory-shared" not in by_id(judge(check_config(elsewhere, "x"), H100)), "the critic has GPUs of its own"


def test_the_builtin_engine_keeps_its_weights_beside_the_ranks() -> None:
    run = config(placement={"colocate": "all"}, trainer={"ranks": 4}, token_budget=2048)
    trained = {"policy": rank_memory(run.policy, 2048)}
    policy, weights = sum(trained["policy"].values()), 2 * SHAPE.parameters
    engine = engine_memory_parts(run, SHAPE)
    for room, severity in ((policy + weights * 1.01, "ok"), (policy + weights * 0.9, "error")):
        memory = ProcessMemory("cuda", int(room / (1 - memory_fit.RESERVE)))
        (found,) = memory_fit._judge_set_memory(run, trained, {}, memory, engine)
        assert found.severity == severity and f"{weights / 2**30:.1f} GiB that rollout keeps" in found.seen
    assert found.fix == "set rollout.engine.kind=vllm"
    vllm = config(placement={"colocate": "all"}, trainer={"ranks": 4}, rollout={"engine": {"kind": "vllm"}})
    assert list(memory_fit._judge_set_memory(vllm, trained, {}, memory, engine)) == []


def test_fewer_kept_forward_passes_and_ranks_without_them_are_suggested_as_configs_that_load() -> None:
    values: dict[str, Any] = {**BASE, "recipe": "ppo", "critic": {"kept_microbatches": 8}, "trainer": {"ranks": 8}}
    run = check_config(values, "x")
    critic = run.train_roles[1]
    states = sum(rank_memory(critic, 0).values())
    a_row = rank_memory(critic, run.token_budget)["activations"] // 8
    fix = memory_fit.settings_that_fit(run, critic, rank_memory, states + 2 * a_row)
    assert fix.startswith("set critic.kept_microbatches=1, or ")
    assert "critic.trainer.ranks=2 with critic.kept_microbatches=1" in fix
    assert not accepts_overrides(run, ["critic.trainer.ranks=2"])
    assert accepts_overrides(run, ["critic.trainer.ranks=2", "critic.kept_microbatches=1"])


def test_more_ranks_are_suggested_for_all_roles_of_a_set() -> None:
    values: dict[str, Any] = {"trainer": {"ranks": 1}, "placement": {"colocate": ["policy", "critic"]}}
    run = CriticConfig.model_validate(BASE | values | {"critic": {"ranks": 1}})
    assert "trainer.ranks=4 with critic.trainer.ranks=4" in by_id(judge(run, H100))["memory-policy"].fix


def test_too_little_memory_is_an_error_and_unknown_memory_is_unchecked() -> None:
    on_cpu = config(cluster={"device": "cpu"})
    assert by_id(judge(on_cpu, ProcessMemory("cpu", 32 << 30)))["memory"].severity == "error"
    assert by_id(judge(config(), ProcessMemory("cuda", 0)))["memory"].severity == "unchecked"


def test_builtin_engines_hold_the_configured_cache() -> None:
    engine = {"engine": {"cache_tokens": 1000}, "sampling": {"max_tokens": 64}}
    assert engine_memory_parts(config(rollout=engine), SHAPE)["keys and values"] == 1000 * SHAPE.kv_bytes(2)


def test_stages_of_a_step() -> None:
    run = config(trainer={"ranks": 8}, prompts_per_step=64, group_size=8)
    speed = step_durations.gpu_speed(H100.name)
    assert speed is not None and speed.flops == 989e12
    took = step_durations.step_durations(run, run.policy, SHAPE, speed)
    tokens = 64 * 8 * 2048
    assert took.train == pytest.approx(6 * SHAPE.active * tokens / 8 / (0.35 * 989e12), rel=0.1), "and attention"
    # One token for 256 sequences reads all weights once: 14 GB at half of 3.35 TB/s, and the keys and values.
    assert took.rollout > 2 * 1024 * 2 * SHAPE.active / (0.5 * 3.35e12)
    assert took.publish == pytest.approx(2 * SHAPE.parameters / 1e9)
    assert all(value > 0 for value in asdict(took).values())


@pytest.mark.parametrize(
    ("changes", "environment", "name"),
    [
        ({"trainer": {"ranks": 8, "collective_timeout_s": 5}}, {}, "trainer.collective_timeout_s"),
        ({"weights": {"receiver_limit_s": 0.01}}, {}, "weights.receiver_limit_s"),
        ({"cluster": {"stall_limit_s": 10}}, {}, "cluster.stall_limit_s"),
        ({}, {"VLLM_ENGINE_READY_TIMEOUT_S": "5"}, "VLLM_ENGINE_READY_TIMEOUT_S"),
        ({}, {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1"}, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    ],
)
def test_time_outs_shorter_than_what_they_bound(changes: Any, environment: dict[str, str], name: str) -> None:
    found = [
        each
        for each in step_durations.judge_durations(config(**changes), SHAPES, H100.name, environment)
        if "timeout" in each.id
    ]
    assert found and all(name in each.seen and each.severity == "error" for each in found)


def test_defaults_and_long_time_outs_are_left_alone() -> None:
    for changes in ({}, {"trainer": {"ranks": 8, "collective_timeout_s": 7200}}):
        found = step_durations.judge_durations(
            config(**changes), SHAPES, H100.name, {"VLLM_ENGINE_READY_TIMEOUT_S": "3600"}
        )
        assert not [each for each in found if each.id == "timeout-short"]


def test_a_gpu_whose_speed_is_not_known_gives_no_numbers() -> None:
    run = config(trainer={"ranks": 2, "collective_timeout_s": 5})
    *_, last = step_durations.judge_durations(run, SHAPES, "NVIDIA Something", {})
    assert last.severity == "unchecked" and "trainer.collective_timeout_s=5 s" in last.seen


def test_the_largest_collective_is_named() -> None:
    found = by_id(step_durations.judge_durations(config(trainer={"ranks": 2}), SHAPES, "", {}))["largest-collective"]
    assert "embedding, head and last norm" in found.seen and f"{2 * SHAPE.largest_unit / 2**20:,.1f} MiB" in found.seen


def test_the_training_of_every_role_has_its_time_and_its_timeout() -> None:
    critic = {"ranks": 4, "collective_timeout_s": 5}
    run = CriticConfig.model_validate(BASE | {"trainer": {"ranks": 8}, "critic": critic})
    found = step_durations.judge_durations(run, {"policy": SHAPE, "critic": SHAPE}, H100.name, {})
    assert "train of the critic" in by_id(found)["durations"].seen
    short = [each for each in found if each.id == "timeout-short"]
    assert short and all("critic.trainer.collective_timeout_s is 5 s" in each.seen for each in short)
    largest = [each.seen for each in found if each.id == "largest-collective"]
    assert [name for name in ("policy", "critic") for each in largest if f"of the {name}" in each] == [
        "policy",
        "critic",
    ]
