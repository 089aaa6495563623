"""Jobs of `benchmarks/cases/threads_failures`, re-told after public issue threads about failures other than those of
communication: the error lines that the named programs print, as the thread (`source`) quotes them, with surroundings of
our own. Only threads with an odd number were taken. They are for development: each round was written and committed with
its truth before it was judged, and then its errors were learnt from.

The truth is the class of the established cause; culprits are named only where a careful reader of the log could.
"""

from benchmarks.set_aside_jobs.entry import Entry
from benchmarks.set_aside_jobs.seventh_told_entries import told

_SETTING = ("rank_exception_masked",)
"""What else is right if a library rejects a setting by an exception."""

FIRST_ROUND = [
    told("easyr1-ends-unraisable", "EasyR1, Ray", "benign", "hiyouga/EasyR1", 255),
    told("llava-next-flushes", "LLaVA-NeXT, DeepSpeed", "benign", "LLaVA-VL/LLaVA-NeXT", 247),
    told("glm-says-incompatible", "transformers", "benign", "yuanzhoulvpi2017/zero_nlp", 49),
    told(
        "zephyr-dpo-roles",
        "TRL, DeepSpeed",
        "rank_exception_masked",
        "huggingface/alignment-handbook",
        93,
        also_ok=("config_error",),
    ),
    told(
        "lmm-wake-after-epoch",
        "OpenRLHF, vLLM",
        "rank_oom",
        "TideDra/lmm-r1",
        43,
        culprit=("LLMRayActor",),
        alt=(("347862",), ("10.244.8.11",)),
        also_ok=("vllm_engine_failure",),
    ),
    told(
        "factory-vl-cutoff", "LLaMA-Factory, DeepSpeed", "config_error", "hiyouga/LlamaFactory", 6559, also_ok=_SETTING
    ),
    told("factory-save-two-cards", "LLaMA-Factory", "storage_fault", "hiyouga/LlamaFactory", 5155, culprit=(0,)),
    told("swift-map-nine-million", "ms-swift", "storage_fault", "modelscope/ms-swift", 3551, culprit=(4,)),
    told(
        "esm-lora-pooler",
        "PEFT, accelerate",
        "rank_divergent_branch",
        "huggingface/peft",
        393,
        also_ok=("rank_exception_masked", "config_error"),
    ),
    told(
        "litgpt-compiled-shards",
        "litgpt, PyTorch FSDP",
        "framework_bug",
        "pytorch/pytorch",
        161153,
        also_ok=("rank_exception_masked",),
    ),
    told(
        "gpt2-sharded-compiled",
        "transformers, FSDP",
        "config_error",
        "huggingface/transformers",
        23341,
        also_ok=_SETTING,
    ),
    told(
        "swift-reward-columns",
        "ms-swift",
        "rank_exception_masked",
        "modelscope/ms-swift",
        7069,
        also_ok=("config_error",),
    ),
    told(
        "megatron-ds-twice-the-ranks",
        "Megatron-DeepSpeed",
        "config_error",
        "deepspeedai/Megatron-DeepSpeed",
        439,
        also_ok=_SETTING,
    ),
    told(
        "rlinf-embeddings-flat",
        "RLinf, Ray",
        "rank_exception_masked",
        "RLinf/RLinf",
        655,
        also_ok=("config_error", "framework_bug"),
    ),
    told(
        "prime-reward-then-memory",
        "PRIME, Ray",
        "host_oom",
        "PRIME-RL/PRIME",
        59,
        culprit=("10.33.7.42",),
        alt=(("main_task",), ("6705",)),
    ),
    told("open-llava-symbol", "LLaVA-NeXT, DeepSpeed", "version_mismatch", "xiaoachen98/Open-LLaVA-NeXT", 15),
    told(
        "search-ppo-a6000",
        "Search-R1, verl",
        "rank_oom",
        "PeterGriffinJin/Search-R1",
        93,
        culprit=("2423076",),
        alt=(("WorkerDict",), ("192.168.30.9",)),
    ),
    told("simplerl-verify-alarm", "SimpleRL, verl", "rank_exception_masked", "hkust-nlp/simpleRL-reason", 95),
    told(
        "search-lora-garbled",
        "verl, vLLM",
        "vllm_weight_sync",
        "verl-project/verl",
        3149,
        also_ok=("unknown",),
        sufficiency="hint",
    ),
    told("coil-query-struct", "COIL, transformers", "rank_exception_masked", "luyug/COIL", 13),
]

ENTRIES: list[Entry] = [*FIRST_ROUND]
