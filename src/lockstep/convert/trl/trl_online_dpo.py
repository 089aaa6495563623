"""Rules of TRL's online DPO: pairs of sampled completions, their rewards and their loss."""

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.trl.trl_rollouts import BATCH, optimizer_batch, set_trl_engine, set_trl_rewards


def set_online_dpo(conv: Conversion, ranks: int) -> None:
    """Sets the fields of a run that learns from two completions per prompt, in one optimizer step each."""
    conv.put("prompts_per_step", optimizer_batch(conv, ranks), *BATCH, keep=True)
    conv.put("group_size", 2, default=True, keep=True)
    _set_lengths(conv)
    _set_loss(conv)
    set_trl_engine(conv, ranks)
    _set_rewards(conv)


def _set_lengths(conv: Conversion) -> None:
    completion, longest = conv.count("max_new_tokens", 64), conv.count("max_length", 512)
    conv.put("rollout.sampling.max_tokens", completion, "max_new_tokens", keep=True)
    if longest <= completion:  # TRL would cut the whole prompt off
        conv.refuse(
            "max_length", f"it leaves no room for a prompt beside {completion} new tokens: their sum is written"
        )
        conv.put("model.max_length", longest + completion, default=True, keep=True)
        longest += completion
    else:
        conv.put("model.max_length", longest, "max_length", keep=True)
    conv.put("data.overlong", "drop", "max_length", default=True)
    conv.note("prompts that leave no room for a completion are dropped here; TRL cuts them on the left")
    fields.set_rows(conv, 2 * conv.count(BATCH[0], 8) * longest, longest, BATCH[0], "max_length")


def _set_loss(conv: Conversion) -> None:
    betas = conv.numbers("beta") or [0.1]
    conv.put("loss.beta", betas[0], "beta")
    if len(betas) > 1:
        conv.refuse("beta", f"there is one beta for the whole run: {betas[0]:g}, the first of the epochs'")
    kind = conv.text("loss_type") or "sigmoid"
    conv.put("loss.type", [kind], "loss_type")
    if kind == "ipo":
        conv.refuse("loss_type", "IPO is of means per token here, of sums in TRL's online DPO: choose beta anew")


def _set_rewards(conv: Conversion) -> None:
    conv.refuse(
        "judge",
        "a judge that compares two completions is not here: a term of kind judge grades each with a language model",
    )
    penalty = conv.number("missing_eos_penalty")
    set_trl_rewards(conv, "reward_model_path")
    if penalty and penalty > 0:
        longest = int(conv.fields["rollout.sampling.max_tokens"].value)
        fields.add_length_penalty(conv, 1, longest, "missing_eos_penalty", "max_new_tokens")
