"""Writes JSON-lines shards: `make_shards.py FOLDER --shards 2 --rows 64 [--spoil KIND:SHARD:ROW ...]`."""

import argparse
import json
import random
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--rows", type=int, default=64)
parser.add_argument("--more", action="append", default=[], metavar="SHARD:ROWS")
parser.add_argument("--spoil", action="append", default=[], metavar="KIND:SHARD:ROW")
args = parser.parse_args()
draw = random.Random(7)
args.folder.mkdir(parents=True, exist_ok=True)
more = {int(one.split(":")[0]): int(one.split(":")[1]) for one in args.more}
for shard in range(args.shards):
    lines = []
    for row in range(args.rows + more.get(shard, 0)):
        x = [round(draw.gauss(0, 1), 4) for _ in range(16)]
        sample = {"id": f"s{shard}-{row:05d}", "x": x, "label": int(sum(x) > 0) + 2 * int(x[0] > 0)}
        spoilt = [one.split(":")[0] for one in args.spoil if one.split(":")[1:] == [str(shard), str(row)]]
        if "label" in spoilt:
            del sample["label"]
        if "class" in spoilt:
            sample["label"] = 11
        if "width" in spoilt:
            sample["x"] = x[:-3]
        if "nan" in spoilt:
            sample["x"] = [float("nan"), *x[1:]]
        if "text" in spoilt:
            sample["x"] = ["n/a", *x[1:]]
        line = json.dumps(sample)
        lines.append(line[: len(line) // 2] if "cut" in spoilt else line)
    (args.folder / f"shard-{shard:03d}.jsonl").write_text("\n".join(lines) + "\n")
