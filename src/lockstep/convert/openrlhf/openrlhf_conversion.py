"""Rules of OpenRLHF: what its options mean together. The table `tables/openrlhf.yaml` has all others."""

import math

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.openrlhf.openrlhf_rollouts import (
    convert_rollouts,
    known_rows,
    set_openrlhf_schedule,
    set_prompt_text,
)
from lockstep.convert.openrlhf.openrlhf_rounds import convert_rounds

_NO_LIMIT = 1_000_000
"""OpenRLHF's `max_samples` of this and more stands for all rows."""


def convert_openrlhf(conv: Conversion) -> str:
    """Sets the fields of a training of OpenRLHF; returns the recipe."""
    program = conv.source.program.rpartition(".")[2]
    _set_model(conv, exact=program in ("train_dpo", "train_rm"))
    if not conv.source.rounds:
        _set_data(conv)
    _set_tracking(conv)
    fields.set_every(conv, "checkpoint.every", "ckpt.save_steps")
    fields.set_kept(conv, "ckpt.max_num")
    if program == "train_ppo_ray":
        return convert_rollouts(conv)
    if conv.source.rounds:
        recipe = convert_rounds(conv)
        if recipe == "online_dpo":
            _set_preferences(conv)
        return recipe
    _set_batches(conv)
    if program == "train_sft":
        _set_sft(conv)
        return "sft"
    conv.put("data.overlong", "truncate", default=True)
    if program == "train_dpo":
        _set_preferences(conv)
        return "preference"
    _set_validation(conv)
    return "reward"


def _set_model(conv: Conversion, exact: bool) -> None:
    fields.set_name(conv, "ckpt.output_dir", "logger.wandb.run_name", f"openrlhf-{conv.source.program.split('_')[1]}")
    fields.set_model_path(conv, "actor.model_name_or_path")
    for name in ("ds.param_dtype", "bf16"):
        if conv.has(name) and not (name == "bf16" and not conv.on(name)):
            conv.put("model.dtype", "float16" if conv.text(name) == "fp16" else "bfloat16", name)
    stage = conv.integer("ds.zero_stage")
    conv.put("trainer.reshard_after_forward", stage == 3, "ds.zero_stage")
    others = {"lora_alpha": "ds.lora.alpha", "target_modules": "ds.lora.target_modules"}
    fields.set_adapter(conv, "ds.lora.rank", others, "ds.lora.dropout", exact)
    fields.set_quantization(conv, "ds.load_in_4bit")
    if conv.has("actor.aux_loss_coef"):
        conv.put("model.router_aux_loss", conv.number("actor.aux_loss_coef"), "actor.aux_loss_coef")


def _set_data(conv: Conversion) -> None:
    fields.set_data(conv, "data.prompt_dataset", "data.prompt_probs")
    limit = conv.integer("data.max_samples")
    if limit is not None and limit < _NO_LIMIT:
        conv.put("data.limit", limit, "data.max_samples")
    conv.drop("data.max_samples", "it is more than any dataset has")
    set_prompt_text(conv, "data.apply_chat_template", "data.input_template")


def _set_tracking(conv: Conversion) -> None:
    """Weights & Biases is on where a key is given; the key itself is written nowhere."""
    options = {"project": "logger.wandb.project", "entity": "logger.wandb.org", "group": "logger.wandb.group"}
    key = "logger.wandb.key"
    if conv.has(key):
        tracker = {"kind": "wandb"} | {field: value for field, name in options.items() if (value := conv.text(name))}
        conv.put("tracking", [tracker], key, *options.values(), keep=True)
        conv.note("export WANDB_API_KEY, or use `wandb login`: a key is never written into a config")
    else:
        for name in options.values():
            conv.drop(name, "Weights & Biases is off without a key")
    if conv.has("logger.tensorboard_dir"):
        conv.put("report.tensorboard", True, "logger.tensorboard_dir")


