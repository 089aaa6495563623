"""What starts a training, and which files it reads."""

from pathlib import Path

import pytest
from converted_fields import left

from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import convert
from lockstep.convert.errors import NotConvertible
from lockstep.convert.source_command import read_source

SFT = "--model_name_or_path m --dataset_name d --max_steps 10 --completion_only_loss True"
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d"
VERL += " actor_rollout_ref.model.path=m custom_reward_function.path=r.py actor_rollout_ref.rollout.n=8"


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nproc_per_node 8", 8),
        ("torchrun --nnodes 2 --nproc_per_node 8", 16),
        ("torchrun --nnodes 2:2 --nproc_per_node 8", 16),
        ("torchrun --nnodes $SLURM_NNODES --nproc_per_node 8", None),
        ("torchrun --nnodes=2:4 --nproc-per-node=8", None),
        ("deepspeed --num_gpus 8", 8),
        ("deepspeed --hostfile hosts --num_gpus 8", None),
        ("deepspeed -H hosts --num_gpus 8", None),
        ("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8", 16),
        ("accelerate launch --num_machines $N --num_processes 16", 16),
    ],
)
def test_ranks_are_only_known_with_their_nodes(launcher: str, ranks: int | None) -> None:
    assert read_source("trl", [f"{launcher} trl/scripts/sft.py {SFT}"]).ranks == ranks


@pytest.mark.parametrize(
    ("flags", "listed"),
    [
        ("--config-name=ppo_trainer", set()),
        ("--config-path=./config --config-name=ppo_trainer", set()),
        ("--config-name=my_ppo_trainer", {"--config-name"}),
        ("--config-path=/opt/verl/verl/trainer/config --config-name ppo_trainer.yaml", set()),
        ("--config-path=/x --config-name=my_grpo", {"--config-path", "--config-name"}),
        ("-cp /x -cn my_grpo", {"--config-path", "--config-name"}),
        ("--config-dir $HERE", {"--config-dir"}),
    ],
)
def test_other_configs_of_hydra_are_listed(flags: str, listed: set[str]) -> None:
    config = convert("verl", [VERL.replace("main_ppo ", f"main_ppo {flags} ")], ConversionFacts(10_240))
    assert left(config) == listed and config.complete == (not listed)


@pytest.mark.parametrize(
    ("defaults", "listed"),
    [
        ("[ppo_trainer, _self_]", set()),
        ("[{actor@actor_rollout_ref.actor: dp_actor}, legacy_data@data, _self_]", set()),
        ("[my_base, _self_]", {"defaults"}),
        ("[{actor@actor_rollout_ref.actor: my_actor}, _self_]", {"defaults"}),
        ("my_base", {"defaults"}),
    ],
)
def test_other_defaults_of_hydra_are_listed(defaults: str, listed: set[str], tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        f"defaults: {defaults}\nalgorithm: {{adv_estimator: grpo}}\ndata: {{train_files: d}}\n"
        "actor_rollout_ref: {model: {path: m}, rollout: {n: 8}}\ncustom_reward_function: {path: r.py}\n"
    )
    config = convert("verl", [str(path)], ConversionFacts(10_240))
    assert left(config) == listed and config.complete == (not listed)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [("num_processes: 4", 4), ("num_processes: 4\nnum_machines: 2", 4), ("num_processes: 0", None), ("", None)],
)
def test_the_processes_of_a_file_of_trl_are_ranks(line: str, ranks: int | None, tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text(f"model_name_or_path: m\ndataset_name: d\nmax_steps: 10\n{line}\n")
    for given in (str(path), f"trl dpo --config {path}"):
        config = convert("trl", [given], ConversionFacts())
        assert config.values["trainer"]["ranks"] == (ranks or 1)
        assert config.complete == (ranks is not None)


def test_variables_of_a_file_of_trl_are_listed_without_their_values(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nmax_steps: 10\nenv: {MY_KEY: words-of-a-secret}\n")
    config = convert("trl", [str(path)], ConversionFacts(ranks=1))
    assert left(config) == {"env"} and "words-of-a-secret" not in f"{config.text}{config.outcomes}{config.values}"


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ("--accelerate_config zero3", {"--accelerate_config"}),
        ("--accelerate_config zero3 --num_processes 8", set()),
        ("--model_name_or_path", {"--model_name_or_path"}),
        ("--dataset_name --num_processes 8", {"--dataset_name"}),
        ("--gradient_checkpointing --num_processes 8", set()),
    ],
)
def test_no_option_of_a_command_is_swallowed(options: str, listed: set[str]) -> None:
    config = convert("trl", [f"trl sft {SFT} {options}"], ConversionFacts())
    assert left(config) == listed


