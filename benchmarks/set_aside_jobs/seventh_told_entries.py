"""Jobs of `benchmarks/cases/seventh_set_aside` that are re-told, of frameworks for RL post-training: the error lines
that the named programs print, as a public issue thread (`source`) quotes them, with surroundings of our own. Their
files are kept as they are. `seventh_trainer_told_entries.py` has those of trainers, collectives, engines and
healthy jobs.

The threads are a sample of what users of several GPUs meet who train language and vision-language models with RL,
SFT or DPO. The rule was fixed before anything was looked up:

1. The frameworks, in this order: OpenRLHF, TRL, verl, VLM-R1, R1-V, open-r1, EasyR1, slime, AReaL, NeMo-RL, ROLL,
   SkyRL, prime-rl, ms-swift, LLaMA-Factory, Axolotl, unsloth, torchtune, DeepSpeed, accelerate, PyTorch
   distributed, NCCL, Ray, vLLM, SGLang, Megatron-LM, Megatron-Bridge.
2. The queries about each F, to a search by meaning among public issue threads: `F training hangs NCCL timeout
   watchdog`, `F crash traceback out of memory killed weight sync error`, and for healthy jobs `F warning in log
   harmless, training continues normally`.
3. The results of a query are read in their order. The first is taken that is a thread of one job (no feature
   request, no pull request without a report), quotes a log, and has an established cause: a resolution by a
   maintainer or by the reporter, or an error line that leaves one cause only. A thread is skipped that lacks one
   of these, that earlier sets have, that another query has given already, that is of a job on one GPU without
   anything distributed, or that fails before any job starts (installation). Where only a part of a thread is
   found, its title is queried once more.
4. Where this gives fewer than 60, the next results of the queries are taken in the same way, one a query.
5. From the third query, jobs are taken whose warnings did no harm as the thread says.

Changed after the first queries had been answered: the search goes by the meaning of the symptom more than by F, so
that the second query gave crashes of other programs for most F, and the first the same threads again. They are
read for what is new in them; in addition, `F LLM fine-tuning multi-GPU RuntimeError traceback, solved` is asked
for each F, and for the frameworks of RL `F GRPO rollout engine worker died, cause found`, and threads are taken
from these as above. As these gave nothing of TRL, slime, AReaL, EasyR1, VLM-R1, torchtune and ROLL that could be
taken, `F GitHub training job fails in a multi-GPU run, fixed by` is asked for each of these at the end.

What was asked in the end: the first form for all F, the second for all but R1-V, unsloth, PyTorch distributed,
NCCL and Megatron-LM, the third for OpenRLHF, TRL, verl, DeepSpeed and PyTorch distributed, and the added ones for
20 F. Of about 860 results, many of which came again and again, 62 threads qualified and were taken; most others
lacked a cause, were of other programs, or were of earlier sets.

The truth is the class of the established cause, not of the first error line; culprits are named only where a
careful reader of the log could.
"""

from benchmarks.set_aside_jobs.entry import told

