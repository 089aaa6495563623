"""Jobs of `benchmarks/cases/fifth_set_aside` that ran: ranks with a loop of their own, on many platforms."""

from benchmarks.set_aside_jobs.entry import Entry

_ASR = "cp $S/speech_job.py train_asr.py; cp $S/platforms.py $TMPDIR; P='python '$TMPDIR'/platforms.py '; "
_PORT = "$((20000 + RANDOM % 9000))"
_RUN = f"torchrun --nproc-per-node 3 --master-port {_PORT} train_asr.py "
_PLACE = (
    "mkdir -p opt features; printf '#!/bin/bash\\nif [ $RANK = {rank} ]; then exec unshare -m bash -c \"{mount}; exec "
    "python train_asr.py $*\"; fi; exec python train_asr.py $*\\n' > rank.sh; chmod +x rank.sh; "
)
_GROUP = (
    "g=/sys/fs/cgroup/memory/asr$$; mkdir $g; echo 900M > $g/memory.limit_in_bytes; printf '#!/bin/bash\\nif [ "
    "$RANK = 1 ]; then echo $$ > '$g'/cgroup.procs; fi; exec python train_asr.py $*\\n' > rank.sh; chmod +x rank.sh; "
)
_HANGS = ("unknown", "rank_exception_masked", "watchdog_or_heartbeat", "slow_collective_timeout")
_DETAIL = "export TORCH_DISTRIBUTED_DEBUG=DETAIL; "


def _job(name: str, cls: str, script: str, framework: str = "PyTorch, gloo loop", **about: object) -> Entry:
    return Entry(name, framework, cls, _ASR + script, **{"limit_s": 240, **about})  # type: ignore[arg-type]


