"""Jobs of `benchmarks/cases/sixth_set_aside` that ran: services beside a training, PyTorch, accelerate,
transformers, Ray, vLLM, Lockstep."""

from benchmarks.set_aside_jobs.entry import Entry

_PORT = "$((20000 + RANDOM % 9000))"
_CREW = "cp $S/crew_job.py crew.py; python crew.py "
_STUDIO = "cp $S/studio_job.py studio.py; "
_RUN = f"torchrun --nproc-per-node 2 --master-port {_PORT} studio.py "
_RAY = (
    "unset TMPDIR; export RAY_raylet_start_wait_time_s=250 RAY_AUTH_MODE=disabled; timeout -s INT 200 python studio.py "
)
_NANO = (
    "lockstep tiny $PWD/weights/nano > /dev/null 2>&1; "
    "export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind; "
)
_SERVE = (
    "python -m vllm.entrypoints.openai.api_server --model weights/nano --enforce-eager --dtype {} --max-model-len 128 "
)
_OWN = "python $S/lockstep_job.py prepare {}; "


def _crew(name: str, cls: str, script: str, framework: str = "HTTP services", **about: object) -> Entry:
    given = {"limit_s": 150, "host": "rl-box", **about}
    return Entry(name, framework, cls, _CREW + script, **given)  # type: ignore[arg-type]


def _studio(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, _STUDIO + script, **{"limit_s": 240, "host": "hv-21", **about})  # type: ignore[arg-type]


def _ray(name: str, cls: str, script: str, framework: str = "Ray actors", **about: object) -> Entry:
    given = {"venv": "scale", "limit_s": 230, "host": "ray-box", **about}
    return Entry(name, framework, cls, _STUDIO + _RAY + script, **given)  # type: ignore[arg-type]


def _vllm(name: str, cls: str, script: str, **about: object) -> Entry:
    given = {"venv": "scale", "limit_s": 280, "host": "infer-4", **about}
    return Entry(name, "vLLM", cls, _NANO + script, **given)  # type: ignore[arg-type]


def _own(name: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, "Lockstep", cls, script, **{"limit_s": 280, **about})  # type: ignore[arg-type]