def test_a_config_is_looked_for_in_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts, work = tmp_path / "scripts", tmp_path / "work"
    for folder in (scripts, work):
        folder.mkdir()
    monkeypatch.chdir(work)
    script = scripts / "run.sh"
    script.write_text("trl dpo --config dpo.yaml --max_steps 10 --num_processes 1\n")
    with pytest.raises(NotConvertible) as caught:
        convert("trl", [str(script)], ConversionFacts())
    assert str(scripts / "dpo.yaml") in str(caught.value) and str(work / "dpo.yaml") in str(caught.value)
    for folder in (scripts, work):  # TRL looks in the working directory
        (folder / "dpo.yaml").write_text(f"model_name_or_path: {folder.name}\ndataset_name: d\n")
        assert convert("trl", [str(script)], ConversionFacts()).values["model"]["path"] == folder.name


def test_the_server_of_trl_gives_the_engines_their_size() -> None:
    server = "CUDA_VISIBLE_DEVICES=0,1,2,3 trl vllm-serve --model m --tensor-parallel-size 2 --data-parallel-size 2"
    train = "trl grpo --model_name_or_path m --dataset_name d --max_steps 10 --num_processes 4 --use_vllm"
    train += " --vllm_mode server --reward_funcs accuracy_reward --num_generations 4"
    command = f"{server} --gpu_memory_utilization 0.8 --kv_cache_dtype fp8 &\n{train}"
    config = convert("trl", [command], ConversionFacts())
    engine = config.values["rollout"]["engine"]
    assert engine == {"kind": "vllm", "count": 2, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.8}
    assert left(config) == {"vllm-serve --kv_cache_dtype"}
    alone = convert("trl", [train], ConversionFacts()).values["rollout"]["engine"]
    assert alone["count"] == 1


def test_a_training_without_any_option_is_refused() -> None:
    with pytest.raises(NotConvertible, match=r"main_ppo is given no option"):
        convert("verl", ["python3 -m verl.trainer.main_ppo"], ConversionFacts())


def test_one_unknown_variable_of_ray_leaves_the_others() -> None:
    variables = """{\\"env_vars\\": {\\"JUDGE\\": \\"$JUDGE\\", \\"NCCL_DEBUG\\": \\"INFO\\"}}"""
    command = f'ray job submit --runtime-env-json "{variables}" -- {VERL}'
    cluster = convert("verl", [command], ConversionFacts(10_240)).values["cluster"]
    assert cluster["env"] == {"NCCL_DEBUG": "INFO"} and cluster["forward_env"][-1] == "JUDGE"


@pytest.mark.parametrize(
    ("before", "listed"),
    [
        ('if [ "$BIG" = 1 ]; then LR=1e-3; else LR=1e-6; fi', {"--learning_rate"}),
        ('LR=1e-6; [ -n "$BIG" ] && LR=1e-3', {"--learning_rate"}),
        ("case $SIZE in 1b) LR=1e-3;; *) LR=1e-6;; esac", {"--learning_rate"}),
        ("LR=1e-6; [ -n $BIG ] && LR=1e-3; LR=2e-6", set()),
        ("LR=1e-6; if [ -n $BIG ]; then LR=1e-6; fi", set()),
        ('if [ -z "$LR" ]; then LR=1e-6; fi', set()),
        ("LR=1e-6; MORE=(--seed 3); if [ -n $BIG ]; then MORE+=(--use_peft); fi", {"a word"}),
        ("LR=1e-6; MORE='--seed 3'; if [ -n $BIG ]; then MORE=\"$MORE --use_peft\"; fi", {"a word"}),
    ],
)
def test_what_a_condition_decides_is_not_known(before: str, listed: set[str]) -> None:
    launch = f"trl sft {SFT} --num_processes 1 --learning_rate $LR ${{MORE[@]}}"
    launch = launch if "MORE" in before else launch.replace(" ${MORE[@]}", "")
    config = convert("trl", [f"{before}\n{launch}"], ConversionFacts())
    assert left(config) == listed
    assert "--seed 3" not in before or config.values["seed"] == 3
