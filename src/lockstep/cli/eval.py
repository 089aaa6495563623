"""`lockstep eval`: scores the model of a run, or any other, with a run's rewards."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.base.text import count_noun
from lockstep.cli.generate import (
    MODEL_HELP,
    Count,
    EngineKind,
    MaxTokens,
    MinP,
    Output,
    Seed,
    Step,
    Stop,
    Temperature,
    TopK,
    TopP,
    engine_overrides,
    run_or_exit,
    sampling_choice,
    write_records,
)
from lockstep.cli.terminal import LogFormatOption, require_extra
from lockstep.report.command_events import LogFormat, open_events

if TYPE_CHECKING:
    from lockstep.run.trained_models.reward_evaluation import Evaluation


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides values of the config, as for `lockstep train`."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Data and rewards from this file instead of the run's.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="PATH", help="Other held-out data: a file, a folder or a hub dataset.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts or pairs.")] = None,
    step: Step = None,
    n: Count = 1,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    pass_reward: Annotated[
        float | None,
        typer.Option(help="For pass@k: the reward from which on a completion passes; without it, a reward of 0 or 1."),
    ] = None,
    engine: Annotated[EngineKind | None, typer.Option(help="The run's engine when absent.")] = None,
    json_object: Annotated[bool, typer.Option("--json", help="Print the metrics as one JSON object.")] = False,
    output: Output = None,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Score the model of a run, or any other, on held-out prompts with the run's rewards.

    With the same settings the metrics are those of the run's own evaluation. With -n, also the best of n and pass@k. A
    reward model is measured on held-out pairs.

    Examples:

        lockstep eval runs/sort-grpo --step best -n 8

        lockstep eval runs/sort-reward/export --dataset pairs.jsonl --json

        lockstep eval Qwen/Qwen2.5-0.5B-Instruct --config examples/grpo_gsm8k.yaml --limit 200 --output scores.jsonl
    """
    events = open_events(log_format, "eval")
    require_extra("train", "lockstep eval", events)
    from lockstep.run.trained_models.model_evaluation import EvaluationRequest
    from lockstep.run.trained_models.reward_evaluation import evaluate

    sampling = sampling_choice(n, seed, temperature, top_p, top_k, min_p, max_tokens, stop)
    values = [*(overrides or []), *engine_overrides(engine)]
    request = EvaluationRequest(model, step, config, values, dataset, limit, sampling, pass_reward)
    target = output.absolute() if output is not None else None
    result = run_or_exit(lambda status: evaluate(request, status), events)
    if target is not None:
        write_records(target, result.records(), events)
    if json_object:
        typer.echo(json.dumps(_summary(result)))
    else:
        _print_metrics(result, n)


def _summary(result: "Evaluation") -> dict[str, object]:
    summary = {"model": result.label, "steps": result.steps, **result.counts}
    return summary | {"metrics": result.metrics, "by_source": result.by_source}


def _print_metrics(result: "Evaluation", n: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    from lockstep.report.live_console import format_number
    from lockstep.report.safe_console import SafeConsole

    console = SafeConsole(soft_wrap=True)
    times = f", {n} completions each" if n > 1 else ""
    of_what, count = next(iter(result.counts.items()))
    console.print(f"{escape(result.label)}: {count_noun(count, of_what.removesuffix('s'))}{times}")
    columns = {"all": result.metrics} if result.by_source else {"": result.metrics}
    columns |= result.by_source
    table = Table(box=None, pad_edge=False, show_header=bool(result.by_source))
    table.add_column("")
    for name in columns:
        table.add_column(escape(name), justify="right")
    for metric in result.metrics:
        values = [format_number(of[metric]) if metric in of else "" for of in columns.values()]
        table.add_row(escape(metric.removeprefix("eval/")), *values)
    console.print(table)
