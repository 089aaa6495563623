"""Jobs of `benchmarks/cases/fourth_set_aside` that ran: gloo ranks of one script under many launchers."""

from benchmarks.set_aside_jobs.entry import Entry

_PORT = "$((20000 + RANDOM % 9000))"
_CLIP = "cp $S/pairs_job.py train_clip.py; cp $S/launch.py $TMPDIR; L='python '$TMPDIR/launch.py; "
_RUN = f"torchrun --nproc-per-node {{}} --master-port {_PORT} train_clip.py "
_TWO, _THREE = _RUN.format(2), _RUN.format(3)
_AGENT = (
    "torchrun --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:$p --rdzv-id clip --monitor-interval 1 "
)
_NODES = f"p={_PORT}; "
_OWN = (
    "printf '#!/bin/bash\\nif [ $RANK = 1 ]; then exec unshare -m bash -c \"mount -t tmpfs -o size={} tmpfs "
    "shards; exec "
    "python pretrain.py $*\"; fi; exec python pretrain.py $*\\n' > rank.sh; chmod +x rank.sh; mkdir shards; "
)
_GROUP = (
    "g=/sys/fs/cgroup/memory/clip$$; mkdir $g; echo 700M > $g/memory.limit_in_bytes; printf '#!/bin/bash\\nif [ "
    "$RANK = 2 ]; "
    "then echo $$ > '$g'/cgroup.procs; fi; exec python train_clip.py $*\\n' > rank.sh; chmod +x rank.sh; "
)
_HANGS = ("unknown", "rank_exception_masked", "watchdog_or_heartbeat", "slow_collective_timeout")


def _job(name: str, cls: str, script: str, framework: str = "PyTorch DDP (gloo)", **about: object) -> Entry:
    return Entry(name, framework, cls, _CLIP + script, **{"limit_s": 400, **about})  # type: ignore[arg-type]