ENTRIES = [
    # Services beside a training.
    _crew("crew-steady", "benign", "steady"),
    _crew("crew-judge-loads", "benign", "judge-503-once --form json"),
    _crew("crew-cold-sampler", "benign", "warmup --form logfmt"),
    _crew("crew-board-gone", "benign", "board-crashes --form journal"),
    _crew("crew-endless-programs", "benign", "runner-slow --files"),
    _crew("crew-programs-again", "benign", "runner-slow --form logfmt"),
    _crew("crew-board-template", "benign", "board-crashes --files"),
    _crew("crew-graphs-compiled", "benign", "warmup --form journal"),
    _crew("crew-judge-files", "benign", "judge-503-once --files"),
    _crew(
        "crew-preempted",
        "benign",
        'preempted --form json; echo \'{"severity": "INFO", "message": "node replaced, container restarted"}\'; '
        "python crew.py preempted --form json",
        also_ok=("external_kill",),
    ),
    _crew(
        "crew-judge-overloaded",
        "remote_service_timeout",
        "judge-503 --form logfmt",
        culprit=("reward-api",),
        alt=(("127.0.0.1",),),
        also_ok=("rank_exception_masked",),
    ),
    _crew(
        "crew-judge-mute",
        "remote_service_timeout",
        "judge-hangs --form json",
        culprit=("reward-api",),
        alt=(("127.0.0.1",),),
        also_ok=("rank_exception_masked",),
    ),
    # The call is made again, without the rubric that the judge lacks, and the training reaches its end.
    _crew("crew-judge-rubric", "benign", "judge-key"),
    _crew(
        "crew-judge-settings",
        "config_error",
        "judge-settings --form journal",
        culprit=("reward-api",),
        also_ok=("rank_exception_masked",),
    ),
    _crew(
        "crew-sampler-token",
        "rank_exception_masked",
        "sampler-raises --files",
        culprit=("sampler-2",),
        also_ok=("config_error", "vllm_engine_failure"),
    ),
    _crew(
        "crew-sampler-no-block",
        "remote_service_timeout",
        "sampler-stuck --form json",
        culprit=("sampler-0",),
        also_ok=("vllm_engine_failure", "rank_exception_masked", "slow_rank_preprocess", "unknown"),
    ),
    _crew(
        "crew-sampler-killed",
        "external_kill",
        "sampler-killed --form journal",
        culprit=("sampler-1",),
        also_ok=("host_oom", "vllm_engine_failure"),
    ),
    _crew(
        "crew-sampler-native",
        "rank_exception_masked",
        "sampler-segv",
        culprit=("sampler-2",),
        also_ok=("framework_bug", "external_kill", "unknown", "vllm_engine_failure"),
    ),
    _crew(
        "crew-weights-refused",
        "vllm_weight_sync",
        "sampler-shape --form logfmt",
        culprit=("sampler-1",),
        also_ok=("rank_exception_masked", "config_error", "version_mismatch"),
    ),
    _crew(
        "crew-prompts-torn",
        "rank_exception_masked",
        "feeder-cut --form json",
        culprit=("prompt-feeder",),
        also_ok=("storage_fault", "config_error"),
    ),
    _crew("crew-runner-files", "os_limits", "runner-files --files", culprit=("code-runner",)),
    _crew(
        "crew-store-taken",
        "port_in_use",
        "store-port",
        culprit=("kv-store",),
        alt=(("127.0.0.1",),),
    ),
    _crew("crew-no-spread", "nan_or_inf", "spread-zero --form journal", also_ok=("rank_exception_masked",)),
    # Ranks of PyTorch and accelerate.
    _studio(
        "studio-four-channels",
        "PyTorch DDP (gloo)",
        "rank_exception_masked",
        _RUN + "loader",
        culprit=(1,),
        also_ok=("storage_fault",),
    ),
    _studio("studio-lock-gathered", "PyTorch", "rank_exception_masked", _RUN + "objects", culprit=(1,)),
    _studio(
        "studio-chain-skipped",
        "PyTorch",
        "rank_divergent_branch",
        _RUN + "chain",
        culprit=(1,),
        alt=((0,),),
        also_ok=("slow_collective_timeout", "rank_exception_masked", "unknown"),
        sufficiency="hint",
    ),
    _studio(
        "studio-spawned-lambda",
        "PyTorch",
        "mp_start_method",
        _RUN + "spawn-collate",
        also_ok=("rank_exception_masked",),
        alt=((0, 1),),
    ),
    _studio("studio-accumulated", "accelerate", "benign", _RUN + "acc-fine"),
    _studio("studio-fp12", "accelerate", "config_error", _RUN + "acc-precision", also_ok=("rank_exception_masked",)),
    _studio("studio-inputs-key", "accelerate", "rank_exception_masked", _RUN + "acc-raises", culprit=(1,)),
    _studio("studio-loss-infinite", "accelerate", "nan_or_inf", _RUN + "acc-nan"),
    _studio(
        "studio-trainer-twice", "transformers Trainer", "benign", "python studio.py hf-plain; python studio.py hf-plain"
    ),
    _studio(
        "studio-row-shorter",
        "transformers Trainer",
        "rank_exception_masked",
        "python studio.py hf-lengths",
        also_ok=("config_error", "uneven_data"),
    ),
    # Ray.
    _ray("ray-judge-restarted", "benign", "ray-fine"),
    _ray(
        "ray-store-exits",
        "rank_exception_masked",
        "ray-store-exits",
        culprit=("ParameterStore",),
        alt=(("parameter-store",),),
        also_ok=("external_kill", "unknown", "ray_node_or_gcs", "os_limits"),
        sufficiency="hint",
    ),
    _ray("ray-score-text", "rank_exception_masked", "ray-judge-parses", culprit=("Judge",)),
    _ray("ray-wants-tpu", "ray_resources_pending", "ray-tpu", also_ok=("config_error",)),
    # vLLM.
    _vllm("vllm-dtype-absent", "config_error", _SERVE.format("float24") + "--port 28952"),
    # Lockstep.
    _own("own-judge-naps", "benign", _OWN.format("steps=8 reward=judged") + "lockstep train run.yaml; :"),
    _own(
        "own-row-torn",
        "config_error",
        _OWN.format("steps=8 bad_row=9") + "lockstep train run.yaml; :",
        also_ok=("storage_fault", "rank_exception_masked"),
    ),
]
