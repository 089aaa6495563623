"""Jobs of `benchmarks/cases/fourth_set_aside` that ran: helpers, Ray, vLLM, TRL, accelerate, DeepSpeed, Lockstep."""

from benchmarks.set_aside_jobs.entry import Entry

_PORT = "$((20000 + RANDOM % 9000))"
_HELP = "cp $S/helper_job.py helpers.py; python helpers.py "
_RAY = (
    "cp $S/workers_job.py driver.py; unset TMPDIR; export RAY_raylet_start_wait_time_s=250 RAY_AUTH_MODE=disabled; {}"
    "timeout -s INT 330 python driver.py "
)
_TINY = (
    "lockstep tiny model --hidden 32 --layers 2 --heads 2 --kv-heads 1 --ffn 64 --max-length 64 --alphabet "
    "0123456789= > "
    "/dev/null 2>&1; "
)
_TRL = _TINY + "cp $S/preference_job.py train.py; "
_ACCELERATE = f"accelerate launch --cpu --num_processes 2 --main_process_port {_PORT} train.py "
_NANO = (
    "lockstep tiny $PWD/models/nano > /dev/null 2>&1; export VLLM_CPU_KVCACHE_SPACE=1 "
    "VLLM_CPU_OMP_THREADS_BIND=nobind; "
)
_SERVE = "python -m vllm.entrypoints.openai.api_server --model models/nano --enforce-eager --dtype float32 "
_CURL = "curl -s -m 60 localhost:{port}/v1/{path} -H 'Content-Type: application/json' -d '{body}' > /dev/null; "
_DEEP = f"cp $S/framework_job.py job.py; deepspeed --num_gpus 2 --master_port {_PORT} job.py zero "
_OWN = "python $S/lockstep_job.py prepare {}; "
_STRIKE = "python $S/lockstep_job.py strike {} & "


def _side(name: str, cls: str, script: str, framework: str = "Python processes", **about: object) -> Entry:
    return Entry(name, framework, cls, _HELP + script, **{"limit_s": 240, **about})  # type: ignore[arg-type]


def _ray(name: str, framework: str, cls: str, script: str, before: str = "", **about: object) -> Entry:
    return Entry(name, framework, cls, _RAY.format(before) + script, venv="scale", limit_s=360, **about)  # type: ignore[arg-type]


def _job(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, script, **{"limit_s": 420, **about})  # type: ignore[arg-type]


