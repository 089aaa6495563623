"""Rules of TRL: what its options mean together. The table `tables/trl.yaml` has all others."""

import math
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.trl.trl_online_dpo import set_online_dpo
from lockstep.convert.trl.trl_rollouts import optimizer_batch, set_trl_rollouts

_RECIPES = {
    "sft": "sft", "dpo": "preference", "kto": "preference", "reward": "reward", "grpo": "grpo", "rloo": "grpo",
    "online_dpo": "online_dpo",
}  # fmt: skip


def convert_trl(conv: Conversion) -> str:
    """Sets the fields of a training of TRL; returns the recipe."""
    program = conv.source.program
    recipe = _RECIPES[program]
    if conv.source.own_script:
        conv.note("the script itself is not read: what it sets in code (rewards, data, adapters) is not converted")
    fields.set_name(conv, "output_dir", "run_name", f"trl-{program}")
    set_trl_model(conv, exact=recipe in ("preference", "reward", "online_dpo"))
    _set_data(conv)
    ranks = set_trl_ranks(conv)
    updates = 1
    if recipe == "grpo":
        updates = set_trl_rollouts(conv, ranks)
    elif recipe == "online_dpo":
        set_online_dpo(conv, ranks)
    else:
        _set_batches(conv, ranks)
    steps, per_epoch = set_trl_steps(conv, ranks, updates)
    set_trl_optimizer(conv, steps * updates)
    set_trl_checkpoints(conv, per_epoch, updates)
    set_trl_tracking(conv)
    _set_held_out(conv, recipe, per_epoch, updates)
    if program == "sft":
        _set_sft(conv)
    elif recipe == "preference":
        _set_preferences(conv, program)
    return recipe


def set_trl_model(conv: Conversion, exact: bool) -> None:
    """Sets `model`, with its adapter.

    Args:
        exact: whether the recipe allows no dropout.
    """
    fields.set_model_path(conv, "model_name_or_path")
    _set_dtype(conv)
    if conv.has("chat_template_path"):
        path = conv.text("chat_template_path") or ""
        conv.put("model.chat_template", path, "chat_template_path")
        if PurePosixPath(path).suffix not in (".jinja", ".jinja2", ".j2"):
            conv.refuse("chat_template_path", "name a Jinja file in model.chat_template, not a tokenizer")
    if not conv.on("use_peft"):
        unused = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora")
        for name in ("use_peft", *unused, "use_dora"):
            conv.drop(name, "use_peft is off: all weights are trained")
    else:
        others = {"lora_alpha": "lora_alpha", "target_modules": "lora_target_modules", "use_rslora": "use_rslora"}
        fields.set_adapter(conv, "lora_r", others, "lora_dropout", exact)
        conv.put("model.adapter.r", conv.integer("lora_r"), "use_peft", "lora_r", keep=True)
        conv.put("model.adapter.use_rslora", conv.on("use_rslora"), "use_rslora")
        if conv.on("use_dora"):
            conv.put("model.adapter.kind", "dora", "use_dora")
        if saved := conv.items("lora_modules_to_save"):
            conv.put("model.adapter.modules_to_save", saved, "lora_modules_to_save")
    fields.set_quantization(conv, "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant")


def _set_dtype(conv: Conversion) -> None:
    kinds = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    for name, kind in (("bf16", "bfloat16"), ("fp16", "float16")):
        if conv.has(name) and conv.on(name):
            conv.put("model.dtype", kind, name)
    chosen = kinds.get(conv.text("dtype") or "")
    if conv.has("dtype") and chosen and "model.dtype" not in conv.fields:
        conv.put("model.dtype", chosen, "dtype")
    for name in ("dtype", "bf16", "fp16"):
        conv.drop(name, "master weights are float32; model.dtype is that of the computation")