ENTRIES = [
    # Healthy.
    _job(
        "asr-noise",
        "benign",
        "$P --style prte -n 3 -- python train_asr.py --noise --everyone --model asr.pt",
        framework="MPI (PRRTE), gloo loop",
        home="/home/petra/asr",
    ),
    _job(
        "asr-events",
        "benign",
        "$P --style skypilot -n 2 -- python train_asr.py --noise --form json --model asr.pt",
        framework="SkyPilot, gloo loop",
        home="/home/sky/sky_workdir",
    ),
    _job(
        "asr-bar",
        "benign",
        "$P --style jobset --stamp asr -n 2 -- python train_asr.py --bar --form absl --noise",
        framework="Kubernetes JobSet, gloo loop",
        home="/workspace",
    ),
    _job(
        "asr-stops-early",
        "benign",
        "$P --style determined --stamp 5d3fa91c -n 2 -- python train_asr.py --patience 2 --form plain",
        framework="Determined AI, gloo loop",
        home="/run/determined/workdir",
    ),
    _job(
        "asr-decodes",
        "benign",
        "$P --style sagemaker -n 3 -- python train_asr.py --evaluate --form fairseq --sleep 0.4",
        framework="SageMaker, gloo loop",
        home="/opt/ml/code",
    ),
    _job(
        "asr-continued",
        "benign",
        "for s in 12 24; do $P --style honcho -n 2 -- python train_asr.py --model asr.pt --steps $s --form ranked; "
        "done",
        framework="honcho, gloo loop",
    ),
    _job(
        "asr-rescored",
        "benign",
        "$P --style journal --stamp asr -n 3 -- python train_asr.py --fault rescore --on 2 --seconds 14 --form pairs "
        "--everyone",
        framework="systemd, gloo loop",
    ),
    _job(
        "asr-waits-for-one",
        "benign",
        "$P --style clush -n 3 -- python train_asr.py --fault late --on 1 --seconds 22 --form absl --everyone",
        framework="clush, gloo loop",
    ),
    _job(
        "asr-second-attempt",
        "benign",
        f"export MASTER_PORT={_PORT}; python -m http.server $MASTER_PORT > /dev/null 2>&1 & h=$!; sleep 3; "
        'for i in 1 2 3; do echo "[wrapper] attempt $i of 3"; $P --style step -n 2 --grace 3 -- python train_asr.py '
        '--form ranked --join 20 && break; echo "[wrapper] failed, next attempt in 5 s"; kill $h; sleep 5; done; '
        'echo "[wrapper] done after attempt $i"',
        framework="Slurm, gloo loop",
        also_ok=("port_in_use",),
    ),
    _job(
        "asr-report",
        "benign",
        f"torchrun --nproc-per-node 2 --master-port {_PORT} --tee 3 train_asr.py --noise --form fairseq --model "
        "asr.pt; printf '%s\\n' '' '------------------------------------------------------------' 'Sender: LSF System "
        "<lsfadmin@c3-11>' 'Subject: Job 7741: <asr> in cluster <hpc> Done' '' 'Successfully completed.' '' "
        "'Resource usage summary:' '    CPU time :  31.20 sec.' '    Max Memory :  612 MB'",
        framework="LSF, torchrun",
    ),
    _job(
        "asr-requeued",
        "benign",
        "for i in 1 2 3; do k=$([ $i = 1 ] && echo x); $P "
        "--style flux -n 2 --grace 4 ${k:+--kill 1:0.2:SIGKILL --after saved} -- python train_asr.py --model asr.pt "
        '--everyone --form ranked --sleep 0.3 && break; echo "requeue: attempt $i ended, the job starts again from its '
        'last checkpoint"; done; echo "requeue: job complete after attempt $i"',
        framework="Flux, gloo loop",
        also_ok=("external_kill",),
    ),
    # A rank dies.
    _job(
        "asr-killed",
        "external_kill",
        "$P --style prte -n 3 --kill 2:2:SIGKILL --after 'step 6' --grace 4 -- python train_asr.py --form fairseq "
        "--steps 60 --rows 300",
        framework="MPI (PRRTE), gloo loop",
        culprit=(2,),
        also_ok=("host_oom",),
    ),
    _job(
        "asr-terminated",
        "external_kill",
        "$P --style flux -n 3 --kill 1:2:SIGTERM --after 'step 6' --grace 8 -- python train_asr.py --form ranked "
        "--steps 60 --rows 300",
        framework="Flux, gloo loop",
        culprit=(1,),
        also_ok=("unknown",),
    ),
    _job(
        "asr-native-crash",
        "rank_exception_masked",
        _RUN + "--fault segv --on 1 --faults --form loguru",
        framework="torchrun, gloo loop",
        culprit=(1,),
        also_ok=("framework_bug", "unknown", "external_kill"),
    ),
    _job(
        "asr-memory-group",
        "host_oom",
        _GROUP
        + "$P --style step -n 2 --grace 4 -- ./rank.sh --fault grow --on 1 --form absl; n=$(grep -c . $g/tasks); "
        'echo "slurmstepd: error: Detected $(cat $g/memory.oom_control | grep oom_kill\\  | cut -d\\  -f2) oom_kill '
        'event in StepId=48213.0. Some of the step tasks have been OOM Killed."; rmdir $g',
        framework="Slurm, gloo loop",
        culprit=(1,),
        also_ok=("external_kill",),
    ),
    _job(
        "asr-no-licence",
        "rank_exception_masked",
        "$P --style honcho -n 3 --grace 4 -- python train_asr.py --fault exit-code --on 0 --form ranked --everyone",
        framework="honcho, gloo loop",
        culprit=(0,),
        also_ok=("config_error", "rank_divergent_branch", "remote_service_timeout", "os_limits"),
    ),
    _job(
        "asr-unknown-phone",
        "rank_exception_masked",
        "$P --style determined --stamp 77be0c14 -n 3 --grace 4 -- python train_asr.py --fault alignment --on 2",
        framework="Determined AI, gloo loop",
        culprit=(2,),
        home="/run/determined/workdir",
    ),
    _job(
        "asr-blank-run",
        "rank_exception_masked",
        "$P --style sagemaker -n 3 --grace 4 -- python train_asr.py --fault asserts --on 1 --form fairseq",
        framework="SageMaker, gloo loop",
        culprit=(1,),
        alt=(("algo-2",),),
        home="/opt/ml/code",
    ),
    _job(
        "asr-wave-header",
        "rank_exception_masked",
        "$P --style skypilot -n 3 --grace 4 -- python train_asr.py --fault wave --on 2 --form json",
        framework="SkyPilot, gloo loop",
        culprit=(2,),
        alt=(("worker2",), ("10.12.0.6",)),
        also_ok=("storage_fault",),
        home="/home/sky/sky_workdir",
    ),
    _job(
        "asr-frames-differ",
        "rank_exception_masked",
        "$P --style parallel -n 3 --grace 4 -- python train_asr.py --fault frames --on 1 --workers 1 --form plain",
        framework="GNU parallel, gloo loop",
        culprit=(1,),
        alt=(("c3-12",),),
        also_ok=("config_error",),
    ),
    _job(
        "asr-no-module",
        "version_mismatch",
        "$P --style clush -n 3 --grace 15 -- python train_asr.py --fault import --on 2 --form absl --join 20",
        framework="clush, gloo loop",
        culprit=("c3-13",),
        alt=((2,),),
        also_ok=("config_error", "rank_exception_masked"),
    ),
    _job(
        "asr-lexicon-absent",
        "storage_fault",
        "$P --style timed -n 3 --grace 3 -- python train_asr.py --fault lexicon --on 2 --form pairs",
        framework="MPI (PRRTE), gloo loop",
        culprit=(2,),
        also_ok=("config_error", "rank_exception_masked"),
    ),
    _job(
        "asr-disk-full",
        "storage_fault",
        _PLACE.format(rank=2, mount="mount -t tmpfs -o size=1m tmpfs opt")
        + "$P --style journal --stamp asr -n 3 --grace 4 -- ./rank.sh --own_folder opt --model asr.pt --form ranked",
        framework="systemd, gloo loop",
        culprit=(2,),
        alt=(("c3-13",),),
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "asr-read-only",
        "storage_fault",
        _PLACE.format(rank=1, mount="mount -t tmpfs -o ro,size=1m tmpfs features")
        + "$P --style compose --stamp asr -n 3 --grace 4 -- ./rank.sh --fault cache --on 1 --form json",
        framework="docker compose, gloo loop",
        culprit=(1,),
        alt=(("asr-trainer-2",), ("trainer-2",)),
        also_ok=("rank_exception_masked", "config_error"),
    ),
    _job(
        "asr-segments-small",
        "shm_too_small",
        _PLACE.format(rank=1, mount="mount -t tmpfs -o size=8m tmpfs /dev/shm")
        + "$P --style jobset --stamp asr -n 2 --grace 4 -- ./rank.sh --fault loader-memory --on 1 --workers 1 "
        "--form absl",
        framework="Kubernetes JobSet, gloo loop",
        culprit=(1,),
        also_ok=("storage_fault", "rank_exception_masked"),
        home="/workspace",
    ),
    _job(
        "asr-features-nan",
        "nan_or_inf",
        "$P --style flux -n 3 --grace 4 -- python train_asr.py --fault features --on 1 --strict --form loguru",
        framework="Flux, gloo loop",
        culprit=(1,),
    ),
    # A rank waits, leaves or does something else.
    _job(
        "asr-loader-lock",
        "slow_rank_preprocess",
        "$P --style clush -n 3 --grace 5 -- python train_asr.py --fault loader-lock --on 1 --workers 1 --timeout 18 "
        "--form absl --everyone",
        framework="clush, gloo loop",
        culprit=(1,),
        alt=(("c3-12",),),
        also_ok=_HANGS,
        sufficiency="hint",
    ),
    _job(
        "asr-external-model",
        "slow_rank_preprocess",
        "$P --style compose --stamp asr -n 3 --grace 5 -- python train_asr.py --fault sleep-c --on 2 --seconds 90 "
        "--timeout 30 --dump 32 --form ranked --everyone",
        framework="docker compose, gloo loop",
        culprit=(2,),
        alt=(("asr-trainer-3",), ("trainer-3",)),
        also_ok=_HANGS,
        sufficiency="hint",
    ),
    _job(
        "asr-exporter-deadlock",
        "slow_rank_preprocess",
        "$P --style journal --stamp asr -n 3 --grace 5 -- python train_asr.py --fault deadlock --on 0 --timeout 30 "
        "--dump 32 --form pairs --everyone",
        framework="systemd, gloo loop",
        culprit=(0,),
        alt=(("c3-11",),),
        also_ok=(*_HANGS, "framework_bug", "rank_divergent_branch"),
        sufficiency="hint",
    ),
    _job(
        "asr-rescoring-long",
        "slow_rank_preprocess",
        "$P --style sagemaker -n 3 --grace 5 -- python train_asr.py --fault rescore --on 2 --seconds 60 --timeout 15 "
        "--form loguru --everyone",
        framework="SageMaker, gloo loop",
        culprit=(2,),
        alt=(("algo-3",),),
        also_ok=_HANGS,
        home="/opt/ml/code",
    ),
    _job(
        "asr-save-hangs",
        "checkpoint_timeout",
        "$P --style prte -n 3 --grace 5 -- python train_asr.py --fault save-hang --model asr.pt --timeout 15 --at 12 "
        "--form fairseq",
        framework="MPI (PRRTE), gloo loop",
        culprit=(0,),
        also_ok=("slow_collective_timeout", "storage_fault", "slow_rank_preprocess", "unknown"),
    ),
    _job(
        "asr-other-call",
        "rank_divergent_branch",
        _DETAIL + "$P --style step -n 3 --grace 4 -- python train_asr.py --fault broadcast --on 1 --form ranked",
        framework="Slurm, gloo loop",
        culprit=(1,),
    ),
    _job(
        "asr-other-type",
        "rank_divergent_branch",
        _DETAIL + _RUN + "--fault dtype --on 2 --form json",
        framework="torchrun, gloo loop",
        culprit=(2,),
        also_ok=("version_mismatch", "config_error"),
    ),
    _job(
        "asr-epoch-boundary",
        "rank_divergent_branch",
        "$P --style determined --stamp 3ac1d7f0 -n 3 --grace 5 -- python train_asr.py --fault extra-barrier --on 0 "
        "--timeout 15 --form plain",
        framework="Determined AI, gloo loop",
        culprit=(0,),
        also_ok=("uneven_data",),
        home="/run/determined/workdir",
    ),
    _job(
        "asr-more-units",
        "rank_divergent_branch",
        "$P --style skypilot -n 3 --grace 5 -- python train_asr.py --fault units --on 1 --timeout 20 --form loguru",
        framework="SkyPilot, gloo loop",
        culprit=(1,),
        alt=(("worker1",), ("10.12.0.5",)),
        also_ok=("config_error", "version_mismatch"),
        home="/home/sky/sky_workdir",
    ),
    _job(
        "asr-fewer-batches",
        "uneven_data",
        "$P --style honcho -n 3 --grace 5 -- python train_asr.py --fault fewer --on 1 --rows 96 --timeout 15 --form "
        "ranked --everyone",
        framework="honcho, gloo loop",
        culprit=(1,),
        also_ok=("rank_divergent_branch",),
    ),
    # Ranks do not meet.
    _job(
        "asr-copies-first",
        "rendezvous_incomplete",
        "$P --style clush -n 3 --grace 30 -- python train_asr.py --fault late --on 1 --seconds 70 --join 25 --form "
        "absl",
        framework="clush, gloo loop",
        culprit=("c3-12",),
        alt=((1,),),
        also_ok=("slow_rank_preprocess", "master_unreachable"),
    ),
    _job(
        "asr-one-too-many",
        "rendezvous_incomplete",
        "$P --style jobset --stamp asr -n 3 --grace 6 -- python train_asr.py --fault world --join 20 --form ranked",
        framework="Kubernetes JobSet, gloo loop",
        also_ok=("config_error", "master_unreachable"),
        home="/workspace",
    ),
    _job(
        "asr-store-elsewhere",
        "master_unreachable",
        "$P --style flux -n 3 --grace 6 --own 1:MASTER_PORT=29411 -- python train_asr.py --join 25 --form loguru",
        framework="Flux, gloo loop",
        culprit=(1,),
        alt=(("127.0.0.1:29411",), ("127.0.0.1",), ("localhost",)),
        also_ok=("rendezvous_incomplete", "config_error"),
    ),
    _job(
        "asr-interface-one",
        "wrong_network_interface",
        "$P --style parallel -n 3 --grace 6 --own 2:GLOO_SOCKET_IFNAME=ibp9s0 -- python train_asr.py --join 25 "
        "--form fairseq",
        framework="GNU parallel, gloo loop",
        culprit=("c3-13",),
        alt=((2,), ("ibp9s0",)),
        also_ok=("config_error",),
    ),
    _job(
        "asr-port-taken",
        "port_in_use",
        f"export MASTER_PORT={_PORT}; python -m http.server $MASTER_PORT > /dev/null 2>&1 & h=$!; sleep 4; "
        "$P --style timed -n 2 --grace 3 -- python train_asr.py --form pairs --join 20; kill $h",
        framework="MPI (PRRTE), gloo loop",
        alt=((0,),),
        also_ok=("master_unreachable",),
    ),
]
