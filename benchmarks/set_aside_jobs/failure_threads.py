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

SECOND_ROUND = [
    told("omnidrive-longer-tokens", "OmniDrive, mmcv", "benign", "NVlabs/OmniDrive", 13),
    told("grpo-loss-of-zero", "TRL, vLLM", "benign", "huggingface/trl", 2703),
    told("fabric-wall-of-text", "litgpt, PyTorch FSDP", "benign", "pytorch/pytorch", 126275),
    told(
        "lmflow-ram-of-eight",
        "LMFlow, DeepSpeed",
        "host_oom",
        "OptimalScale/LMFlow",
        179,
        also_ok=("external_kill", "unknown"),
        sufficiency="hint",
    ),
    told(
        "factory-glm-offload-states",
        "LLaMA-Factory, DeepSpeed",
        "host_oom",
        "hiyouga/LlamaFactory",
        4629,
        also_ok=("external_kill", "unknown"),
        sufficiency="hint",
    ),
    told(
        "factory-clip-on-cpu",
        "LLaMA-Factory, DeepSpeed",
        "framework_bug",
        "hiyouga/LlamaFactory",
        3583,
        also_ok=("version_mismatch", "rank_exception_masked"),
    ),
    told("trl-flatten-two-dtypes", "TRL, FSDP", "config_error", "huggingface/trl", 1723, also_ok=_SETTING),
    told(
        "streaming-many-streams",
        "MosaicML Streaming, PyTorch",
        "shm_too_small",
        "mosaicml/streaming",
        493,
        culprit=(5,),
    ),
    told(
        "kvcached-window-too-long",
        "vLLM",
        "rank_oom",
        "ovg-project/kvcached",
        29,
        also_ok=("config_error", "vllm_engine_failure"),
    ),
    told("airllm-shard-half", "transformers", "storage_fault", "lyogavin/airllm", 137),
    told(
        "bitten-header-absent",
        "transformers, DeepSpeed",
        "version_mismatch",
        "deepspeedai/DeepSpeed",
        889,
        also_ok=("config_error",),
    ),
    told(
        "medical-added-tokens",
        "MedicalGPT, transformers",
        "cuda_kernel_error",
        "shibing624/MedicalGPT",
        275,
        also_ok=("config_error",),
    ),
    told("slime-moe-save", "slime, Megatron", "framework_bug", "THUDM/slime", 1221, also_ok=("rank_exception_masked",)),
    told(
        "axolotl-ops-119",
        "Axolotl, bitsandbytes",
        "cuda_kernel_error",
        "axolotl-ai-cloud/axolotl",
        1527,
        also_ok=("framework_bug", "config_error"),
    ),
    told("factory-lora-names", "LLaMA-Factory, PEFT", "config_error", "hiyouga/LlamaFactory", 209, also_ok=_SETTING),
    told(
        "axolotl-batch-not-even",
        "Axolotl",
        "rank_exception_masked",
        "axolotl-ai-cloud/axolotl",
        1713,
        also_ok=("config_error",),
    ),
    told("nemo-converter-module", "NeMo-RL", "version_mismatch", "NVIDIA-NeMo/RL", 801, also_ok=("config_error",)),
    told(
        "llama-lora-no-grad",
        "transformers, PEFT",
        "rank_exception_masked",
        "datawhalechina/self-llm",
        229,
        also_ok=("config_error",),
    ),
    told(
        "wandb-stream-dropped",
        "PyTorch, wandb",
        "rank_exception_masked",
        "wandb/wandb",
        4163,
        also_ok=("remote_service_timeout",),
    ),
]

ENTRIES: list[Entry] = [*FIRST_ROUND, *SECOND_ROUND]
