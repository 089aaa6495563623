"""Rules of verl's supervised fine-tuning: the trainer of older versions (`fsdp_sft_trainer`) and the one of newer ones
(`sft_trainer`)."""

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.verl.verl_fields import (
    set_verl_limit,
    set_verl_model,
    set_verl_replicas,
    set_verl_steps,
    set_verl_tracking,
)

_RATIO, _WARMUP = "optim.lr_warmup_steps_ratio", "optim.lr_warmup_steps"
_VAL, _VAL_LIMIT = "data.val_files", "data.val_max_samples"


def convert_verl_sft(conv: Conversion) -> str:
    """Sets the fields of a supervised fine-tuning; returns the recipe."""
    older = conv.source.program.endswith("fsdp_sft_trainer")
    set_verl_model(conv, "model", "engine.dtype")
    _set_data(conv, older)
    _set_ranks(conv)
    _set_lengths(conv)
    per_epoch = _set_steps(conv, older)
    set_verl_tracking(conv, "trainer.max_ckpt_to_keep")
    _set_events(conv, "checkpoint.every", "trainer.save_freq", per_epoch)
    _set_validation(conv, per_epoch)
    return "sft"


def _set_data(conv: Conversion, older: bool) -> None:
    fields.set_data(conv, "data.train_files")
    set_verl_limit(conv)
    if not older or conv.on("data.multiturn.enable"):
        used = ["data.multiturn.enable"] if older else []
        conv.put("data.format", "messages", "data.messages_key", *used, keep=True)
        conv.put("data.prompt_column", conv.text("data.messages_key") or "messages", "data.messages_key")
    else:
        _set_columns(conv)
    cut = conv.text("data.truncation") or "error"
    conv.put("data.overlong", "error" if cut == "error" else "drop", "data.truncation", keep=True)
    if cut != "error":
        conv.refuse("data.truncation", f"samples are never cut ({cut[:20]}): longer ones are dropped")


def _set_columns(conv: Conversion) -> None:
    """Columns of prompt and response: the prompt is a user's message, and the response alone is learned."""
    prompt, response = "data.prompt_key", "data.response_key"
    nested = [each for each in ("data.prompt_dict_keys", "data.response_dict_keys") if conv.has(each)]
    conv.put("data.chat", True, default=True, keep=True)
    if not nested:
        conv.put("data.format", "prompt_answer", prompt, response, keep=True)
        conv.put("data.prompt_column", conv.text(prompt), prompt, keep=True)
        conv.put("data.answer_column", conv.text(response), response, keep=True)
        return
    conv.put("data.format", "prompt_completion", *nested, keep=True)
    for name in (prompt, response, *nested):
        conv.refuse(name, "values inside a column are not read: write them as columns `prompt` and `completion`")


def _set_ranks(conv: Conversion) -> None:
    """The launcher's processes; verl's own options for them count where Ray starts the ranks."""
    sizes = ("trainer.nnodes", "trainer.n_gpus_per_node")
    known = conv.facts.ranks or conv.source.ranks
    if conv.source.program.endswith("_ray"):
        fields.set_ranks(conv, conv.count(sizes[0], 1), conv.count(sizes[1], 1), *sizes)
    elif known is None and conv.has(sizes[1]):
        conv.put("trainer.ranks", conv.count(sizes[0], 1) * conv.count(sizes[1], 1), *sizes, keep=True)
    else:
        fields.set_launcher_ranks(conv)
    for name in sizes:
        conv.drop(name, "the launcher's number of processes counts, as in verl")
    set_verl_replicas(conv, int(conv.fields["trainer.ranks"].value), "engine.fsdp_size")


def _set_lengths(conv: Conversion) -> None:
    longest, micro = conv.count("data.max_length", 1024), "data.micro_batch_size_per_gpu"
    conv.put("model.max_length", longest, "data.max_length")
    if conv.on("data.use_dynamic_bsz"):
        name = "data.max_token_len_per_gpu"
        fields.set_rows(conv, conv.integer(name), longest, name, "data.use_dynamic_bsz")
        conv.drop(micro, "rows are filled with tokens")
    elif conv.has("data.micro_batch_size"):
        size = max(1, conv.count("data.micro_batch_size", 1) // int(conv.fields["trainer.ranks"].value))
        fields.set_rows(conv, size * longest, longest, "data.micro_batch_size", "data.max_length")
    else:
        fields.set_rows(conv, conv.count(micro, 4) * longest, longest, micro, "data.max_length")
    conv.drop("data.max_token_len_per_gpu", "micro-batches are counted in samples")


def _set_steps(conv: Conversion, older: bool) -> int | None:
    """Sets batch, steps and schedule; returns the steps of an epoch if they are known."""
    batch = conv.count("data.train_batch_size", 256)
    conv.put("batch_size", batch, "data.train_batch_size")
    steps, per_epoch = set_verl_steps(conv, batch, epochs=4)
    warmup = [_RATIO] if older else [_WARMUP, _RATIO]
    kind = "optim.lr_scheduler" if older else "optim.lr_scheduler_type"
    minimum = "" if older else "optim.min_lr_ratio"
    fields.set_schedule(conv, kind, steps, warmup, minimum, "cosine" if older else "constant")
    fields.set_lowest_rate(conv, "optim.min_lr", "optim.lr")
    return per_epoch


def _set_events(conv: Conversion, key: str, name: str, per_epoch: int | None) -> None:
    """Sets the steps between two events, which newer versions may count in epochs."""
    if conv.text(name) != "after_each_epoch":
        fields.set_every(conv, key, name, keep=True)
        return
    conv.put(key, per_epoch or 0, name, keep=True)
    if per_epoch is None:
        conv.refuse(name, "steps of an epoch follow from the number of rows: give --rows N")


def _set_validation(conv: Conversion, per_epoch: int | None) -> None:
    if not conv.has(_VAL):
        for name in ("trainer.test_freq", _VAL_LIMIT):
            conv.drop(name, "no data for validation is given")
        return
    files = conv.items(_VAL)
    conv.put("validation.data.path", files[0], _VAL)
    if len(files) > 1:
        conv.refuse(_VAL, "a validation has one dataset: put the files into one folder, and name it")
    keys = ("format", "prompt_column", "answer_column", "chat", "overlong")
    fields.repeat_data_fields(conv, "validation", *keys)
    _set_events(conv, "validation.every", "trainer.test_freq", per_epoch)
    limit = conv.integer(_VAL_LIMIT) or -1
    if limit > 0:
        conv.put("validation.samples", limit, _VAL_LIMIT)
    conv.drop(_VAL_LIMIT, "all rows are used")
