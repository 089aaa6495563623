"""vLLM without a server: completions, chat, an engine that is killed. `generate_job.py MODE MODEL`."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(each) for each in found.stdout.split()]


def kill_engine():
    time.sleep(4)
    for each in children(os.getpid()):
        comm = Path(f"/proc/{each}/comm")
        if comm.exists() and "EngineCor" in comm.read_text():
            os.kill(each, signal.SIGKILL)


def main():
    mode, model = sys.argv[1:3]
    from vllm import LLM, SamplingParams

    engine = {"max_model_len": 256, "enforce_eager": True, "dtype": "float32", "seed": 3}
    if mode == "batched":
        engine |= {"max_num_batched_tokens": 64, "enable_chunked_prefill": False}
    llm = LLM(model, **engine)
    if mode == "killed":
        threading.Thread(target=kill_engine, daemon=True).start()
    if mode == "chat":
        llm.chat([[{"role": "user", "content": "1+1"}]], SamplingParams(max_tokens=8))
    prompts = [f"{n}+{n}=" for n in range(40)]
    for turn in range(200 if mode == "killed" else 3):
        sampling = SamplingParams(max_tokens=120, temperature=1.0, ignore_eos=True)
        outputs = llm.generate(prompts, sampling, use_tqdm=turn < 2)
        tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
        print(f"turn {turn}: {tokens} tokens", flush=True)
    print("sampling finished", flush=True)


if __name__ == "__main__":
    main()
