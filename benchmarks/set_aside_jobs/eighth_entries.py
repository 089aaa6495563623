"""Jobs of `benchmarks/cases/eighth_set_aside` that ran: preference tuning with FSDP2 and DDP, an RL run of three kinds
of processes, fine-tunings with transformers, PEFT and accelerate, Ray actors, vLLM; healthy or with the fault named."""

from benchmarks.set_aside_jobs.entry import Entry

_PORT = "$((20000 + RANDOM % 9000))"
_SHARD = "cp $S/shardwise_job.py pref_trainer.py; P=" + _PORT + "; "
_RUN = "torchrun --nproc-per-node 2 --master-port $P pref_trainer.py "
_HANDS = (
    "export MASTER_ADDR={} MASTER_PORT=$P WORLD_SIZE={}; "
    "for r in {}; do RANK=$r LOCAL_RANK=$r python pref_trainer.py {} > $OUT/pref-rank-$r.txt 2>&1 & done; wait; "
)
_TRIO = (
    "cp $S/trio_job.py trio.py; P=" + _PORT + "; T='python trio.py'; "
    "$T grader --base $P $FAULT > $OUT/grader.log 2>&1 & K=$!; "
    'for i in 0 1; do $T sampler --index $i --base $P $FAULT > $OUT/sampler-$i.log 2>&1 & K="$K $!"; done; '
    "$T trainer --base $P $FAULT > $OUT/trainer.log 2>&1; C=$?; kill $K; sleep 2; kill -9 $K 2> /dev/null; "
    "echo trainer exited with $C"
)
_MIX = "cp $S/tuner_mix_job.py finetune.py; T='torchrun --nproc-per-node 2 --master-port '" + _PORT + "' finetune.py'; "
_RAY = (
    "cp $S/raypost_job.py posttrain.py; unset TMPDIR; "
    "export RAY_raylet_start_wait_time_s=250 RAY_AUTH_MODE=disabled; timeout -s INT 200 python posttrain.py "
)
_NANO = (
    "lockstep tiny $PWD/policy/nano > /dev/null 2>&1; "
    "export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind; "
)
_VLLM = _NANO + "cp $S/vllm_offline.py rollout.py; python rollout.py policy/nano "
_RAISED = ("rank_exception_masked",)
_CRASH = ("framework_bug", "unknown", "external_kill")


def _shard(name: str, cls: str, script: str, framework: str = "PyTorch FSDP2 (gloo)", **about: object) -> Entry:
    return Entry(name, framework, cls, _SHARD + script, **{"limit_s": 150, "host": "pref-node-2", **about})  # type: ignore[arg-type]


def _trio(name: str, cls: str, fault: str = "", **about: object) -> Entry:
    script = f"FAULT='{fault}'; " + _TRIO
    return Entry(name, "HTTP services, RL loop", cls, script, **{"limit_s": 150, "host": "rollout-box", **about})  # type: ignore[arg-type]


def _mix(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, _MIX + script, **{"limit_s": 320, "host": "tune-4", **about})  # type: ignore[arg-type]


def _ray(name: str, cls: str, mode: str, **about: object) -> Entry:
    given = {"venv": "scale", "limit_s": 230, "host": "ray-head", **about}
    return Entry(name, "Ray, gloo", cls, _RAY + mode, **given)  # type: ignore[arg-type]


def _vllm(name: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, "vLLM", cls, script, **{"venv": "scale", "limit_s": 400, "host": "rollout-9", **about})  # type: ignore[arg-type]


