"""verl's supervised fine-tuning, of both trainers, becomes `recipe: sft`."""

from pathlib import Path

import pytest
from converted_fields import left, values

from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert

OLDER = "torchrun --standalone --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=d.parquet"
OLDER += " model.partial_pretrain=m trainer.experiment_name=e trainer.logger=console"
NEWER = "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer data.train_files=d.parquet model.path=m"
NEWER += " trainer.experiment_name=e trainer.logger=console"


def converted(command: str, rows: int | None = 7473) -> ConvertedConfig:
    return convert("verl", [command], ConversionFacts(rows))


def test_the_older_trainer() -> None:
    options = "data.prompt_key=q data.response_key=a data.val_files=v.parquet trainer.total_epochs=3"
    config = converted(f"{OLDER} {options} data.micro_batch_size_per_gpu=8")
    assert config.complete and config.recipe == "sft"
    expected = {
        "name": "e",
        "seed": 1,
        "steps": 87,  # 3 epochs of 7,473 // 256
        "batch_size": 256,
        "token_budget": 8 * 1024,
        "trainer.ranks": 4,
        "trainer.schedule": {"kind": "cosine", "warmup_steps": 9},
        "trainer.optimizer": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.01},
        "data": {"path": "d.parquet", "format": "prompt_answer", "prompt_column": "q", "answer_column": "a",
                 "chat": True, "overlong": "error"},
        "validation.data.path": "v.parquet",
        "validation.data.answer_column": "a",
        "train_on_prompt": None,  # the response alone is learned
        "tracking": None,
    }  # fmt: skip
    assert values(config, *expected) == expected


def test_the_newer_trainer() -> None:
    options = "data.train_batch_size=64 data.max_length=2048 data.max_token_len_per_gpu=4096 optim.lr=2e-5"
    options += " optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1 optim.lr_warmup_steps=10 data.messages_key=talk"
    options += " trainer.save_freq=after_each_epoch engine=fsdp engine.strategy=fsdp2 engine.fsdp_size=2"
    config = converted(f"{NEWER} {options}")
    assert config.complete
    expected = {
        "steps": 464,  # 4 epochs of 7,473 // 64
        "checkpoint.every": 116,
        "token_budget": 4096,
        "trainer.replicas": 2,
        "trainer.schedule": {"kind": "cosine", "final": 0.1, "warmup_steps": 10},
        "data.format": "messages",
        "data.prompt_column": "talk",
        "model.dtype": None,
    }
    assert values(config, *expected) == expected


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ("data.truncation=right", {"data.truncation"}),
        ("ulysses_sequence_parallel_size=2 use_remove_padding=true", {"ulysses_sequence_parallel_size"}),
        ("model.fsdp_config.cpu_offload=True", {"model.fsdp_config.cpu_offload"}),
        ("optim.lr_scheduler=wsd", {"optim.lr_scheduler"}),
        ("data.multiturn.enable=true data.multiturn.messages_key=messages", set()),
        ("data.multiturn.enable=true data.multiturn.tools_key=functions", {"data.multiturn.tools_key"}),
        ("data.custom_cls.path=x.py data.custom_cls.name=X", {"data.custom_cls.path", "data.custom_cls.name"}),
        (
            "data.prompt_key=extra_info +data.prompt_dict_keys=['question']",
            {"data.prompt_key", "data.prompt_dict_keys"},
        ),
        ("model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear", set()),
        ("data.micro_batch_size=8 model.strategy=fsdp", set()),
        ("optim.warmup_steps_ratio=0.05 trainer.default_hdfs_dir=null", set()),
        ("data.no_such=1", {"data.no_such"}),
    ],
)
def test_what_the_older_trainer_has_alone_is_listed(options: str, listed: set[str]) -> None:
    config = converted(f"{OLDER} {options}")
    assert left(config) == listed and config.recipe == "sft"


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        (
            "engine=megatron optim=megatron engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2",
            set(),
        ),
        ("engine.context_parallel_size=2 engine=megatron", {"engine.context_parallel_size"}),
        ("engine.ulysses_sequence_parallel_size=2", {"engine.ulysses_sequence_parallel_size"}),
        ("engine.param_offload=True", {"engine.param_offload"}),
        ("data.pad_mode=no_padding data.truncation=error model.use_remove_padding=true", set()),
        ("checkpoint.save_contents=[model,optimizer,extra,hf_model] trainer.resume_mode=disable", set()),
        ("model.lora.rank=8", set()),
        ("optim.lr_decay_style=cosine optim.min_lr=1e-6 optim.lr_warmup_init=0", set()),
    ],
)
def test_what_the_newer_trainer_has_alone_is_listed(options: str, listed: set[str]) -> None:
    assert left(converted(f"{NEWER} {options}")) == listed


@pytest.mark.parametrize(
    ("command", "ranks", "missing"),
    [
        (OLDER, 4, False),
        (OLDER.replace("--nproc_per_node=4", "--nproc_per_node=$N"), 1, True),
        (f"{OLDER.replace('--nproc_per_node=4', '')} trainer.nnodes=2 trainer.n_gpus_per_node=8", 16, False),
        (f"{OLDER} trainer.nnodes=2 trainer.n_gpus_per_node=8", 4, False),  # the launcher counts
        ("python -m verl.trainer.sft_trainer_ray data.train_files=d model.path=m trainer.n_gpus_per_node=8", 8, False),
    ],
)  # fmt: skip
def test_the_ranks_are_those_of_the_launcher(command: str, ranks: int, missing: bool) -> None:
    config = converted(command)
    assert values(config, "trainer.ranks")["trainer.ranks"] == ranks
    assert ("trainer.ranks" in config.missing) == missing
    assert (values(config, "cluster.kind")["cluster.kind"] == "ray") == ("sft_trainer_ray" in command)


def test_a_file_and_a_path_of_the_trainer_are_known(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "data: {train_files: d.parquet, train_batch_size: 8}\nmodel: {partial_pretrain: m}\noptim: {lr: 1e-5}\n"
        "trainer: {total_epochs: 1, experiment_name: e, n_gpus_per_node: 2}\n"
    )
    config = converted(str(path))
    assert config.recipe == "sft" and values(config, "trainer.ranks", "batch_size") == {
        "trainer.ranks": 2, "batch_size": 8,
    }  # fmt: skip
    launched = OLDER.replace("-m verl.trainer.fsdp_sft_trainer", "verl/trainer/fsdp_sft_trainer.py")
    assert converted(launched).recipe == "sft"
    assert "steps" in converted(OLDER, rows=None).missing
