"""The model card of an exported model: the README.md that the Hugging Face hub shows."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from lockstep.base.secrets import HIDDEN, redact
from lockstep.base.text import count_noun
from lockstep.ledger import EvaluationRow, Ledger
from lockstep.report.run_summary import committed_rows, package_versions, parent_of, stage_seconds, total_tokens

CARD_FILE = "README.md"
METHOD_PAPERS = {
    "grpo": ("GRPO", "2402.03300"),
    "dr_grpo": ("Dr. GRPO", "2503.20783"),
    "rloo": ("RLOO", "2402.14740"),
    "reinforce_plus_plus": ("REINFORCE++", "2501.03262"),
    "reinforce_plus_plus_baseline": ("REINFORCE++", "2501.03262"),
    "gae": ("GAE", "1506.02438"),
    "ppo_clip": ("PPO", "1707.06347"),
    "gspo": ("GSPO", "2507.18071"),
    "cispo": ("CISPO", "2506.13585"),
    "sigmoid": ("DPO", "2305.18290"),
    "hinge": ("SLiC", "2305.10425"),
    "ipo": ("IPO", "2310.12036"),
    "exo_pair": ("EXO", "2402.00856"),
    "sppo_hard": ("SPPO", "2405.00675"),
    "apo_zero": ("APO", "2408.06266"),
    "apo_down": ("APO", "2408.06266"),
    "apo_zero_unpaired": ("APO", "2408.06266"),
    "discopop": ("DiscoPOP", "2406.08414"),
    "cpo": ("CPO", "2401.08417"),
    "simpo": ("SimPO", "2405.14734"),
    "alphapo": ("AlphaPO", "2501.03884"),
    "orpo": ("ORPO", "2403.07691"),
    "kto": ("KTO", "2402.01306"),
    "bradley_terry": ("InstructGPT", "2203.02155"),
}
"""The papers of advantages, policy losses and losses of preferences: the short name, and the number on arXiv."""
_RECIPE_PAPERS = {"online_dpo": ("Online DPO", "2402.04792"), "rejection_sampling": ("RAFT", "2304.06767")}
_SHOWN_FIELDS = (
    "recipe", "seed", "steps", "model", "data", "batch_size", "prompts_per_step", "group_size", "epochs",
    "minibatch_size", "best_k", "min_reward", "mask_truncated", "advantage", "filter_groups", "loss", "critic",
    "reward",
    "reward_clip", "normalize_reward", "kl_controller", "bootstrap_truncated", "trainer", "evaluation", "validation",
)  # fmt: skip
"""The fields of a config that say how the model was trained. The others name hosts, folders and servers."""
_ADAPTER_FILE, _TEMPLATE_FILE = "adapter_config.json", "chat_template.jinja"
_MAX_METRICS = 20
_SAMPLES = {
    "sft": "documents per step", "preference": "pairs or labelled completions per step", "reward": "pairs per step",
}  # fmt: skip
_METHODS = {
    "reward": "reward modelling", "online_dpo": "online DPO", "rejection_sampling": "rejection sampling",
}  # fmt: skip
"""The names of methods that are neither the recipe's in capitals nor that of a paper."""
_SHOWN_OF_REWARDS = {"kind", "weight", "name", "path", "pattern", "signature"}
"""The fields of a reward's term that are shown; others may name servers, and arguments may be anything."""
_PATH_FIELDS = {"path", "tokenizer", "chat_template"}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(ledger: Ledger, folder: Path, steps: int, repository: str = "") -> str:
    """Returns the card of a run's exported model or adapter: metadata, how to load it, how it was trained, its last
    evaluation. Secrets are hidden, local paths shortened to their last part, and no host is named.

    Args:
        folder: the export.
        steps: the number of steps after which it was taken.
        repository: the name on the hub; that of the run when absent.
    """
    stored = ledger.config()
    shown = {name: stored[name] for name in _SHOWN_FIELDS if stored.get(name) is not None}
    if "reward" in shown:
        terms = shown["reward"].get("terms") or ()
        shown["reward"] = {"terms": [{k: v for k, v in term.items() if k in _SHOWN_OF_REWARDS} for term in terms]}
    config = redact(_without_folders(shown))
    name = repository or str(stored.get("name", ledger.folder.name))
    before, after = _evaluations(ledger, steps)
    adapter, versions, text = (folder / _ADAPTER_FILE).is_file(), package_versions(), _yaml(config)
    base = _base_model(stored)
    card: str = _template().render(
        metadata=_metadata(stored, name.rpartition("/")[2], after, adapter),
        title=name.rpartition("/")[2],
        repository=name,
        adapter=adapter,
        chat=(folder / _TEMPLATE_FILE).is_file(),
        scores=_has_scores(stored),
        base=f"[{base}](https://huggingface.co/{base})" if base else f"`{config['model']['path']}`",
        steps=count_noun(steps, "step"),
        method=_method(stored),
        parent=_parent(ledger),
        max_tokens=stored.get("rollout", {}).get("sampling", {}).get("max_tokens") or 256,
        facts=_facts(ledger, config, steps),
        papers=_papers(stored),
        evaluation=_evaluation_table(before, after) if after is not None else None,
        config=text,
        fence="`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0)),
        versions=versions,
    )  # fmt: skip
    return card


