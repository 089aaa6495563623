"""Jobs of `benchmarks/cases/seventh_set_aside` that ran: an RL post-training of its own with several log forms, a
reward service, and fine-tunings with transformers and accelerate, healthy or with the fault that the entry names."""

from benchmarks.set_aside_jobs.entry import Entry

_PORT = "$((20000 + RANDOM % 9000))"
_POST = "cp $S/posttrain_job.py train_grpo.py; cp $S/judge_job.py reward_server.py; P=" + _PORT + "; "
_RUN = "torchrun --nproc-per-node 2 --master-port $P train_grpo.py "
_JUDGE = "python reward_server.py $((P + 1)) {} & J=$!; sleep 2; "
_ASK = "--judge http://127.0.0.1:$((P + 1))/score "
_END = "; C=$?; kill $J; exit $C"
_HANDS = (
    "export MASTER_ADDR={} MASTER_PORT=$P WORLD_SIZE={}; "
    "for r in {}; do RANK=$r LOCAL_RANK=$r python train_grpo.py {} > $OUT/rank$r.log 2>&1 & done; wait; "
)
_TUNE = "cp $S/tuning_job.py tune.py; P=" + _PORT + "; T='torchrun --nproc-per-node 2 --master-port '$P' tune.py'; "
_HANGS = ("slow_collective_timeout", "rank_exception_masked", "watchdog_or_heartbeat")


def _post(name: str, cls: str, script: str, **about: object) -> Entry:
    given = {"limit_s": 150, "host": "rl-node-3", **about}
    return Entry(name, "PyTorch DDP (gloo), GRPO loop", cls, _POST + script, **given)  # type: ignore[arg-type]


def _tune(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, _TUNE + script, **{"limit_s": 320, "host": "sft-12", **about})  # type: ignore[arg-type]


