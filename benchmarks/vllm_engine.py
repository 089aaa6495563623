"""Measures the vLLM engine, and prints a table of each part:

    .venv-scale/bin/python -m benchmarks.vllm_engine generate      compared with vLLM's LLM.generate, same requests
    .venv-scale/bin/python -m benchmarks.vllm_engine update        weight updates, compared with vLLM's reload_weights
    .venv-scale/bin/python -m benchmarks.vllm_engine builtin       compared with the builtin engine

Both sides run in turns in one process with one thread, and wall time is measured. Ratios and rates are of medians; the
fastest repeat is printed as well, as other load slows single repeats. To update the tables of docs/engines.md, write
`--json benchmarks/results/cpu/vllm-PART.json`, then run `python -m benchmarks.docs_tables`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.generation import Work
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig as BuiltinConfig
from lockstep.config.rollout import VllmEngineConfig as Config
from lockstep.models.tiny_model import TinyModel, make_tiny
from lockstep.rollout.engine_protocol import Request, RolloutEngine
from lockstep.rollout.vllm.engine import VllmEngine
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore

READER = "lockstep.weights.shared_memory_transport:StoreReader"
MODELS: dict[str, dict[str, Any]] = {
    "0.5M": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 512},
    "3M": {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 768},
    "100M": {"hidden": 768, "layers": 14, "heads": 12, "kv_heads": 4, "ffn": 2304},
}
WORKS = {"fixed": Work("fixed", 32), "tail": Work("tail", 32, tail=True), "p512": Work("p512", 512)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["generate", "update", "builtin"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["fixed", "tail", "p512"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16, help="prompts of eight completions each (default 16)")
    parser.add_argument("--json", type=Path, help="writes the numbers there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="lockstep-vllm-", dir="/dev/shm") as scratch:
            folder = make_model(Path(scratch) / "model", model)
            if options.part == "update":
                rows.append({"model": model} | update(folder, Path(scratch), options.repeats))
                tell(rows[-1], len(rows) == 1)
                continue
            side = beside_generate if options.part == "generate" else beside_builtin
            works = [replace(WORKS[name], groups=options.groups) for name in options.works]
            for made in side(folder, works, options.repeats):
                rows.append({"model": model} | made)
                tell(rows[-1], len(rows) == 1)
    if options.json:
        about = {"repeats": options.repeats, "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps([row | about for row in rows], indent=2) + "\n")


def tell(row: dict[str, Any], first: bool) -> None:
    if first:
        print("".join(f"{name:>{max(len(name) + 2, 10)}}" for name in row))
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
    print("".join(f"{text:>{max(len(name) + 2, 10)}}" for text, name in zip(shown, row, strict=True)), flush=True)


def make_model(folder: Path, name: str) -> Path:
    """Create a model. 100M has a vocabulary of 8,192, and like the small ones a tied embedding."""
    made = make_tiny(folder, TinyModel(max_length=1024, **MODELS[name]))
    if name != "100M":
        return made
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(made)
    config.vocab_size = 8192
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


def engine(folder: Path, rows: int, context: int, reader: str | None = None) -> VllmEngine:
    model = ModelConfig(path=str(folder), max_length=context)
    return VllmEngine.from_config(model, Config(max_num_seqs=rows, cpu_kv_cache_gb=1), reader=reader, threads=1)


def in_turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """(fastest, median) seconds of each side."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            if repeat:
                taken[name].append(time.perf_counter() - began)
    return {name: (min(seconds), statistics.median(seconds)) for name, seconds in taken.items()}


def complete(of: RolloutEngine, wanted: list[Request]) -> int:
    """Run the requests to their end; returns the number of generated tokens."""
    of.submit(wanted)
    done, tokens = 0, 0
    while done < len(wanted):
        made = of.step()
        done += len(made)
        tokens += sum(len(each.tokens) for each in made)
    return tokens


def beside_generate(folder: Path, works: list[Work], repeats: int) -> list[dict[str, Any]]:
    """Compare Lockstep's vLLM engine with vLLM's `LLM`: with the same arguments, and with its own defaults except the
    size of its caches. `LLM` returns a log-probability per token and no text, as the engine converts text only at the
    end."""
    rows = max(work.groups * work.size for work in works)
    context = max(work.prompt + work.tokens for work in works)
    ours = engine(folder, rows, context)
    same, own = their_engines(folder, rows, context)
    found = []
    for work in works:
        wanted = work.requests()

        def fresh(wanted: list[Request] = wanted) -> int:
            ours._loads += 1  # else the prompts of the previous repeat are still cached
            return complete(ours, wanted)

        def generate(llm: Any, wanted: list[Request] = wanted) -> None:
            prompts, params = as_theirs(wanted)
            llm.llm_engine.reset_prefix_cache()
            llm.generate(prompts, params, use_tqdm=False)

        tokens = fresh()
        sides = {"ours": fresh, "generate": lambda run=generate: run(same), "defaults": lambda run=generate: run(own)}
        taken = in_turns(sides, repeats)
        over = {f"{name}/ours": taken[name][1] / taken["ours"][1] for name in ("generate", "defaults")}
        found.append({"work": work.name, "tokens/s": tokens / taken["ours"][1]} | seconds(taken) | over)
    ours.close()
    return found