ENTRIES = [
    # Healthy.
    told("raylet-speaks-at-the-end", "verl, Ray", "benign", "verl-project/verl", 1299),
    told("grpo-ends-with-term", "verl, Ray", "benign", "verl-project/verl", 1986, also_ok=("external_kill",)),
    told("digits-reward-prints", "r1_vlm, TRL", "benign", "groundlight/r1_vlm", 18),
    told("barrier-warns-each-step", "prime-rl", "benign", "PrimeIntellect-ai/prime-rl", 1756),
    # Memory.
    told(
        "long-context-node-memory",
        "OpenRLHF, Ray",
        "host_oom",
        "OpenRLHF/OpenRLHF",
        970,
        culprit=("10.61.4.27",),
        alt=(("LLMRayActor",), ("2413",)),
    ),
    told(
        "ppo-72b-worker-lost",
        "OpenRLHF, Ray",
        "host_oom",
        "OpenRLHF/OpenRLHF",
        360,
        culprit=("4017733",),
        alt=(("10.140.24.71",),),
        also_ok=("unknown", "external_kill", "ray_node_or_gcs"),
        sufficiency="hint",
    ),
    told(
        "rule-reward-leaks",
        "OpenRLHF, Ray",
        "host_oom",
        "OpenRLHF/OpenRLHF",
        1139,
        culprit=("reward_func",),
        alt=(("228117",), ("10.0.7.4",)),
        also_ok=("unknown", "external_kill"),
        sufficiency="hint",
    ),
    told(
        "sql-reward-node-memory",
        "OpenRLHF, Ray",
        "host_oom",
        "OpenRLHF/OpenRLHF",
        911,
        culprit=("10.8.0.5",),
        alt=(("LLMRayActor",), ("91805",)),
    ),
    told("ppo-55-of-64", "OpenRLHF, DeepSpeed", "rank_oom", "OpenRLHF/OpenRLHF", 519, culprit=(0,)),
    told(
        "sglang-actor-step-memory",
        "verl, SGLang",
        "rank_oom",
        "verl-project/verl",
        647,
        culprit=("511207",),
        alt=(("WorkerDict",), ("10.1.201.9",), (0,)),
    ),
    told(
        "resume-memory-denied",
        "verl, SGLang",
        "rank_oom",
        "sgl-project/sglang",
        14092,
        culprit=("SGLangHttpServer",),
        alt=(("260977",), ("260976", "260977"), ("10.72.3.8",)),
        also_ok=("vllm_engine_failure", "remote_service_timeout", "vllm_weight_sync"),
    ),
    told("hle-after-checkpoint", "SkyRL, vLLM", "rank_oom", "NovaSky-AI/SkyRL", 70, also_ok=("vllm_engine_failure",)),
    told(
        "nemo-validation-then-generate",
        "NeMo-RL, vLLM",
        "rank_oom",
        "NVIDIA-NeMo/RL",
        1137,
        culprit=("VllmGenerationWorker",),
        alt=(("1102",), ("100.64.3.17",)),
        also_ok=("vllm_engine_failure",),
    ),
    # Collectives that wait.
    told(
        "ppo-save-late",
        "OpenRLHF, DeepSpeed",
        "checkpoint_timeout",
        "OpenRLHF/OpenRLHF",
        1126,
        also_ok=("slow_collective_timeout", "unknown"),
        sufficiency="hint",
    ),
    told(
        "agent-loop-gather",
        "verl, FSDP",
        "slow_collective_timeout",
        "verl-project/verl",
        2987,
        also_ok=("unknown", "watchdog_or_heartbeat", "rank_exception_masked"),
        sufficiency="hint",
    ),
    told(
        "r1-four-nodes-read",
        "SGLang",
        "slow_rank_preprocess",
        "sgl-project/sglang",
        3784,
        culprit=("node-2",),
        alt=(tuple(range(16, 24)),),
        also_ok=("slow_collective_timeout", "watchdog_or_heartbeat", "storage_fault"),
    ),
    # Engines and their weights.
    told(
        "request-slots-none",
        "SGLang",
        "vllm_engine_failure",
        "sgl-project/sglang",
        10408,
        also_ok=("config_error", "rank_oom", "framework_bug"),
    ),
    told(
        "memory-saver-captures",
        "SGLang",
        "framework_bug",
        "sgl-project/sglang",
        4717,
        also_ok=("vllm_engine_failure", "version_mismatch"),
    ),
    told(
        "update-already-active", "SkyRL, vLLM", "vllm_weight_sync", "NovaSky-AI/SkyRL", 1605, also_ok=("framework_bug",)
    ),
    told(
        "dp-engines-sync",
        "SkyRL, vLLM",
        "vllm_weight_sync",
        "NovaSky-AI/SkyRL",
        1398,
        also_ok=("framework_bug", "vllm_engine_failure"),
    ),
    told(
        "engine-core-silent",
        "SkyRL, vLLM",
        "vllm_engine_failure",
        "NovaSky-AI/SkyRL",
        1673,
        also_ok=("unknown",),
        sufficiency="hint",
    ),
    told(
        "rollouts-turn-gibberish",
        "Dressage, Megatron, SGLang",
        "vllm_weight_sync",
        "Accio-Lab/Dressage",
        1,
        also_ok=("unknown",),
        sufficiency="hint",
    ),
    told(
        "placeholders-none",
        "lmm-r1, vLLM",
        "config_error",
        "TideDra/lmm-r1",
        52,
        also_ok=("version_mismatch", "vllm_engine_failure", "rank_exception_masked"),
    ),
    told(
        "open-r1-old-engine",
        "open-r1, TRL, vLLM",
        "version_mismatch",
        "huggingface/open-r1",
        129,
        also_ok=("gpu_binding", "config_error", "framework_bug", "vllm_engine_failure"),
        sufficiency="hint",
    ),
    # Settings.
    told(
        "eight-of-four-cards",
        "slime, Ray",
        "config_error",
        "THUDM/slime",
        148,
        also_ok=("ray_resources_pending", "gpu_binding", "vllm_engine_failure", "unknown"),
        sufficiency="hint",
    ),
    told("rlvr-keys-not-known", "open-instruct, Ray", "config_error", "allenai/open-instruct", 620),
    told(
        "sandbox-command-absent",
        "ROLL, Ray",
        "config_error",
        "alibaba/ROLL",
        412,
        also_ok=("rank_exception_masked", "version_mismatch"),
    ),
]