ENTRIES = [
    # Healthy.
    _job("clip-titan-noise", "benign", _THREE + "--form titan --noise --snapshot clip.pt", home="/home/ines/clip"),
    _job(
        "clip-requeued",
        "benign",
        "for i in 1 2; do $L --style srun $([ $i = 1 ] && echo --after 28/60 --signal 0:1:SIGUSR1) -- python "
        "train_clip.py --snapshot "
        'clip.pt --steps 60 --rows 600 --sleep 0.3 --form logfmt; echo "clip.sbatch: attempt $i ended with $?"; done',
        framework="Slurm, gloo loop",
    ),
    _job(
        "clip-overflow",
        "benign",
        "$L --style stern --stamp clip-b7f4 -n 2 -- python train_clip.py --fault overflow --on -1 --form cloud",
        framework="Kubernetes, gloo loop",
        home="/workspace",
    ),
    _job(
        "clip-evaluated",
        "benign",
        "$L --style hydra -n 3 -- python train_clip.py --evaluate --steps 12 --sleep 0.05 --form bare --noise",
        framework="MPI, gloo loop",
    ),
    _job(
        "clip-prepared",
        "benign",
        "$L --style pdsh --stamp a0 -n 3 -- python train_clip.py --prepare --timeout 90 --seconds 24 --form glog",
        framework="PyTorch DDP (gloo)",
    ),
    _job(
        "shards-saved",
        "benign",
        "cp train_clip.py pretrain.py; torchrun --nproc-per-node 2 --master-port "
        f"{_PORT} --redirects 3 --log-dir $OUT/ranks pretrain.py --shard --noise --form rich; mkdir -p shards; "
        f"torchrun --nproc-per-node 2 --master-port {_PORT} pretrain.py --shard --own_shard shards --form rich "
        f"--steps 12",
        framework="PyTorch FSDP2",
    ),
    _job(
        "stages-steady",
        "benign",
        "mv train_clip.py pp_train.py; $L --style stamped --stamp pp-worker -n 4 -- python pp_train.py --stages --form "
        "cloud --steps 40 --sleep 0.1",
        framework="PyTorch pipeline (gloo)",
        home="/app",
    ),
    # Meant to end well, but the agents lose each other when the second one joins.
    _job(
        "nodes-one-late",
        "rendezvous_incomplete",
        _NODES
        + _AGENT
        + "--nnodes 1:2 --max-restarts 3 train_clip.py --snapshot clip.pt --steps 240 --rows 3000 --sleep 0.3 "
        "--form bare > $OUT/node-a.log 2>&1 & (sleep 80; exec "
        + _AGENT
        + "--nnodes 1:2 --max-restarts 3 train_clip.py "
        "--snapshot clip.pt --steps 240 --rows 3000 --sleep 0.3 --form bare) > $OUT/node-b.log 2>&1 & wait",
        framework="torchrun elastic (gloo)",
        also_ok=("framework_bug", "master_unreachable"),
    ),
    # A rank fails, waits or leaves.
    # Meant to recover, but no later attempt connects.
    _job(
        "clip-restarts-stale",
        "storage_fault",
        f"torchrun --nproc-per-node 2 --max-restarts 3 --master-port {_PORT} train_clip.py --fault flaky --at 14 "
        "--snapshot clip.pt --form glog",
        framework="torchrun elastic (gloo)",
        culprit=(1,),
        also_ok=("rank_exception_masked", "framework_bug"),
    ),
    _job(
        "clip-label-absent",
        "rank_exception_masked",
        _THREE + "--fault label --on 2 --workers 2 --form glog",
        culprit=(2,),
        also_ok=("config_error", "storage_fault"),
    ),
    _job(
        "clip-caption-longer",
        "rank_exception_masked",
        "torchrun --standalone --nproc-per-node 3 --max-restarts 1 train_clip.py --fault caption --on 1 --form bare",
        framework="torchrun elastic (gloo)",
        culprit=(1,),
        also_ok=("config_error",),
    ),
    _job(
        "clip-image-cut",
        "rank_exception_masked",
        "$L --style stamped --stamp clip-master -n 3 --grace 5 -- python train_clip.py --fault image --on 2 "
        "--form cloud",
        framework="Kubernetes, gloo loop",
        culprit=(2,),
        also_ok=("storage_fault",),
        home="/workspace",
    ),
    _job(
        "clip-loader-crash",
        "rank_exception_masked",
        "$L --style hydra -n 3 --grace 6 -- python train_clip.py --fault worker --on 0 --workers 2 --form logfmt",
        framework="MPI, gloo loop",
        culprit=(0,),
        also_ok=("unknown", "framework_bug", "external_kill", "shm_too_small"),
        sufficiency="hint",
    ),
    _job(
        "clip-loader-stuck",
        "slow_rank_preprocess",
        _THREE + "--fault stuck-worker --on 1 --workers 1 --timeout 22 --form bare",
        culprit=(1,),
        also_ok=_HANGS,
        sufficiency="hint",
    ),
    _job(
        "clip-index-rebuilt",
        "slow_rank_preprocess",
        "export STAMP=a0; $L --style pdsh --stamp a0 -n 3 --grace 4 -- python train_clip.py --fault index --on "
        "2 --seconds "
        "50 --timeout 22 --form glog",
        culprit=(2,),
        alt=(("a003",),),
        also_ok=_HANGS,
    ),
    _job(
        "clip-memory-group",
        "host_oom",
        _GROUP
        + f"torchrun --nproc-per-node 3 --no-python --master-port {_PORT} ./rank.sh --fault grow --on 2 --form titan; "
        "echo 'memory events of the step:'; cat $g/memory.oom_control $g/memory.failcnt; sleep 1; rmdir $g",
        culprit=(2,),
        also_ok=("external_kill",),
        sufficiency="hint",
    ),
    _job(
        "clip-killed",
        "external_kill",
        "$L --style hydra -n 3 --grace 4 -- python train_clip.py --fault kill --on 1 --form bare",
        framework="MPI, gloo loop",
        culprit=(1,),
        also_ok=("host_oom", "unknown"),
        sufficiency="hint",
    ),
    _job(
        "clip-threads",
        "os_limits",
        _TWO + "--fault threads --on 1 --form titan",
        culprit=(1,),
    ),
    _job(
        "clip-tracker-refused",
        "remote_service_timeout",
        _THREE + "--fault metrics --on 0 --form cloud",
        culprit=(0,),
        alt=(("127.0.0.1:9",),),
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "clip-early-stop-one",
        "rank_divergent_branch",
        "$L --style stern --stamp clip-77c -n 3 --grace 8 -- python train_clip.py --fault exit --on 1 --timeout "
        "22 --form bare",
        framework="Kubernetes, gloo loop",
        culprit=(1,),
        also_ok=("uneven_data",),
    ),
    _job(
        "clip-fewer-rows",
        "uneven_data",
        _THREE + "--fault fewer --on 2 --rows 240 --steps 30 --timeout 22 --form titan",
        culprit=(2,),
        also_ok=("rank_divergent_branch",),
        sufficiency="hint",
    ),
    _job(
        "clip-validates-alone",
        "rank_divergent_branch",
        "for r in 0 1 2; do MASTER_ADDR=127.0.0.1 MASTER_PORT=28467 WORLD_SIZE=3 RANK=$r python train_clip.py --fault "
        "validate-alone --on 0 --timeout 22 --form logfmt > $OUT/rank-$r.out 2> $OUT/rank-$r.err & done; wait",
        culprit=(0,),
        also_ok=("uneven_data",),
    ),
    _job(
        "clip-tower-wider",
        "rank_divergent_branch",
        _THREE + "--fault wider --on 1 --form bare",
        culprit=(1,),
        also_ok=("config_error", "version_mismatch"),
    ),
    _job(
        "clip-head-unused",
        "rank_divergent_branch",
        _TWO + "--fault aux --on -1 --form glog",
        alt=((0, 1),),
        also_ok=("config_error", "rank_exception_masked"),
    ),
    _job(
        "clip-head-unused-one",
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=INFO; " + _THREE + "--fault aux --on 1 --timeout 22 --form cloud",
        culprit=(1,),
        also_ok=("rank_exception_masked", "config_error"),
    ),
    _job(
        "clip-pixels-infinite",
        "nan_or_inf",
        _THREE + "--fault pixels --on 1 --form titan",
        culprit=(1,),
    ),
    # Meant to show how the collectives differ, but this PyTorch crashes when DDP meets that level of debugging.
    _job(
        "clip-debug-crash",
        "framework_bug",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL PYTHONFAULTHANDLER=1; "
        + _TWO
        + "--fault odd-reduce --on 1 --form titan",
        also_ok=("unknown", "rank_exception_masked", "version_mismatch"),
        sufficiency="hint",
    ),
    _job(
        "shards-odd-reduce",
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL; mv train_clip.py pretrain.py; $L --style stamped --stamp clip -n 2 "
        "--grace 5 -- python pretrain.py --shard --fault odd-reduce --on 1 --form bare",
        framework="PyTorch FSDP2",
        culprit=(1,),
        alt=((0,), (0, 1)),
        home="/app",
    ),
    # Shards and stages.
    _job(
        "shards-own-disk",
        "storage_fault",
        "cp train_clip.py pretrain.py; "
        + _OWN.format("2m")
        + f"torchrun --nproc-per-node 2 --no-python --master-port {_PORT} ./rank.sh --shard --own_shard shards "
        f"--form rich",
        framework="PyTorch FSDP2",
        culprit=(1,),
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "shards-mesh",
        "config_error",
        f"mv train_clip.py pretrain.py; torchrun --nproc-per-node 2 --master-port {_PORT} pretrain.py --shard "
        f"--hybrid --form rich",
        framework="PyTorch FSDP2",
        alt=((0, 1),),
    ),
    _job(
        "stages-vocabulary",
        "rank_exception_masked",
        f"mv train_clip.py pp_train.py; torchrun --nproc-per-node 4 --master-port {_PORT} --redirects 3 "
        f"--log-dir $OUT/logs "
        "pp_train.py --stages --fault vocabulary --on 2 --form titan",
        framework="PyTorch pipeline (gloo)",
        culprit=(2,),
        also_ok=("config_error",),
    ),
    _job(
        "stages-longer",
        "rank_divergent_branch",
        "mv train_clip.py pp_train.py; $L --style mpi -n 4 --grace 5 -- python pp_train.py --stages --fault "
        "longer --on 1 "
        "--form bare --timeout 22",
        framework="PyTorch pipeline (gloo)",
        culprit=(1,),
        alt=((2,), (1, 2)),
        also_ok=("framework_bug", "config_error", "rank_exception_masked"),
        sufficiency="hint",
    ),
    # Launchers.
    _job(
        "nodes-one-absent",
        "rendezvous_incomplete",
        _NODES
        + "for n in a b; do "
        + _AGENT
        + "--nnodes 3 --rdzv-conf join_timeout=60,last_call_timeout=5 train_clip.py > $OUT/node-$n.log 2>&1 & "
        "done; wait",
        framework="torchrun elastic (gloo)",
        limit_s=400,
    ),
    _job(
        "nodes-one-killed",
        "external_kill",
        _NODES
        + "("
        + _AGENT
        + "--nnodes 2 --max-restarts 0 --node-rank 0 train_clip.py --steps 300 --rows 3000 --timeout 30 --form "
        "glog; echo "
        '"worker a left with $?") > $OUT/node-a.log 2>&1 & sleep 3; '
        + "setsid "
        + _AGENT
        + "--nnodes 2 --max-restarts 0 --node-rank 1 train_clip.py --steps 300 --rows 3000 --timeout 30 --form glog > "
        "$OUT/node-b.log 2>&1 & b=$!; sleep 90; kill -9 -- -$b; wait",
        framework="torchrun elastic (gloo)",
        culprit=("node-b",),
        alt=((1,), (0,)),
        also_ok=("host_oom", "unknown", "rank_exception_masked", "network_blocked"),
        sufficiency="hint",
    ),
    _job(
        "nodes-port-taken",
        "port_in_use",
        f"p={_PORT}; python -m http.server $p > /dev/null 2>&1 & h=$!; sleep 5; torchrun --nnodes 1 --nproc-per-node 2 "
        "--rdzv-backend static --master-port $p train_clip.py --form logfmt; kill $h",
        framework="torchrun",
    ),
    _job(
        "nodes-wrong-interface",
        "wrong_network_interface",
        "export GLOO_SOCKET_IFNAME=bond1.210; $L --style srun -n 2 --grace 4 -- python train_clip.py --form bare",
        framework="Slurm, gloo loop",
        culprit=("bond1.210",),
        alt=((0, 1),),
        also_ok=("config_error",),
    ),
    _job(
        "script-option-misspelt",
        "config_error",
        _TWO + "--batch_size_per_gpu 16 --form titan",
        framework="torchrun",
    ),
    _job(
        "script-not-there",
        "storage_fault",
        f"torchrun --nproc-per-node 2 --master-port {_PORT} src/train_clip.py --form titan",
        framework="torchrun",
        also_ok=("config_error",),
    ),
]