def their_engines(folder: Path, rows: int, context: int) -> tuple[Any, Any]:
    """vLLM's `LLM` with the arguments of Lockstep's engine, and with its defaults but without chunked prefill."""
    from vllm import LLM

    from lockstep.rollout.vllm.vllm_setup import engine_arguments

    arguments = engine_arguments(
        ModelConfig(path=str(folder)), Config(max_num_seqs=rows, cpu_kv_cache_gb=1), "cpu", context
    )
    for name in ("worker_extension_cls", "weight_transfer_config"):
        del arguments[name]
    sizes = {name: arguments[name] for name in ("model", "dtype", "max_model_len", "kv_cache_memory_bytes")}
    # vLLM's CPU build fails for a seeded request with a chunked prompt: "CPU Generator does not use offset".
    own = LLM(**sizes, enable_chunked_prefill=False)
    return LLM(**arguments | {"skip_tokenizer_init": False}), own


def as_theirs(wanted: list[Request]) -> tuple[list[Any], list[Any]]:
    """Requests as prompts and sampling parameters of vLLM."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": each.prompt.tolist()} for each in wanted]
    fixed: dict[str, Any] = {"ignore_eos": True, "logprobs": 0, "detokenize": False}
    return prompts, [SamplingParams(seed=each.seed, max_tokens=each.max_tokens, **fixed) for each in wanted]


def beside_builtin(folder: Path, works: list[Work], repeats: int) -> list[dict[str, Any]]:
    from lockstep.rollout.builtin import BuiltinEngine

    rows = max(work.groups * work.size for work in works)
    context = max(work.prompt + work.tokens for work in works)
    vllm = engine(folder, rows, context)
    builtin = BuiltinEngine.from_config(ModelConfig(path=str(folder), max_length=context), BuiltinConfig(max_rows=rows))
    found = []
    for work in works:
        wanted = work.requests()

        def fresh(wanted: list[Request] = wanted) -> int:
            vllm._loads += 1
            return complete(vllm, wanted)

        tokens = fresh()
        taken = in_turns({"vllm": fresh, "builtin": lambda wanted=wanted: complete(builtin, wanted)}, repeats)
        rates = {f"{name} tokens/s": tokens / median for name, (_, median) in taken.items()}
        over = {"builtin/vllm": taken["builtin"][1] / taken["vllm"][1]}
        found.append({"work": work.name} | rates | seconds(taken) | over)
    vllm.close()
    return found


def seconds(taken: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Columns of a row: fastest and median seconds of all sides."""
    times = {}
    for name, (best, median) in taken.items():
        times |= {f"{name} s": best, f"{name} median": median}
    return times


class Rows:
    """A tensor as a trainer rank hands it over, which has changed since the last version."""

    offset, constant = 0, False

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor


def update(folder: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    """A full update: the trainer's write into shared memory, the commit, and the load in vLLM; compared with vLLM's own
    way: files on a RAM disk, `reload_weights`, and a reset of the prefix cache. `copy` is a plain memcpy of the bytes,
    `write` Lockstep's part before vLLM's."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {name: tensor.detach().clone() for name, tensor in lm.named_parameters()}
    plan = WeightPlan.of([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
    (scratch / "store").mkdir()
    store = WeightStore.create(scratch / "store", plan, writers=1)
    ours, count = engine(folder, 8, 64, READER), iter(range(1, 10_000))
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    target = torch.zeros_like(flat)
    rows = [Rows(name, tensor) for name, tensor in tensors.items()]
    written: list[float] = []

    def publish() -> None:
        version, began = next(count), time.perf_counter()
        store.write_shards(0, version, rows)
        store.commit(version)
        written.append(time.perf_counter() - began)
        ours.load_weights(store.folder, version)

    def reload() -> None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        ours.core.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        ours.core.reset_prefix_cache()

    def reload_alone() -> None:
        ours.core.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        ours.core.reset_prefix_cache()

    sides = {"copy": lambda: target.copy_(flat), "update": publish, "reload+save": reload, "reload": reload_alone}
    taken = in_turns(sides, repeats)
    ours.close()
    ms = {f"{name} ms": median * 1000 for name, (_, median) in taken.items()}
    write = statistics.median(written[1:]) * 1000
    return (
        ms
        | {f"{name} best ms": best * 1000 for name, (best, _) in taken.items()}
        | {
            "write ms": write,
            "write/copy": write / ms["copy ms"],
            "reload/update": ms["reload ms"] / ms["update ms"],
            "reload+save/update": ms["reload+save ms"] / ms["update ms"],
        }
    )


if __name__ == "__main__":
    main()
