"""Jobs of `benchmarks/cases/eighth_set_aside` that are re-told, of frameworks for RL post-training: the error lines
that the named programs print, as a public issue thread (`source`) quotes them, with surroundings of our own. Their
files are kept as they are.

The threads are a sample of what users of several GPUs meet who train language and vision-language models with RL,
SFT or DPO. The rule was fixed before anything was looked up:

1. The frameworks, in this order: OpenRLHF, TRL, verl, VLM-R1, R1-V, open-r1, EasyR1, slime, AReaL, NeMo-RL, ROLL,
   SkyRL, prime-rl, rllm, Verifiers, ms-swift, LLaMA-Factory, Axolotl, unsloth, torchtune, DeepSpeed, accelerate,
   PyTorch FSDP, NCCL, Ray, vLLM, SGLang, Megatron-LM.
2. The queries about each F, to a search by meaning among public issue threads: `F multi-GPU training stuck or fails,
   log attached, the cause was`, `F RuntimeError in one worker during rollout or training, resolved`, and for healthy
   jobs `F prints warnings or errors but training still works, can be ignored`.
3. Only threads with an even number are taken. The results of a query are read in their order; the first is taken that
   is a thread of one job, quotes a log, and has an established cause: a resolution by a maintainer or by the
   reporter, or an error line that leaves one cause only. A thread is skipped that lacks one of these, that earlier
   sets have, that another query has given already, that is of a job on one GPU without anything distributed, or that
   fails before any job starts (installation).
4. Where this gives fewer than 65, the next results of the queries are taken in the same way, one a query.
5. From the third query, jobs are taken whose warnings did no harm as the thread says.

Changed twice before a thread was taken, as the search goes by meaning and leaves names aside. The queries about the
first three F gave programs that have nothing to do with them; `F` with a symptom, asked for the first six F, did so too
(only those of OpenRLHF and vLLM gave threads that fit). What was asked in the end are queries shaped like the logs of
F, one or two for each: the command, the classes or the processes that F's logs name, and `error`, `traceback` or
`hang` (such as `verl main_ppo WorkerDict RayTaskError traceback`); for healthy jobs eight queries with the warnings
that these programs print at their start, in training and at their end, and `harmless` or `can be ignored`. As a query
gives about ten threads, half of them even, all that fit are taken, not the first one only.

These gave about 40 threads. So that more kinds of failure came up, some 20 queries more were asked with the messages
of one kind each (a card's fault, a full disk, a port, a lost node of Ray, a long tokenization, IB, peers, NaN, ranks
of several modalities, ...), and threads taken from them in the same way. In all, 76 queries gave some 780 results,
about half of them with even numbers; 64 threads were taken. verl, VLM-R1, R1-V, open-r1, EasyR1, AReaL, ROLL, SkyRL,
rllm, Verifiers, torchtune and SGLang gave none of their own, only programs built on them or none at all: their even
threads lacked a cause, or their excerpts a log.

The index answers with excerpts of a thread, not with all of it: where the excerpts hold no resolution, a thread was
taken only if its error line leaves one cause. Some are pull requests (trl 3310 and 6872, MOVA 68, prime-rl 1630 and
2810), as their descriptions or comments report a job and its cause. Rule 3 was set aside for a few with one engine on
one GPU, whose messages are what jobs of several print too. Where an excerpt names the error but quotes no log (MOVA
68, prime-rl 2810, trl 6872, vllm 5458, nccl 1170, DeepSpeed 7170, slime 1136, returnn 1484 and some healthy ones),
the lines are those that the programs named print for it. Some files hold what a user noted beside the log, such as a
listing from another terminal.

The truth is the class of the established cause, not of the first error line; culprits are named only where a
careful reader of the log could.
"""

from benchmarks.set_aside_jobs.entry import told

_ENGINE = ("vllm_engine_failure",)
_RAISED = ("rank_exception_masked",)