def _set_batches(conv: Conversion) -> None:
    """Batches of SFT, pairs and reward models: samples or pairs per optimizer step."""
    batch = conv.count("train.batch_size", 128)
    conv.put("batch_size", batch, "train.batch_size")
    longest = conv.integer("data.max_len")
    if longest is not None:
        conv.put("model.max_length", longest, "data.max_len")
        pairs = 1 if conv.source.program.endswith("train_sft") else 2
        micro = conv.count("train.micro_batch_size", 1) * longest * pairs
        fields.set_rows(conv, micro, longest, "train.micro_batch_size", "data.max_len")
    rows, epochs = known_rows(conv), conv.positive("train.max_epochs", 1)
    steps = None if rows is None else math.ceil(epochs * max(1, rows // batch))
    updates = fields.set_steps(conv, steps, "train.max_epochs", "train.batch_size")
    set_openrlhf_schedule(conv, updates)
    fields.set_launcher_ranks(conv)


def _set_sft(conv: Conversion) -> None:
    column, output = conv.text("data.input_key"), conv.text("data.output_key")
    conv.put("data.overlong", "drop", default=True)
    conv.note("samples longer than model.max_length are dropped here; OpenRLHF cuts their completions")
    if conv.on("model.pretrain_mode_enable"):
        conv.put("data.format", "text", "model.pretrain_mode_enable")
        conv.put("train_on_prompt", True, "model.pretrain_mode_enable")
        if column != "text":
            conv.refuse("data.input_key", "rename the column to `text`, or map it to a dataset with that column")
    elif output:
        conv.put("data.format", "prompt_completion", "data.output_key")
        conv.put("data.prompt_column", column, "data.input_key")
        if output != "completion":
            conv.refuse("data.output_key", f"rename the column {output[:40]!r} of the data to `completion`")
    elif conv.on("data.apply_chat_template"):
        turns = ["data.multiturn"] if conv.on("data.multiturn") else []
        conv.put("data.format", "messages", *turns, "data.input_key")
        conv.put("data.prompt_column", column, "data.input_key")
    else:
        conv.put("data.format", "text", "data.input_key", default=not conv.has("data.input_key"))
        if column != "text":
            conv.need("data.format", f"OpenRLHF trains on the column {column!r}: rename it to `text`")
    _set_validation(conv)


def _set_validation(conv: Conversion) -> None:
    if conv.has("eval.dataset"):
        conv.put("validation.data.path", conv.text("eval.dataset"), "eval.dataset")
        conv.put("validation.data.split", conv.text("eval.split"), "eval.split")
        fields.set_every(conv, "validation.every", "eval.steps")
        fields.repeat_data_fields(conv, "validation", "format", "prompt_column", "template", "chat", "overlong")
    for name in ("eval.split", "eval.steps"):
        conv.drop(name, "no data for evaluation is given")


def _set_preferences(conv: Conversion) -> None:
    kinds, weights = ["sigmoid"], []
    if conv.on("model.ipo_enable"):
        kinds = ["ipo"]
        conv.put("loss.type", kinds, "model.ipo_enable", keep=True)
        conv.refuse("model.ipo_enable", "IPO is of means per token here, of sums in OpenRLHF: choose beta anew")
    share = conv.number("model.nll_loss_coef")
    if share:
        kinds, weights = [*kinds, "sft"], [1.0, share]
        conv.put("loss.type", kinds, "model.nll_loss_coef", keep=True)
        conv.put("loss.weights", weights, "model.nll_loss_coef", keep=True)
    reference = conv.text("ref.model_name_or_path")
    if reference and reference != conv.text("actor.model_name_or_path"):
        conv.put("reference.path", reference, "ref.model_name_or_path")
    conv.drop("ref.model_name_or_path", "the reference is the model as it was loaded")
    for name in ("eval.dataset", "eval.split", "eval.steps"):
        if conv.has("eval.dataset"):
            conv.refuse(name, "this recipe has no held-out pairs: compare models with `lockstep eval`")
        conv.drop(name, "no data for evaluation is given")
