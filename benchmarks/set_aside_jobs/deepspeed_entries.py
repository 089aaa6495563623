"""Jobs of DeepSpeed: its launcher, on one host or with a hostfile, two ranks on gloo."""

from benchmarks.set_aside_jobs.entry import Entry

_TRAIN = "cp $S/deepspeed_job.py train.py; "
_ONE = _TRAIN + "deepspeed --num_gpus 2 --master_port $((20000 + RANDOM % 9000)) train.py "
_HOSTS = (
    _TRAIN
    + "mkdir bin; for n in pdsh ssh; do (echo '#!'$(which python); cat $S/fake_pdsh.py) > bin/$n; chmod +x bin/$n; "
    "done; export PATH=$PWD/bin:$PATH; printf 'worker-1 slots=1\\nworker-2 slots=1\\n' > hostfile; "
)
_LAUNCH = "deepspeed --hostfile hostfile --master_addr 127.0.0.1 --master_port $((20000 + RANDOM % 9000)) "


def _entry(name: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, "DeepSpeed", cls, script, **about)  # type: ignore[arg-type]


ENTRIES = [
    _entry("deepspeed-zero2", "benign", _ONE + "--steps 60 --eval_every 30", host="dgx-11"),
    _entry(
        "deepspeed-zero1-resumed",
        "benign",
        _ONE
        + "--stage 1 --steps 20 --save_every 10 --resume ckpt; sleep 1; "
        + _ONE
        + "--stage 1 --steps 40 --save_every 20 --resume ckpt",
        home="/data/users/jonas/ds",
    ),
    _entry(
        "deepspeed-hostfile",
        "benign",
        _HOSTS + _LAUNCH + "train.py --steps 40 --stage 3 --eval_every 20",
        host="head-1",
    ),
    _entry(
        "deepspeed-slow-eval",
        "benign",
        "export EVAL_SLEEP=1.3; " + _ONE + "--steps 24 --stage 3 --eval_every 8 --eval_batches 9 9 --log_every 2",
    ),
    # Meant to hang, but these parameters stay gathered: the run evaluates unequal numbers of batches and ends well.
    _entry(
        "deepspeed-zero3-eval-counts",
        "benign",
        _ONE + "--steps 60 --stage 3 --eval_every 20 --eval_batches 5 8",
    ),
    _entry(
        "deepspeed-unreachable-worker",
        "rendezvous_incomplete",
        _HOSTS + "echo worker-2 > unreachable; " + _LAUNCH + "--no_ssh_check train.py --steps 10",
        culprit=("worker-2",),
        also_ok=("network_blocked", "master_unreachable"),
        host="head-1",
        limit_s=180,
    ),
    _entry(
        "deepspeed-hostfile-format",
        "config_error",
        _HOSTS + "printf 'worker-1 slots=1\\nworker-1 slots=1\\n' > hostfile; " + _LAUNCH + "train.py; "
        "printf 'worker-1 8\\nworker-2 8\\n' > hostfile; echo '$ # second try'; " + _LAUNCH + "train.py",
        host="head-1",
    ),
    _entry("deepspeed-batch-sizes", "config_error", _ONE + "--train_batch 12"),
    _entry(
        "deepspeed-port-taken",
        "port_in_use",
        _TRAIN + "python -m http.server 29871 > /dev/null 2>&1 & p=$!; sleep 3; "
        "deepspeed --num_gpus 2 --master_port 29871 train.py --steps 5; kill $p",
        host="dgx-11",
    ),
    _entry(
        "deepspeed-swapped-groups",
        "rank_divergent_branch",
        _ONE + "--steps 40 --swap_groups",
        culprit=(1,),
        alt=((0,), (0, 1)),
    ),
    _entry(
        "deepspeed-member-lists",
        "rank_divergent_branch",
        _ONE + "--steps 40 --pair_group",
        culprit=(0,),
        alt=((1,), (0, 1)),
        also_ok=("config_error",),
        sufficiency="hint",
    ),
    _entry(
        "deepspeed-leaves-early",
        "uneven_data",
        _ONE + "--steps 60 --leave_at 23",
        culprit=(1,),
        also_ok=("rank_divergent_branch",),
    ),
    _entry(
        "deepspeed-one-rank-saves",
        "checkpoint_timeout",
        _ONE + "--steps 60 --save_every 20 --save_main_only --stage 3",
        culprit=(0,),
        alt=((1,), (0, 1)),
        also_ok=("rank_divergent_branch",),
    ),
    _entry(
        "deepspeed-address-space",
        "host_oom",
        _ONE + "--heavy_rows 900000000 --limit_mb 9000",
        culprit=(1,),
        also_ok=("os_limits",),
    ),
    _entry(
        "deepspeed-stopped-rank",
        "unknown",
        _TRAIN
        + "(sleep 22; for p in $(pgrep -f '[t]rain.py --local_rank=1 --steps 77'); do kill -STOP $p; done; sleep 55; "
        "for p in $(pgrep -f '[t]rain.py --local_rank=1 --steps 77'); do kill -9 $p; done) & "
        "deepspeed --num_gpus 2 --master_port $((20000 + RANDOM % 9000)) train.py --steps 77 --sleep 0.5 --log_every 2",
        culprit=(1,),
        also_ok=("external_kill", "slow_rank_preprocess"),
        sufficiency="hint",
    ),
    _entry(
        "deepspeed-metric-widths",
        "rank_divergent_branch",
        _ONE + "--steps 60 --wide_metrics",
        culprit=(1,),
        alt=((0,), (0, 1)),
    ),
    _entry(
        "deepspeed-rank-logs",
        "benign",
        _TRAIN + "deepspeed --num_gpus 2 --master_port $((20000 + RANDOM % 9000)) --enable_each_rank_log=$OUT/ranks "
        "train.py --steps 60 --stage 1 --eval_every 20 --save_every 30",
        home="/scratch/mrk/exp3",
    ),
]