ENTRIES = [
    # Healthy.
    _post("grpo-rich", "benign", _RUN + "--form rich --every"),
    _post("grpo-json-noise", "benign", _RUN + "--form json --noise --every"),
    _post("grpo-absl", "benign", _RUN + "--form absl"),
    _post("grpo-bar-noise", "benign", _RUN + "--form tqdm --noise --steps 30"),
    _post("grpo-only-evaluates", "benign", _RUN + "--evaluate --form loguru"),
    _post("grpo-patience", "benign", _RUN + "--patience 3 --steps 60 --form loguru"),
    _post("grpo-resumed", "benign", "for n in 8 16; do " + _RUN + "--save ckpt --steps $n --noise; done"),
    _post("grpo-judge-busy", "benign", _JUDGE.format("busy") + _RUN + _ASK + "--form json --every" + _END),
    _post("grpo-judge-served", "benign", _JUDGE.format("well") + _RUN + _ASK + "--form rich" + _END),
    _post(
        "grpo-elastic-again",
        "benign",
        "torchrun --nproc-per-node 2 --max-restarts 2 --master-port $P train_grpo.py --fault once --save ckpt --every",
    ),
    _post("grpo-rank-files", "benign", _HANDS.format("127.0.0.1", 2, "0 1", "--form loguru --every --noise")),
    _post("grpo-slow-once", "benign", _RUN + "--fault pause --seconds 9 --every"),
    _post("grpo-late-start", "benign", _RUN + "--fault late --seconds 8 --form absl"),
    _tune("sft-two-ranks", "transformers Trainer", "benign", "$T plain"),
    _tune("sft-stops-early", "transformers Trainer", "benign", "python tune.py early"),
    _tune("sft-resumed", "transformers Trainer", "benign", "$T plain; rm -r out/checkpoint-18; $T resumed"),
    _tune("sft-evaluates", "transformers Trainer", "benign", "$T evaluates"),
    _tune("dpo-accelerate", "accelerate", "benign", "$T dpo"),
    # The reward.
    _post("grpo-answer-unclosed", "rank_exception_masked", _RUN + "--fault reward --every", culprit=(1,)),
    _post("grpo-reward-three-wide", "rank_exception_masked", _RUN + "--fault shape --on 0 --form loguru", culprit=(0,)),
    _post(
        "grpo-judge-refused",
        "remote_service_timeout",
        _RUN + _ASK + "--form json --every",
        culprit=("127.0.0.1",),
        alt=(("127.0.0.1:21277",), (0, 1), (0,), (1,)),
        also_ok=("rank_exception_masked",),
    ),
    _post(
        "grpo-judge-slow",
        "remote_service_timeout",
        _JUDGE.format("slow") + _RUN + _ASK + "--seconds 3 --every" + _END,
        culprit=("127.0.0.1",),
        alt=(("127.0.0.1:24471",), ("reward-server",), (0, 1), (0,), (1,)),
        also_ok=("rank_exception_masked",),
    ),
    # Ranks that go, stop or do something else.
    _post(
        "grpo-ratios-of-one",
        "rank_divergent_branch",
        _RUN + "--fault branch --every",
        culprit=(1,),
        also_ok=("rank_exception_masked", "slow_collective_timeout", "unknown"),
    ),
    _post(
        "grpo-shard-ends",
        "uneven_data",
        _RUN + "--fault leave --every",
        culprit=(1,),
        also_ok=("rank_divergent_branch", "rank_exception_masked"),
    ),
    _post("grpo-killed", "external_kill", _RUN + "--fault kill --form rich", culprit=(1,), also_ok=("host_oom",)),
    _post(
        "grpo-stopped",
        "unknown",
        _HANDS.format("127.0.0.1", 3, "0 1 2", "--fault stop --on 2 --timeout 12 --every").replace(
            "wait; ", "sleep 80; kill -9 $(jobs -p); wait; exit 1"
        ),
        culprit=(2,),
        also_ok=(*_HANGS, "slow_rank_preprocess", "external_kill"),
        sufficiency="hint",
    ),
    _post(
        "grpo-tokenizes-alone",
        "slow_rank_preprocess",
        _RUN + "--fault tokenize --on 0 --seconds 40 --timeout 12 --every",
        culprit=(0,),
        also_ok=("slow_collective_timeout",),
    ),
    _post("grpo-loss-nan", "nan_or_inf", _RUN + "--fault nan --form loguru", culprit=(1,)),
    # Machines.
    _post(
        "grpo-allocation",
        "host_oom",
        "(ulimit -v 16000000; " + _RUN + "--fault memory --every)",
        culprit=(1,),
        also_ok=("os_limits", "rank_exception_masked"),
    ),
    _post(
        "grpo-disk-full",
        "storage_fault",
        'mkdir ckpt; export P; unshare -m bash -c "mount -t tmpfs -o size=12m none ckpt; '
        + _RUN
        + '--fault disk --save ckpt"',
        culprit=(0,),
        also_ok=("rank_exception_masked",),
        sufficiency="hint",
    ),
    _post(
        "grpo-port-held",
        "port_in_use",
        "python -m http.server $P > /dev/null 2>&1 & J=$!; sleep 2; "
        + _HANDS.format("127.0.0.1", 2, "0 1", "")
        + "kill $J",
        also_ok=("master_unreachable",),
    ),
    _post(
        "grpo-third-absent",
        "rendezvous_incomplete",
        _HANDS.format("127.0.0.1", 3, "0 1", "--timeout 15 --every"),
        culprit=(2,),
        also_ok=("master_unreachable", "config_error"),
    ),
    _post(
        "grpo-head-absent",
        "master_unreachable",
        _HANDS.format("127.0.0.1", 2, "1", "--timeout 12 --every"),
        culprit=("127.0.0.1",),
        alt=((0,), (1,)),
        also_ok=("rendezvous_incomplete",),
    ),
    # Models, data and weights.
    _post(
        "grpo-vocabulary-larger",
        "config_error",
        _RUN + "--fault vocabulary --form json",
        also_ok=("rank_exception_masked", "version_mismatch"),
    ),
    _post(
        "grpo-engine-wider",
        "vllm_weight_sync",
        _RUN + "--fault weights --every",
        culprit=(1,),
        also_ok=("rank_exception_masked", "config_error", "version_mismatch"),
    ),
    _tune(
        "sft-loader-killed",
        "transformers Trainer",
        "external_kill",
        "$T worker-killed",
        culprit=(0,),
        alt=(("5006",),),
        also_ok=("host_oom", "shm_too_small", "rank_exception_masked"),
    ),
    _tune(
        "sft-checkpoint-torn",
        "transformers Trainer",
        "storage_fault",
        "python tune.py plain > /dev/null 2>&1; $T torn",
        also_ok=("rank_exception_masked", "config_error"),
    ),
    _tune(
        "dpo-rejected-absent",
        "accelerate",
        "rank_exception_masked",
        "$T dpo-raises",
        culprit=(1,),
        also_ok=("config_error",),
    ),
]