ENTRIES = [
    # Programs beside a training.
    _side("corpus-tokenized", "benign", "tokenize", home="/data/corpus"),
    _side("judge-limits", "benign", "judge --port 28802", venv="scale", home="/srv/judge"),
    _side("judge-always-limited", "remote_service_timeout", "judge --fault limited --port 28803", venv="scale"),
    _side("programs-executed", "benign", "sandbox"),
    _side("environments-closed", "benign", "environments"),
    _side(
        "environments-grid",
        "rank_exception_masked",
        "environments --fault grid",
        culprit=("env-2",),
    ),
    _side("archive-cut", "storage_fault", "archive --fault cut", also_ok=("rank_exception_masked",)),
    _side("scorers-spawned", "mp_start_method", "spawn"),
    _side("packing-limit", "host_oom", "memory", also_ok=("os_limits",)),
    _side("harness-tables", "benign", "evaluate", home="/home/ines/eval"),
    # Ray.
    _ray("train-once-failed", "Ray Train", "benign", "train-once", host="ray-head"),
    # Meant to start a cluster of its own, but another one was there.
    _ray("driver-meets-cluster", "Ray", "config_error", "policy joined", host="ray-head", also_ok=("ray_node_or_gcs",)),
    _ray(
        "train-price-absent",
        "Ray Train",
        "rank_exception_masked",
        "train-fails",
        host="ray-head",
        culprit=(1,),
        also_ok=("config_error",),
    ),
    _ray(
        "train-no-cards",
        "Ray Train",
        "ray_resources_pending",
        "gpus",
        host="ray-head",
        also_ok=("config_error",),
    ),
    _ray(
        "policy-view",
        "Ray actors",
        "rank_exception_masked",
        "policy",
        host="ray-head",
        culprit=(1,),
        alt=(("PolicyTrainer",),),
        also_ok=("config_error",),
    ),
    _ray("rollouts-dropped", "Ray actors", "benign", "sampled", host="ray-head"),
    _ray(
        "pack-memory-monitor",
        "Ray tasks",
        "host_oom",
        "memory",
        before="export RAY_memory_usage_threshold=0.05 RAY_memory_monitor_refresh_ms=200; ",
        host="ray-head",
        culprit=("pack_dataset",),
        alt=(("ray-head",),),
    ),
    _ray("replay-node-left", "Ray actors", "ray_node_or_gcs", "leaving", host="ray-head", also_ok=("external_kill",)),
    _ray(
        "reward-actor-absent",
        "Ray actors",
        "config_error",
        "no-reward",
        also_ok=("ray_node_or_gcs", "rank_exception_masked"),
    ),
    # vLLM.
    _job(
        "vllm-adapter-absent",
        "vLLM",
        "config_error",
        _NANO + _SERVE + "--port 28811 --max-model-len 128 --enable-lora --lora-modules sql=adapters/sql-v3",
        venv="scale",
        also_ok=("storage_fault", "remote_service_timeout", "vllm_engine_failure"),
    ),
    # Meant to refuse the length, but the package that provides the command has another name.
    _job(
        "vllm-metadata-absent",
        "vLLM",
        "version_mismatch",
        _NANO + "vllm serve models/nano --enforce-eager --dtype float32 --port 28812 --max-model-len 65536",
        venv="scale",
        also_ok=("config_error", "vllm_engine_failure"),
    ),
    _job(
        "vllm-length-beyond",
        "vLLM",
        "config_error",
        _NANO + _SERVE + "--port 28812 --max-model-len 65536",
        venv="scale",
        also_ok=("vllm_engine_failure",),
    ),
    _job(
        "vllm-mixed-requests",
        "vLLM",
        "benign",
        _NANO + _SERVE + "--port 28813 --max-model-len 128 & v=$!; for i in $(seq 100); do sleep 2; curl -sf "
        "localhost:28813/health && break; "
        "done; "
        + _CURL.format(
            port=28813, path="completions", body='{"model": "models/nano", "prompt": "1+1=", "max_tokens": 8, "n": 4}'
        )
        + _CURL.format(
            port=28813, path="completions", body='{"model": "models/nano", "prompt": "1+1=", "max_tokens": 4000}'
        )
        + _CURL.format(port=28813, path="completions", body='{"model": "models/nano", "prompt": ')
        + _CURL.format(port=28813, path="embeddings", body='{"model": "models/nano", "input": "1"}')
        + "curl -s -m 1 localhost:28813/v1/completions -H 'Content-Type: application/json' -d "
        '\'{"model": "models/nano", "prompt": "1+1=", "max_tokens": 110, "n": 40}\' > /dev/null; sleep 12; kill '
        "-TERM $v; wait $v; :",
        venv="scale",
        limit_s=300,
        host="infer-9",
    ),
    # TRL, accelerate, DeepSpeed.
    _job("sft-launched", "TRL, accelerate", "benign", _TRL + _ACCELERATE + "sft", home="/home/ines/trl"),
    _job("dpo-plain-lines", "TRL", "benign", _TRL + "python train.py dpo"),
    _job("grpo-exact", "TRL", "benign", _TRL + "python train.py grpo --steps 8"),
    _job(
        "grpo-rewards-short",
        "TRL",
        "rank_exception_masked",
        _TRL + "python train.py grpo --fault short",
        also_ok=("config_error",),
    ),
    # Meant to fail on the second rank, but this launcher starts one process.
    _job("grpo-launched", "TRL, accelerate", "benign", _TRL + _ACCELERATE + "grpo --fault json"),
    _job(
        "grpo-answer-no-json",
        "TRL",
        "rank_exception_masked",
        _TRL + f"torchrun --nproc-per-node 2 --master-port {_PORT} train.py grpo --fault json",
        culprit=(1,),
    ),
    _job(
        "dpo-column-absent",
        "TRL",
        "config_error",
        _TRL + "python train.py dpo --fault column",
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "sft-no-template",
        "TRL",
        "config_error",
        _TRL + "python train.py sft --fault chat",
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "launch-configuration-absent",
        "accelerate",
        "config_error",
        _TRL + "accelerate launch --config_file configs/zero3_h100.yaml train.py sft",
        also_ok=("storage_fault",),
    ),
    # Meant to be healthy, but the script does not know the option that the launcher gives it.
    _job("deep-launched", "DeepSpeed", "config_error", _DEEP, host="dgx-04"),
    # Lockstep.
    _job(
        "own-scorer-killed",
        "Lockstep",
        "benign",
        _OWN.format("steps=16") + _STRIKE.format("scorer-0 6 SIGKILL") + "lockstep train run.yaml; wait; :",
    ),
    _job(
        "own-supervised",
        "Lockstep",
        "benign",
        _OWN.format("recipe=sft steps=30 lr=3.0e-3") + "lockstep train run.yaml; :",
    ),
    _job(
        "own-judge-asleep",
        "Lockstep",
        "benign",
        _OWN.format("steps=12 reward=judged")
        + _STRIKE.format("engine-0 4 SIGSTOP")
        + "timeout -s TERM 220 lockstep train run.yaml; wait; :",
        also_ok=("unknown",),
        sufficiency="hint",
    ),
    _job(
        "own-terminated",
        "Lockstep",
        "external_kill",
        _OWN.format("recipe=sft steps=4000")
        + _STRIKE.format("controller 20 SIGTERM")
        + "lockstep train run.yaml; wait; :",
        also_ok=("benign",),
    ),
]
