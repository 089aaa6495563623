"""`lockstep generate`: completes prompts with the model of a run, or with any other."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lockstep.cli.terminal import FAILED, INTERRUPTED, REFUSED, LogFormatOption, require_extra
from lockstep.report.command_events import TERMINAL, CommandEvents, LogFormat, open_events

if TYPE_CHECKING:
    from lockstep.data.samples import Group
    from lockstep.run.trained_models.generation import PromptChoice, SamplingChoice

T = TypeVar("T")

MODEL_HELP = (
    "A run, one of its checkpoints, an export, an adapter, a folder of Hugging Face, or the name of a model on the hub."
)
Step = Annotated[
    str | None,
    typer.Option(help="Of a run: which checkpoint, by the number of steps done.", metavar="N|best|last"),
]
Count = Annotated[int, typer.Option("-n", "--n", min=1, metavar="N", help="Completions per prompt.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")]
TopK = Annotated[int | None, typer.Option(min=0, help="0 disables it.")]
MinP = Annotated[float | None, typer.Option(min=0, max=1)]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest completion.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends a completion; may be repeated.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The run's seed when absent.")]
Output = Annotated[Path | None, typer.Option(help="Also write one JSON object per completion to this file.")]


class EngineKind(StrEnum):
    """The engines that can generate."""

    builtin = "builtin"
    vllm = "vllm"


class RunDataset(StrEnum):
    """The data sets of a run."""

    evaluation = "evaluation"
    train = "train"


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; - reads one from stdin.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Prompts from .jsonl, .json, .parquet or .txt (one per line); - is stdin: JSON lines, or one prompt.",
        ),
    ] = None,
    dataset: Annotated[RunDataset | None, typer.Option(help="Prompts from the run's data.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts.")] = None,
    step: Step = None,
    n: Count = 1,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Apply the chat template to prompts; as in the run.")
    ] = None,
    engine: Annotated[EngineKind | None, typer.Option(help="The run's engine when absent.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per completion.")] = False,
    output: Output = None,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Complete prompts with the model of a run, or with any other.

    The chat template and, unless given, the sampling parameters are those of the run.

    Examples:

        lockstep generate runs/sort-grpo "12 7 30" -n 4 --temperature 0.7

        lockstep generate runs/sort-grpo --dataset evaluation --limit 8 --step best --json
    """
    events = open_events(log_format, "generate")
    require_extra("train", "lockstep generate", events)
    from lockstep.run.trained_models.generation import completion_record, generate

    chosen = _chosen_prompts(prompts or (), file, dataset, limit, chat)
    sampling = sampling_choice(n, seed, temperature, top_p, top_k, min_p, max_tokens, stop)
    overrides = engine_overrides(engine)
    target = output.absolute() if output is not None else None
    label, groups = run_or_exit(lambda status: generate(model, step, chosen, sampling, overrides, status), events)
    records = [completion_record(group, k) for group in groups for k in range(n)]
    if target is not None:
        write_records(target, records, events)
    if json_lines:
        for each in records:
            typer.echo(json.dumps(each))
    else:
        events.progress(label)
        _print_completions(groups)


def _chosen_prompts(
    prompts: Sequence[str], file: Path | None, dataset: RunDataset | None, limit: int | None, chat: bool | None
) -> "PromptChoice":
    """The prompts that were given, from standard input if none were. Raises BadParameter if two sources were given."""
    from lockstep.run.trained_models.generation import PromptChoice

    if sum((bool(prompts), file is not None, dataset is not None)) > 1:
        raise typer.BadParameter("give prompts, --prompts or --dataset: one of the three")
    texts, rows = list(prompts), list[dict[str, Any]]()
    nothing_given = not (texts or file or dataset)
    if texts == ["-"] or file == Path("-") or (nothing_given and not sys.stdin.isatty()):
        texts, rows = _standard_input()
        file = None
    path = None if file is None else file.absolute()
    return PromptChoice(texts, rows, path, dataset.value if dataset else None, limit, chat)


def sampling_choice(
    n: int,
    seed: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    max_tokens: int | None,
    stop: Sequence[str] | None,
) -> "SamplingChoice":
    """The sampling options that were given."""
    from lockstep.run.trained_models.generation import SamplingChoice

    values = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "max_tokens": max_tokens,
        "stop": tuple(stop) if stop else None,
    }  # fmt: skip
    return SamplingChoice(n, seed, {name: value for name, value in values.items() if value is not None})


def engine_overrides(engine: EngineKind | None) -> list[str]:
    """The override that selects an engine of another kind than the run's."""
    return [] if engine is None else [f"rollout.engine={{kind: {engine.value}}}"]


def run_or_exit(work: Callable[[Callable[[str], None]], T], events: CommandEvents = TERMINAL) -> T:
    """Does the work while it shows what is waited for. If it is refused, fails or is interrupted, says why and exits
    with the code for that."""
    from lockstep.base.wait_state import WaitTimeout
    from lockstep.cli.failure_message import show_failure
    from lockstep.cluster.protocol import RemoteError, WorkerDied
    from lockstep.ledger.errors import LedgerError
    from lockstep.report.warning_handler import shown_warnings
    from lockstep.rewards.scoring_messages import RewardError
    from lockstep.rollout.environments.environment_protocol import EnvironmentFailed
    from lockstep.run.errors import RunRefused
    from lockstep.train.errors import CheckpointError
    from lockstep.watch.agent.agent_client import AgentError

    try:
        with shown_warnings(events.warning), events.status() as status:
            return work(status)
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except (RemoteError, WorkerDied, WaitTimeout, AgentError, RewardError, EnvironmentFailed) as error:
        show_failure(error, Path(os.devnull), events)  # no run that could be resumed
        raise typer.Exit(FAILED) from error
    except (RunRefused, LedgerError, CheckpointError, ValueError, OSError) as error:
        events.refuse(error)
        raise typer.Exit(REFUSED) from error


def write_records(path: Path, records: Iterable[dict[str, Any]], events: CommandEvents = TERMINAL) -> None:
    """Writes one JSON object per line. Exits if the file cannot be written."""
    try:
        path.write_text("".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in records), encoding="utf-8")
    except OSError as error:
        events.refuse(error)
        raise typer.Exit(FAILED) from error


def _print_completions(groups: "Sequence[Group]") -> None:
    from rich.markup import escape

    from lockstep.report.safe_console import SafeConsole

    console = SafeConsole(soft_wrap=True)
    for group in groups:
        console.print(f"[bold]{escape(group.prompt.text)}[/]")
        for k, each in enumerate(group.completions):
            number = f"[dim]{k + 1}[/] " if len(group.completions) > 1 else ""
            end = "" if each.finish == "stop" else f" [dim]({each.finish})[/]"
            text = each.text if each.episode is None else _conversation_text(each.episode.messages)
            console.print(f"{number}{escape(text)}{end}")


def _conversation_text(messages: Sequence[dict[str, Any]]) -> str:
    from lockstep.report.completion_samples import turn_text

    return "\n".join(f"{message.get('role')}: {turn_text(message)}" for message in messages)


def _standard_input() -> tuple[list[str], list[dict[str, Any]]]:
    """The prompt in standard input, or the rows if every line is a JSON object."""
    text = sys.stdin.read()
    try:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return [text.removesuffix("\n")] if text.strip() else [], []
    if rows and all(isinstance(row, dict) for row in rows):
        return [], rows
    return [text.removesuffix("\n")] if text.strip() else [], []