def _has_scores(config: Mapping[str, Any]) -> bool:
    """Whether the model gives scores instead of texts."""
    return bool((config.get("model") or {}).get("head") == "score")


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("lockstep.report"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("model_card.md.j2")


def _metadata(config: Mapping[str, Any], title: str, after: EvaluationRow | None, adapter: bool) -> str:
    """The card's metadata in YAML, with the hub's names; what is unknown is left out."""
    from huggingface_hub import EvalResult, ModelCardData

    dataset, task = _evaluation_dataset(config), "text-classification" if _has_scores(config) else "text-generation"
    results = [
        EvalResult(task, dataset, Path(dataset).name, metric.removeprefix("eval/"), value)
        for metric, value in (_shown_metrics(after) if after is not None else {}).items()
    ]
    data = ModelCardData(
        base_model=_base_model(config) or None,
        datasets=list(dict.fromkeys(filter(_is_hub_name, _paths(config.get("data"))))) or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task,
        tags=["lockstep", str(config.get("recipe")), *(f"arxiv:{number}" for _, number in _papers(config))],
        model_name=title if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml()).strip()


def _facts(ledger: Ledger, config: Mapping[str, Any], steps: int) -> list[tuple[str, str]]:
    """Facts of the training up to a step, as rows of a table."""
    totals = ledger.metric_totals(min(steps, ledger.steps_done()))
    trainer = config.get("trainer", {})
    group, prompts = config.get("group_size"), config.get("prompts_per_step")
    facts = {
        "steps": f"{steps:,}",
        "completions per step": f"{prompts * group:,} ({prompts:,} prompts, {group} each)" if prompts and group else "",
        _SAMPLES.get(str(config.get("recipe")), "samples per step"): (
            f"{config['batch_size']:,}" if config.get("batch_size") else ""
        ),
        "tokens": f"{total_tokens(ledger, steps, totals):,}" if totals.count else "",
        "learning rate": str((trainer.get("optimizer") or {}).get("lr", "")),
        "data-parallel ranks": str(trainer.get("ranks", "")),
        "hours": f"{sum(stage_seconds(totals).values()) / 3600:.2f}" if totals.count else "",
        "seed": str(config.get("seed", "")),
    }
    return [(name, value) for name, value in facts.items() if value]


def _method(config: Mapping[str, Any]) -> str:
    """The algorithm's name: that of the first paper, or the recipe's."""
    recipe = str(config.get("recipe", ""))
    if recipe != "preference":
        return _METHODS.get(recipe, recipe.upper())
    names = [name for name, _ in _papers(config)]
    return names[0] if names else "preference learning"


def _papers(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The papers of the run's algorithm that are known."""
    sections = [section for name in ("advantage", "loss") if isinstance(section := config.get(name), Mapping)]
    kinds = [kind for section in sections for kind in (section.get("kind"), *(section.get("type") or ()))]
    of_recipe = [_RECIPE_PAPERS[recipe]] if (recipe := str(config.get("recipe"))) in _RECIPE_PAPERS else []
    return list(dict.fromkeys([*of_recipe, *(METHOD_PAPERS[kind] for kind in kinds if kind in METHOD_PAPERS)]))


def _parent(ledger: Ledger) -> dict[str, str] | None:
    found = parent_of(ledger)
    if found is None:
        return None
    return {"run": Path(str(found["run"])).name, "steps": count_noun(int(found["steps"]), "step")}


def _evaluations(ledger: Ledger, steps: int) -> tuple[EvaluationRow | None, EvaluationRow | None]:
    """The evaluation before the first step, and the last one up to `steps`; None if there is none."""
    rows = [row for row in committed_rows(ledger)[1] if row.step < steps]
    before = rows[0] if rows and rows[0].step < 0 else None
    return before, rows[-1] if rows and rows[-1].step >= 0 else None


def _evaluation_table(before: EvaluationRow | None, after: EvaluationRow) -> dict[str, Any]:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    earlier = before.metrics if before is not None else {}
    rows = [(name, shown(earlier.get(name)), shown(value)) for name, value in _shown_metrics(after).items()]
    return {"before": before is not None, "steps": count_noun(after.step + 1, "step"), "rows": rows}


def _shown_metrics(evaluation: EvaluationRow) -> dict[str, float]:
    finite = {name: value for name, value in evaluation.metrics.items() if math.isfinite(value)}
    return dict(list(finite.items())[:_MAX_METRICS])


def _evaluation_dataset(config: Mapping[str, Any]) -> str:
    """The name of the held-out data, for the hub: without the folder of a local file."""
    for name in ("evaluation", "validation", "data"):
        section = config.get(name)
        found = list(_paths(section)) if isinstance(section, Mapping) else []
        if found:
            return found[0] if _is_hub_name(found[0]) else Path(found[0]).name
    return "held-out data"


def _paths(section: Any) -> Iterator[str]:
    """The paths of all datasets in a section."""
    if isinstance(section, Mapping):
        for name, value in section.items():
            if name == "path" and isinstance(value, str):
                yield value
            else:
                yield from _paths(value)
    elif isinstance(section, list | tuple):
        for each in section:
            yield from _paths(each)


def _base_model(config: Mapping[str, Any]) -> str:
    """The model's name on the hub; "" if it was loaded from a folder."""
    path = str((config.get("model") or {}).get("path", ""))
    return path if _is_hub_name(path) else ""


def _is_hub_name(path: str) -> bool:
    """Whether it is the name of a model or dataset that this machine has loaded from the hub: what looks like one may
    be a folder that is not here, and a card must not name somebody else's repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if not _HUB_NAME.fullmatch(path) or Path(path).exists():
        return False
    cache = Path(constants.HF_HUB_CACHE)
    return any((cache / repo_folder_name(repo_id=path, repo_type=kind)).is_dir() for kind in ("model", "dataset"))


def _without_folders(value: Any) -> Any:
    """The value with local paths shortened to their last part, and without addresses of servers."""
    if isinstance(value, Mapping):
        return {
            name: Path(each).name
            if name in _PATH_FIELDS and isinstance(each, str) and not _is_hub_name(each)
            else _without_folders(each)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_folders(each) for each in value]
    if not isinstance(value, str) or "\n" in value:
        return value
    if re.match(r"https?://", value):
        return HIDDEN
    return Path(value).name if value.startswith(("/", "~", "./", "../")) or "://" in value else value


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100).strip()