ENTRIES = [
    # Healthy.
    told("engine-gone-after-round-three", "vLLM", "benign", "vllm-project/vllm", 28838),
    told("comparison-errors-in-between", "TRL", "benign", "FareedKhan-dev/train-deepseek-r1", 8),
    told("dpo-flushes-caches", "TRL, DeepSpeed", "benign", "huggingface/trl", 1100),
    told("pool-ready-after-two-minutes", "prime-rl, vLLM", "benign", "PrimeIntellect-ai/prime-rl", 1630),
    told("requests-aborted-by-callers", "vLLM", "benign", "vllm-project/vllm", 5712),
    told("comparisons-time-out", "verl, Ray", "benign", "RLHFlow/Reinforce-Ada", 14),
    told("swarm-round-over", "TRL, hivemind", "benign", "Mayankgg01/Gensyn-ai-Rl-Swarm_Guide", 24),
    told("thirty-seven-timeouts", "vLLM", "benign", "LeapLabTHU/limit-of-RLVR", 8),
    # Memory.
    told("ppo-112-mebibytes", "OpenRLHF, DeepSpeed", "rank_oom", "OpenRLHF/OpenRLHF", 398, culprit=(7,)),
    told(
        "wakes-after-the-end",
        "OpenRLHF, Ray",
        "rank_oom",
        "OpenRLHF/OpenRLHF",
        1050,
        culprit=("LLMRayActor",),
        alt=(("226426",), ("10.14.3.2",)),
        also_ok=_ENGINE,
    ),
    told(
        "thirteenth-rollout",
        "slime, Ray",
        "rank_oom",
        "THUDM/slime",
        1136,
        culprit=("32437",),
        alt=(("MegatronTrainRayActor",), ("33.184.122.180",)),
    ),
    told("video-rlhf-after-hours", "ms-swift", "rank_oom", "modelscope/ms-swift", 5894, culprit=(1,)),
    told(
        "orchestrator-shares-the-host",
        "prime-rl",
        "host_oom",
        "PrimeIntellect-ai/prime-rl",
        2810,
        culprit=(6,),
        alt=(("trainer-0",), ("orchestrator",)),
        also_ok=("shm_too_small",),
    ),
    # Numbers, weights.
    told("exclamation-marks", "OpenRLHF, Ray", "nan_or_inf", "OpenRLHF/OpenRLHF", 1120),
    told(
        "weights-arrive-in-flight",
        "NeMo-RL, vLLM",
        "vllm_weight_sync",
        "NVIDIA-NeMo/RL",
        2180,
        also_ok=("nan_or_inf", "framework_bug"),
    ),
    told(
        "sync-never-returns",
        "TRL, vLLM",
        "vllm_weight_sync",
        "huggingface/trl",
        6872,
        culprit=("vllm_server",),
        alt=(("EngineCore",), ("71288",)),
        also_ok=("config_error", "version_mismatch", *_ENGINE),
    ),
    told(
        "handle-without-method",
        "slime, Ray",
        "framework_bug",
        "THUDM/slime",
        178,
        also_ok=("version_mismatch", "vllm_weight_sync", *_RAISED),
    ),
    # Cards and engines.
    told(
        "wrapper-sees-no-card",
        "OpenRLHF, Ray",
        "gpu_binding",
        "OpenRLHF/OpenRLHF",
        866,
        culprit=("392789",),
        alt=(("RayWorkerWrapper",), ("LLMRayActor",), ("392823",)),
        also_ok=_ENGINE,
    ),
    told(
        "eight-engines-one-card",
        "TRL, vLLM",
        "gpu_binding",
        "huggingface/trl",
        3310,
        also_ok=("version_mismatch", *_ENGINE),
    ),
    told(
        "train-actor-second-device",
        "slime, Ray",
        "gpu_binding",
        "THUDM/slime",
        10,
        culprit=("279915",),
        alt=(("TrainRayActor",), ("172.23.236.53",)),
        also_ok=("framework_bug", "version_mismatch"),
    ),
    told(
        "search-tool-step-nineteen",
        "verl, vLLM",
        "cuda_kernel_error",
        "Agent-RL/ReCall",
        54,
        culprit=("12811",),
        alt=((3,), ("WorkerDict",), ("10.9.9.1",)),
        also_ok=_ENGINE,
    ),
    told(
        "expected-running-sequences",
        "vLLM",
        "vllm_engine_failure",
        "vllm-project/vllm",
        8016,
        also_ok=("framework_bug",),
    ),
    # Settings, versions, rooms.
    told("serve-72b", "TRL, vLLM", "version_mismatch", "huggingface/trl", 3304, also_ok=_ENGINE),
    told("serve-not-a-choice", "TRL", "version_mismatch", "wdrink/SimpleAR", 24, also_ok=("config_error",)),
    told(
        "sixteen-shards-eight-cards",
        "vLLM, Ray",
        "ray_resources_pending",
        "gpustack/gpustack",
        5056,
        also_ok=("config_error",),
    ),
    told(
        "two-demos-one-card",
        "vLLM, Ray",
        "config_error",
        "VITA-MLLM/VITA",
        42,
        also_ok=("ray_resources_pending", "gpu_binding", *_ENGINE),
    ),
    told("experience-on-the-card", "chatllama, DeepSpeed", "mp_start_method", "nebuly-ai/optimate", 262),
]