ENTRIES = [
    # Healthy.
    _shard("pref-logfmt-saves", "benign", _RUN + "--save --all --noise"),
    _shard("pref-continued", "benign", _RUN + "--save --steps 16; " + _RUN + "--resume --save --form bracket --noise"),
    _shard("pref-csv-ddp", "benign", _RUN + "--ddp --form csv", framework="PyTorch DDP (gloo)"),
    _shard("pref-measured-only", "benign", _RUN + "--evaluate --form table --noise"),
    _shard("pref-one-nap", "benign", _RUN + "--fault nap --seconds 11 --form bracket --all"),
    _shard("pref-rank-texts", "benign", _HANDS.format("127.0.0.1", 2, "0 1", "--form host --all --noise")),
    _trio("trio-rate-limits", "benign", "--fault grader-limits"),
    _trio("trio-one-slow-answer", "benign", "--fault sampler-slow"),
    _trio("trio-preempted-saves", "benign", "--fault trainer-cut", also_ok=("external_kill",)),
    _mix("mix-lora", "transformers Trainer, PEFT", "benign", "$T lora"),
    _mix("mix-budget-stops", "transformers Trainer", "benign", "$T stops"),
    _mix("mix-push-fails", "transformers Trainer", "benign", "$T uploads"),
    _mix("mix-again", "transformers Trainer", "benign", "$T stops > /dev/null 2>&1; $T again"),
    _mix("mix-preprocess-late", "transformers Trainer", "benign", "$T preprocesses"),
    _mix("mix-distil", "accelerate", "benign", "$T distil"),
    _ray("raypost-restarts", "benign", "restarts"),
    _vllm("rollout-offline-nano", "benign", _VLLM + "--prompts 24 --tokens 24"),
    # Ranks that raise, crash, leave or wait.
    _shard("pref-token-outside", "rank_exception_masked", _RUN + "--fault token --all", culprit=(1,)),
    _shard("pref-native-crash", "rank_exception_masked", _RUN + "--fault segv --all", culprit=(1,), also_ok=_CRASH),
    _shard(
        "pref-second-forward",
        "rank_divergent_branch",
        _RUN + "--fault second-pass --all",
        culprit=(1,),
        also_ok=("slow_collective_timeout", *_RAISED),
    ),
    _shard(
        "pref-main-validates",
        "rank_divergent_branch",
        _RUN + "--fault main-evaluates --all --form bracket",
        culprit=(0,),
        alt=((1,), (0, 1)),
        also_ok=("slow_collective_timeout", "unknown", *_RAISED),
        sufficiency="hint",
    ),
    _shard(
        "pref-shard-over",
        "uneven_data",
        _HANDS.format("127.0.0.1", 2, "0 1", "--fault exit --all --form glog"),
        culprit=(1,),
        also_ok=("rank_divergent_branch", *_RAISED),
    ),
    _shard(
        "pref-late-save",
        "checkpoint_timeout",
        _RUN + "--fault slow-save --save --seconds 45 --timeout 15 --all",
        culprit=(0,),
        also_ok=("slow_collective_timeout", "slow_rank_preprocess", "unknown"),
        sufficiency="hint",
    ),
    _shard("pref-not-a-number", "nan_or_inf", _RUN + "--fault nan --form bracket", also_ok=()),
    _shard("pref-few-handles", "os_limits", _RUN + "--fault files --ddp", framework="PyTorch DDP (gloo)", culprit=(1,)),
    # Settings, machines.
    _shard(
        "pref-three-by-two",
        "config_error",
        "torchrun --nproc-per-node 3 --master-port $P pref_trainer.py --fault groups --form glog",
        also_ok=_RAISED,
    ),
    _shard("pref-newer-import", "version_mismatch", _RUN + "--fault version", culprit=(1,), also_ok=_RAISED),
    _shard(
        "pref-no-such-interface",
        "wrong_network_interface",
        "export GLOO_SOCKET_IFNAME=bond7; " + _RUN,
        culprit=("bond7",),
        alt=((0, 1), (0,), (1,)),
        also_ok=("config_error",),
    ),
    _shard(
        "pref-disk-small",
        "storage_fault",
        'mkdir -p runs; export P; unshare -m bash -c "mount -t tmpfs -o size=24k none runs; ' + _RUN + '--save --all"',
        also_ok=("rank_exception_masked", "os_limits"),
    ),
    _shard(
        "pref-shard-file-gone",
        "storage_fault",
        _RUN
        + "--save --steps 16 > /dev/null 2>&1; rm runs/a/step-16/__1_0.distcp; "
        + _RUN
        + "--resume --form bracket",
        limit_s=300,
        also_ok=("rank_exception_masked", "config_error"),
    ),
    _shard(
        "pref-one-of-two-hosts",
        "rendezvous_incomplete",
        "timeout -s INT 60 torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:$P "
        "--rdzv-conf join_timeout=25 pref_trainer.py",
        also_ok=("master_unreachable", "external_kill"),
    ),
    # Services.
    _trio(
        "trio-sampler-lost",
        "external_kill",
        "--fault sampler-dies",
        culprit=("sampler-1",),
        alt=(("16474",),),
        also_ok=(
            "remote_service_timeout",
            "vllm_engine_failure",
            "host_oom",
            "unknown",
        ),
    ),
    _trio(
        "trio-sampler-mute",
        "remote_service_timeout",
        "--fault sampler-stuck --tries 2",
        culprit=("sampler-0",),
        also_ok=(
            "vllm_engine_failure",
            "slow_rank_preprocess",
        ),
    ),
    _trio(
        "trio-grader-hangs",
        "remote_service_timeout",
        "--fault grader-hangs --tries 2",
        culprit=("grader",),
        alt=(("127.0.0.1",),),
    ),
    _trio(
        "trio-rubric-unknown",
        "rank_exception_masked",
        "--fault grader-broken",
        culprit=("grader",),
        also_ok=(
            "config_error",
            "remote_service_timeout",
        ),
    ),
    _trio(
        "trio-weights-wider",
        "vllm_weight_sync",
        "--fault wide-weights",
        culprit=("trainer",),
        alt=(
            ("sampler-0",),
            ("sampler-0", "sampler-1"),
        ),
        also_ok=("rank_exception_masked", "config_error", "version_mismatch"),
    ),
    # Trainers.
    _mix("mix-row-longer", "transformers Trainer", "rank_exception_masked", "$T ragged", culprit=(1,)),
    _mix("mix-lora-target", "transformers Trainer, PEFT", "config_error", "$T lora-wrong", also_ok=_RAISED),
    _mix(
        "mix-folder-is-file",
        "transformers Trainer",
        "config_error",
        "$T readonly",
        culprit=(0,),
        also_ok=("storage_fault", *_RAISED),
    ),
    _mix(
        "mix-export-gathers",
        "accelerate",
        "rank_divergent_branch",
        "$T distil-extra",
        culprit=(0,),
        also_ok=(
            "rank_exception_masked",
            "slow_collective_timeout",
        ),
    ),
    # Ray, vLLM.
    _ray("raypost-format-key", "rank_exception_masked", "score-key", culprit=("Scorer",), alt=(("17006",),)),
    _ray(
        "raypost-rollout-killed",
        "external_kill",
        "rollout-killed",
        culprit=("RolloutWorker",),
        alt=(("17381",),),
        also_ok=(
            "host_oom",
            "rank_exception_masked",
            "unknown",
            "ray_node_or_gcs",
        ),
    ),
    _ray(
        "raypost-learner-shape", "rank_exception_masked", "learner-shape", culprit=("Learner",), alt=(("18025",), (1,))
    ),
    _ray("raypost-no-room", "ray_resources_pending", "no-room"),
    _vllm(
        "rollout-two-without-room",
        "config_error",
        _VLLM + """--engine '{"max_model_len": 90000}'""",
        also_ok=("vllm_engine_failure",),
    ),
]
