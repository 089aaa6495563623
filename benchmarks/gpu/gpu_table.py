"""The results of `script/gpu` as Markdown."""

import statistics
from collections.abc import Iterator
from typing import Any

TEST_PARTS = ("policy", "trainer", "weights", "watch")
GIB = 2**30


def table(results: dict[str, Any]) -> str:
    """Tests, training, memory, decoding and GRPO, as far as there are results; what failed is named."""
    parts = results["parts"]
    done = {name: part["record"] for name, part in parts.items() if part["outcome"] == "done"}
    lines = [*_hosts(parts), *_tests(parts)]
    ceilings = done.get("ceilings", {})
    if ceilings:
        lines += [f"Matrix product in bf16: {ceilings['flops'] / 1e12:.0f} TFLOP/s; copy: "
                  f"{ceilings['bytes_per_s'] / 1e9:.0f} GB/s, read and written.", ""]  # fmt: skip
    lines += _sft(done.get("sft", {}), ceilings) + _decode(done.get("decode", {}), ceilings)
    lines += _grpo(done.get("grpo", {})) + _devices(done.get("devices", {}))
    return "\n".join(lines).strip() + "\n"


def _hosts(parts: dict[str, Any]) -> list[str]:
    hosts = {
        f"{', '.join(host['gpus']) or 'no GPU'}; torch {host['torch']}, transformers {host['transformers']}, "
        f"NCCL {host['nccl']}, {host['date'][:10]}"
        for host in (part["host"] for part in parts.values())
    }
    return [*sorted(hosts), ""] if hosts else ["No results yet.", ""]


def _tests(parts: dict[str, Any]) -> list[str]:
    rows = []
    for name, part in parts.items():
        record = part.get("record", {})
        if name in TEST_PARTS and record:
            counts = f"{record['passed']} | {record['skipped']} | {len(record['failed'])}"
            rows.append(f"| {name} | {counts} | {part['seconds']:.0f} |")
        elif part["outcome"] != "done":
            rows.append(f"| {name} | {part['outcome']}: {part['why']} | | | {part['seconds']:.0f} |")
    return ["| part | passed | skipped | failed | s |", "|---|---|---|---|---|", *rows, ""] if rows else []


def _sft(record: dict[str, Any], ceilings: dict[str, Any]) -> list[str]:
    if not record:
        return []
    lines = [
        "| SFT | tokens/s | TFLOP/s | MFU | peak memory | estimate |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in record.items():
        share = f"{each['flops_per_s'] / ceilings['flops']:.0%}" if ceilings else ""
        peak = f"{each['peak_bytes'] / GIB:.2f} GiB" if each["peak_bytes"] else ""
        estimate = sum(each["estimate"].values()) / GIB
        speed = f"{each['tokens'] / each['seconds']:,.0f} | {each['flops_per_s'] / 1e12:.1f}"
        lines.append(f"| {name} | {speed} | {share} | {peak} | {estimate:.2f} GiB |")
    return [*lines, "", "MFU is the share of the matrix product above.", ""]


def _decode(record: dict[str, Any], ceilings: dict[str, Any]) -> list[str]:
    if not record:
        return []
    lines = ["| builtin engine | rows | tokens/s | limit of the memory | share |", "|---|---|---|---|---|"]
    for name, rows, speed, bytes_per_step in _decoded(record):
        # a copy reads half of the bytes that it moves; decoding reads nearly all of its own
        limit = rows * ceilings["bytes_per_s"] / bytes_per_step if ceilings else 0.0
        share = f"{limit:,.0f} | {speed / limit:.0%}" if limit else "|"
        lines.append(f"| {name} | {rows} | {speed:,.0f} | {share} |")
    return [*lines, ""]


def _decoded(record: dict[str, Any]) -> Iterator[tuple[str, int, float, float]]:
    for name, by_rows in record.items():
        for rows, each in by_rows.items():
            yield name, int(rows), each["tokens_per_s"], each["bytes_per_step"]


def _devices(record: dict[str, Any]) -> list[str]:
    if not record:
        return []
    lines = [
        "| load of the GPU | busy | memory busy | power | samples | moves | idle |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in record["loads"].items():
        figures = [f"{each[key]:.0f}%" if key in each else "" for key in ("busy", "memory_busy")]
        figures.append(f"{each['power_share']:.0%}" if "power_share" in each else "")
        lines.append(f"| {name} | {' | '.join(figures)} | {each['samples']} | {each['moving']} | {each['idle']} |")
    cost = f"{record['round_ms']:.1f} ms, at most {record['longest_round_ms']:.1f}"
    return [*lines, "", f"A sample of all GPUs ({record['gpus']}) takes {cost}.", ""]


def _grpo(record: dict[str, Any]) -> list[str]:
    if not record:
        return []
    lines = ["| GRPO step, s | Lockstep | TRL, transformers generates | ratio |", "|---|---|---|---|"]
    for name, sides in record.items():
        own, *others = (statistics.median(times) for times in sides.values())
        lines.append(f"| {name} | {own:.2f} | {others[0]:.2f} | {others[0] / own:.2f} |")
    return [*lines, ""]
