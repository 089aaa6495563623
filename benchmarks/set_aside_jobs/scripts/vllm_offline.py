"""Completions with vLLM's `LLM`, without a server."""

import argparse
import json
from pathlib import Path


def main():
    options = argparse.ArgumentParser()
    options.add_argument("model")
    options.add_argument("--tokens", type=int, default=16)
    options.add_argument("--prompts", type=int, default=32)
    options.add_argument("--repeat", type=int, default=1)
    options.add_argument("--ids", type=int, nargs="*")
    options.add_argument("--engine", type=json.loads, default={})
    args = options.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(args.model, **{"max_model_len": 128, "enforce_eager": True, "dtype": "float32", **args.engine})
    prompts = [f"{n}+{n + 3}=" * args.repeat for n in range(args.prompts)]
    if args.ids:
        prompts = [{"prompt_token_ids": args.ids}]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=args.tokens, temperature=0.8))
    with Path("completions.jsonl").open("w") as file:
        file.writelines(json.dumps(each.outputs[0].text) + "\n" for each in outputs)
    print(f"wrote {len(outputs)} completions to completions.jsonl")


if __name__ == "__main__":
    main()
