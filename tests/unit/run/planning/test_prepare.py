"""Refusals before a run starts or resumes."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.loader import check_config
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.run.errors import RunRefused
from lockstep.run.planning.prepare import START_EVENT, prepare_run


def write(data: Path, rows: int) -> None:
    lines = [json.dumps({"prompt": f"{n % 10}=", "completion": "1"}) for n in range(rows)]
    data.write_text("\n".join(lines) + "\n")


def test_a_run_is_not_resumed_with_another_number_of_rows(tmp_path: Path) -> None:
    make_tiny(
        tmp_path / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789="
    )
    data = tmp_path / "data.jsonl"
    write(data, 20)
    values: dict[str, Any] = {
        "recipe": "sft", "name": "x", "folder": str(tmp_path), "steps": 4, "batch_size": 4,
        "model": {"path": str(tmp_path / "model")}, "data": {"path": str(data)}, "cluster": {"device": "cpu"},
    }  # fmt: skip
    config = check_config(values, "test")
    fresh = prepare_run(config, None)
    assert fresh.rows == 20
    with Ledger.create(fresh.folder, config.model_dump(mode="json")) as ledger:
        ledger.record_event(START_EVENT, rows=fresh.rows)
    assert prepare_run(None, fresh.folder).rows == 20
    for rows in (19, 21):
        write(data, rows)
        with pytest.raises(RunRefused, match=rf"had 20 rows to use .* and has {rows} now"):
            prepare_run(None, fresh.folder)


def test_groups_are_filtered_by_an_existing_term(tmp_path: Path) -> None:
    make_tiny(
        tmp_path / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789="
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    values: dict[str, Any] = {
        "recipe": "grpo", "name": "x", "folder": str(tmp_path), "steps": 4, "cluster": {"device": "cpu"},
        "model": {"path": str(tmp_path / "model")}, "data": {"path": str(tmp_path / "data.jsonl")},
        "rollout": {"sampling": {"max_tokens": 4}}, "token_budget": 64,
        "reward": {"terms": [{"kind": "exact_match", "name": "right"}]},
    }  # fmt: skip
    for metric in ("reward", "right"):
        prepare_run(check_config(values | {"filter_groups": {"enable": True, "metric": metric}}, "test"), None)
    wrong = values | {"filter_groups": {"enable": True, "metric": "exact_match"}}
    with pytest.raises(RunRefused, match=r"filter_groups.metric 'exact_match' is not one of reward, right"):
        prepare_run(check_config(wrong, "test"), None)