def _set_data(conv: Conversion) -> None:
    sources = conv.raw("datasets")
    if isinstance(sources, list) and sources:
        mixture = [_mixture_source(conv, each) for each in sources if isinstance(each, dict)]
        if len(mixture) == 1:
            for key, value in mixture[0].items():
                conv.put(f"data.{key}", value, "datasets")
        elif mixture:
            for index, each in enumerate(mixture):
                each["label"] = f"data-{index + 1}"
            conv.put("data.mixture", mixture, "datasets")
        conv.drop("dataset_name", "`datasets` takes its place")
    else:
        fields.set_data(conv, "dataset_name", several=False)
    shuffled = conv.on("shuffle_dataset") if conv.has("shuffle_dataset") else True
    if conv.has("train_sampling_strategy") and conv.text("train_sampling_strategy") == "sequential":
        conv.put("data.shuffle", False, "train_sampling_strategy")
    elif conv.source.program in ("grpo", "rloo"):
        conv.put("data.shuffle", shuffled, "shuffle_dataset")
    conv.drop("shuffle_dataset", "rows are shuffled by the sampler, as in TRL")


def _mixture_source(conv: Conversion, entry: dict[str, Any]) -> dict[str, Any]:
    """A source of a mixture, from an entry of `datasets`."""
    files = entry.get("data_files")
    path = files if isinstance(files, str) else files[0] if isinstance(files, list) and files else entry.get("path")
    found: dict[str, Any] = {"path": str(path or "DATA")}
    for theirs, ours in (("name", "name"), ("split", "split")):
        if entry.get(theirs):
            found[ours] = str(entry[theirs])
    others = set(entry) - {"path", "name", "split", "data_files", "columns"}
    if others or (isinstance(files, list) and len(files) > 1):
        conv.need("data.mixture", "only path, name, split and one data file of each dataset are converted")
    return found


def set_trl_ranks(conv: Conversion) -> int:
    """Sets `trainer.ranks`; returns them."""
    ranks = conv.facts.ranks or conv.source.ranks
    if ranks is None:
        conv.need("trainer.ranks", "batch sizes are per process, and their number is not known: give --ranks N")
    written = ["num_processes"] if conv.integer("num_processes") == ranks and "num_processes" in conv.given else []
    conv.put("trainer.ranks", ranks or 1, *written, keep=True)
    for name in ("accelerate_config", "config_file"):
        if ranks is None:
            conv.refuse(name, "it is not read: give the num_processes of its file with --ranks N")
        conv.drop(name, "processes are known, and FSDP2 shards the model over them")
    return ranks or 1


def _set_batches(conv: Conversion, ranks: int) -> None:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    batch = optimizer_batch(conv, ranks)
    conv.put("batch_size", batch, *names, keep=True)
    longest = conv.integer("max_length")
    if conv.source.program == "sft" and conv.on("packing"):
        conv.need(
            "batch_size",
            f"with packing, TRL counts rows of max_length tokens, here {batch} of them per optimizer step: set it to "
            f"{batch} x max_length divided by the mean number of tokens of a sample",
        )
    pairs = 1 if conv.source.program in ("sft", "kto") else 2
    if longest is not None:
        conv.put("model.max_length", longest, "max_length")
        micro = conv.count(names[0], 8) * longest * pairs
        fields.set_rows(conv, micro, longest, names[0], "max_length")
        cuts = conv.source.program in ("dpo", "reward")
        conv.put("data.overlong", "truncate" if cuts else "drop", "max_length")
        if not cuts:
            conv.note("samples longer than model.max_length are dropped here; TRL cuts them")
    if conv.source.program == "reward":
        conv.note("TRL leaves pairs out that are longer than max_length; here their completions are cut")
    conv.drop("max_prompt_length", "only the whole sample has a limit")


