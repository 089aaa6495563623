"""Rules of OpenRLHF's scripts that alternate between `batch_inference` and a training: iterative DPO (`--post_processor
iter_dpo`) and rejection sampling (`rs`). A round becomes a step."""

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.errors import NotConvertible
from lockstep.convert.inference_stages import GENERATE, SCORE, stage_option
from lockstep.convert.openrlhf.openrlhf_rollouts import set_openrlhf_schedule, set_prompt_text

_TRAINED_ON = {"iter_dpo": ("train_dpo", "online_dpo"), "rs": ("train_sft", "rejection_sampling")}
"""For each choice of completions: the program that learns from them, and the recipe."""
_WRITTEN = (
    "data.prompt_dataset", "data.prompt_probs", "data.prompt_split", "data.input_key", "data.output_key",
    "data.prompt_key", "data.chosen_key", "data.rejected_key", "data.apply_chat_template", "data.input_template",
    "data.max_samples",
)  # fmt: skip
"""Options of the training about the file that the round wrote."""


def convert_rounds(conv: Conversion) -> str:
    """Sets the fields of a script of rounds, after those of the training's model; returns the recipe."""
    choice, program = conv.text(_score("post_processor")) or "", conv.source.program.rpartition(".")[2]
    expected, recipe = _TRAINED_ON[choice]
    if program != expected:
        raise NotConvertible(f"--post_processor {choice} chooses completions for {expected}, not for {program}")
    conv.note("a round becomes a step, and a value that changes from round to round is that of the first")
    _set_prompts(conv)
    fields.set_launcher_ranks(conv)
    conv.put("placement.colocate", "all", default=True, keep=True)  # the programs of a round use the same GPUs in turns
    _set_lengths(conv)
    _set_batches(conv)
    _set_engine(conv)
    _set_reward(conv)
    if recipe == "rejection_sampling":
        conv.put("best_k", 1, _score("post_processor"), keep=True)
    conv.drop(_score("post_processor"), "the recipe takes the best and the worst completion of each prompt")
    for name in _WRITTEN:
        conv.drop(name, "the chosen completions are not written to a file")
    return recipe


def _generate(name: str) -> str:
    return stage_option(GENERATE, name)


def _score(name: str) -> str:
    return stage_option(SCORE, name)


def _set_prompts(conv: Conversion) -> None:
    fields.set_data(conv, _generate("dataset"), _generate("dataset_probs"))
    conv.put("data.prompt_column", conv.text(_generate("input_key")) or "input", _generate("input_key"), keep=True)
    set_prompt_text(conv, _generate("apply_chat_template"), _generate("input_template"))
    if conv.has(_generate("max_samples")):
        conv.put("data.limit", conv.count(_generate("max_samples"), 1), _generate("max_samples"))
    conv.put("data.overlong", "drop", default=True)


def _set_lengths(conv: Conversion) -> None:
    completion = conv.count(_generate("max_new_tokens"), 1024)
    conv.put("rollout.sampling.max_tokens", completion, _generate("max_new_tokens"), keep=True)
    longest, names = conv.count("data.max_len", 2048), ["data.max_len"]
    if longest <= completion:
        longest = conv.count(_generate("prompt_max_len"), 1024) + completion
        names = [_generate("prompt_max_len"), _generate("max_new_tokens")]
    conv.put("model.max_length", longest, *names)
    pairs = 2 if conv.source.program.endswith("train_dpo") else 1
    micro = conv.count("train.micro_batch_size", 1) * longest * pairs
    fields.set_rows(conv, micro, longest, "train.micro_batch_size", *names[:1])


def _set_batches(conv: Conversion) -> None:
    prompts, best_of = _generate("rollout_batch_size"), _generate("best_of_n")
    count, group = conv.count(prompts, 2048), conv.count(best_of, 1)
    if group < 2:
        conv.refuse(best_of, "a choice needs several completions of a prompt: 2 are written")
        group = 2
    conv.put("prompts_per_step", count, prompts, keep=True)
    conv.put("group_size", group, best_of, keep=True)
    passes = conv.count("train.max_epochs", 1)
    conv.put("epochs", passes, "train.max_epochs")
    size = conv.count("train.batch_size", 128) * group  # one pair or one completion of each prompt is learned
    updates = fields.divide_step(conv, count * group, group, size, "train.batch_size") * passes
    conv.put("steps", fields.PLACEHOLDER_STEPS, keep=True)
    conv.need("steps", f"the script's loop counts the rounds: set it to their number (now {fields.PLACEHOLDER_STEPS})")
    set_openrlhf_schedule(conv, updates * fields.PLACEHOLDER_STEPS)
    conv.note("the learning rate has one schedule for the whole run; in OpenRLHF each round begins it anew")


def _set_engine(conv: Conversion) -> None:
    task, parallel = _generate("eval_task"), _generate("tp_size")
    if conv.text(task) != "generate_vllm":
        conv.put("rollout.engine.kind", "builtin", task, keep=True)
        return
    width, ranks = conv.count(parallel, 1), int(conv.fields["trainer.ranks"].value)
    conv.put("rollout.engine.kind", "vllm", task, keep=True)
    conv.put("rollout.engine.tensor_parallel_size", width, parallel)
    conv.put("rollout.engine.count", max(1, ranks // width), default=True, keep=True)
    caching = _generate("enable_prefix_caching")
    conv.put("rollout.engine.enable_prefix_caching", conv.on(caching), caching)
    conv.put("rollout.engine.max_num_seqs", conv.integer(_generate("max_num_seqs")), _generate("max_num_seqs"))


def _set_reward(conv: Conversion) -> None:
    name = _score("pretrain")
    if conv.has(name):
        ranks = int(conv.fields["trainer.ranks"].value)
        fields.add_term(conv, {"kind": "model", "path": conv.text(name), "ranks": ranks}, name)
    else:
        fields.add_term(conv, {"kind": "exact_match"})
        conv.need("reward.terms", "the source names no known reward model: replace exact_match")