def set_trl_steps(conv: Conversion, ranks: int, updates: int) -> tuple[int, int | None]:
    """Sets `steps`; returns them, and the optimizer steps of an epoch if they are known."""
    rows = conv.facts.rows
    per_epoch = None
    if rows is not None and conv.source.program in ("grpo", "rloo"):
        per_epoch = max(1, rows // int(conv.fields["prompts_per_step"].value)) * updates
    elif rows is not None:
        per_epoch = max(1, math.ceil(rows / optimizer_batch(conv, ranks)))
    total = conv.integer("max_steps")
    if total is not None and total > 0:
        steps = max(1, math.ceil(total / updates))
        conv.put("steps", steps, "max_steps", keep=True)
        conv.drop("num_train_epochs", "max_steps takes its place")
        return steps, per_epoch
    epochs = conv.positive("num_train_epochs", 3.0)
    steps_known = None if per_epoch is None else max(1, math.ceil(epochs * per_epoch / updates))
    if conv.source.program == "sft" and conv.on("packing"):
        conv.need(
            "steps",
            "with packing, TRL's epochs count rows of max_length tokens: give max_steps, or set it to epochs x samples "
            "/ batch_size",
        )
    steps = fields.set_steps(conv, steps_known, "num_train_epochs")
    conv.drop("max_steps", "num_train_epochs counts")
    return steps, per_epoch


def set_trl_optimizer(conv: Conversion, updates: int) -> None:
    """Sets the optimizer and its schedule over `updates` optimizer steps."""
    betas = [conv.number_or("adam_beta1", 0.9), conv.number_or("adam_beta2", 0.999)]
    names = [name for name in ("adam_beta1", "adam_beta2") if name in conv.given] or ["adam_beta1", "adam_beta2"]
    conv.put("trainer.optimizer.betas", betas, *names)
    fields.set_schedule(conv, "lr_scheduler_type", updates, ["warmup_steps", "warmup_ratio"], default="linear")
    details = conv.raw("lr_scheduler_kwargs")
    if isinstance(details, str):  # a command line has it as JSON
        with suppress(MalformedJson):
            details = parse_json(details, "lr_scheduler_kwargs")
    lowest = details.get("min_lr_rate") if isinstance(details, dict) else None
    if isinstance(lowest, int | float) and set(details) == {"min_lr_rate"}:
        conv.put("trainer.schedule.final", lowest, "lr_scheduler_kwargs")
    else:
        conv.refuse("lr_scheduler_kwargs", "only min_lr_rate is converted (trainer.schedule.final)")
    if conv.has("ddp_timeout"):
        conv.put("trainer.collective_timeout_s", conv.number("ddp_timeout"), "ddp_timeout")


def set_trl_checkpoints(conv: Conversion, per_epoch: int | None, updates: int) -> None:
    """Sets `checkpoint` from optimizer steps of an epoch, and of a step."""
    _set_events(conv, "checkpoint.every", "save_strategy", "save_steps", per_epoch, updates, "steps")
    fields.set_kept(conv, "save_total_limit")


def _set_events(
    conv: Conversion,
    key: str,
    strategy: str,
    every: str,
    per_epoch: int | None,
    updates: int,
    default: str,
    other: str = "",
) -> None:
    """Sets the steps between checkpoints or evaluations, by epochs or by optimizer steps, or none.

    Args:
        other: the option that counts where `every` is absent or 0.
    """
    chosen = (conv.text(strategy) or default).lower()
    if chosen == "epoch":
        if per_epoch is None:
            conv.put(key, 0, strategy, keep=True)
            conv.refuse(strategy, "steps of an epoch follow from the number of rows: give --rows N")
        else:
            conv.put(key, max(1, per_epoch // updates), strategy, keep=True)
        conv.drop(every, "it happens once per epoch")
    elif chosen in ("no", "best", "false"):
        conv.put(key, 0, strategy, keep=True)
        conv.drop(every, f"{strategy} is {chosen}")
    else:
        amount = conv.number_or(every, 0 if other else 500)
        names = [name for name in (every, strategy) if name in conv.given] or [every]
        if not amount and other:
            amount, names = conv.number_or(other, 500), [*names, other]
        if 0 < amount < 1:
            amount = math.ceil(amount * int(conv.fields["steps"].value) * updates)
        conv.put(key, max(1, round(amount / updates)) if amount > 0 else 0, *names, keep=True)


def set_trl_tracking(conv: Conversion) -> None:
    """Sets the trackers."""
    chosen = [each for each in conv.items("report_to") if each not in ("none", "tensorboard")]
    known = {"wandb": "project", "mlflow": "experiment"}
    trackers: list[dict[str, Any]] = []
    for each in known if chosen == ["all"] else [each for each in chosen if each in known]:
        project = {known[each]: conv.text("project")} if conv.has("project") else {}
        trackers.append({"kind": each, **project})
    if trackers:
        conv.put("tracking", trackers, "report_to", *(["project"] if conv.has("project") else []), keep=True)
    others = [each for each in chosen if each not in known and each != "all"]
    if others:
        conv.refuse("report_to", f"there is no tracker {', '.join(others)[:60]}: only wandb, mlflow and prometheus")
    conv.drop("report_to", "TensorBoard and JSON lines are always written")
    conv.drop("project", "no tracker needs it")


def _set_held_out(conv: Conversion, recipe: str, per_epoch: int | None, updates: int) -> None:
    """Held-out data: another split of the same dataset, or a share of it."""
    strategy = (conv.text("eval_strategy") or "no").lower()
    section = {"sft": "validation", "reward": "validation", "grpo": "evaluation", "online_dpo": "evaluation"}.get(
        recipe
    )
    if strategy in ("no", "false") or section is None:
        for name in ("eval_strategy", "eval_steps", "dataset_test_split", "test_split_size"):
            if section is None and strategy not in ("no", "false") and name.startswith("eval"):
                conv.refuse(name, "this recipe has no held-out data: compare models with `lockstep eval`")
            conv.drop(name, "there is no evaluation")
        return
    _set_events(conv, f"{section}.every", "eval_strategy", "eval_steps", per_epoch, updates, "no", "logging_steps")
    if section == "validation" and conv.has("test_split_size"):
        conv.put("validation.fraction", conv.number("test_split_size"), "test_split_size")
        conv.drop("dataset_test_split", "test_split_size takes its place")
        return
    path = conv.fields.get("data.path")
    if path is None:
        conv.need(f"{section}.data.path", "name the held-out data of the mixture")
    conv.put(f"{section}.data.path", path.value if path is not None else "DATA", "dataset_name", keep=True)
    conv.put(f"{section}.data.split", conv.text("dataset_test_split") or "test", "dataset_test_split", keep=True)
    if conv.has("dataset_config"):
        conv.put(f"{section}.data.name", conv.text("dataset_config"), "dataset_config")
    if (overlong := conv.fields.get("data.overlong")) is not None and section == "validation":
        conv.put("validation.data.overlong", overlong.value, "max_length", keep=True)
    conv.drop("test_split_size", "dataset_test_split names the data")


def _set_sft(conv: Conversion) -> None:
    """Which tokens are trained on: TRL's default depends on the columns of the data."""
    completions, assistant = "completion_only_loss", "assistant_only_loss"
    if conv.on(assistant):
        conv.put("train_on_prompt", False, assistant, keep=True)
        conv.drop(completions, "assistant_only_loss takes its place")
    elif conv.has(completions):
        conv.put("train_on_prompt", not conv.on(completions), completions, keep=True)
    else:
        conv.put("train_on_prompt", True, completions, keep=True)
        conv.need(
            "train_on_prompt",
            "TRL trains on all tokens of conversations and texts, but only on the completions of prompts: for the "
            "latter set it to false",
        )


def _set_preferences(conv: Conversion, program: str) -> None:
    kinds = conv.items("loss_type") or (["kto"] if program == "kto" else ["sigmoid"])
    conv.put("loss.type", kinds, "loss_type", keep=program == "kto")
    share = conv.number("rpo_alpha")
    if share and program == "dpo":
        conv.put("loss.type", [*kinds, "sft"], "loss_type", "rpo_alpha", keep=True)
        weights = conv.numbers("loss_weights") or [1.0] * len(kinds)
        conv.put("loss.weights", [*weights, share], "rpo_alpha", keep=True)
    for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        if conv.on("sync_ref_model"):
            conv.put(f"loss.{name}", conv.number(name) if "alpha" in name else conv.integer(name), name)
        conv.drop(name, "sync_ref_model is off")
