"""Hand-written loops on gloo: killed, stopped, late, elsewhere, misconfigured ranks."""

from benchmarks.job_makers.make_jobs import Job

LOOP = "hand-written loop (gloo)"
TWO_NODES = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:$PORT --rdzv-id 77"
STATIC = "torchrun --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port $PORT"
LIMITED = "--rdzv-conf join_timeout=20,last_call_timeout=3"
JOBS = (
    Job(
        "killed-plain",
        LOOP,
        "external_kill",
        "hit SIGKILL 2 out/rank0.log 'step 12 '; plain 4 ranker.py --timeout 15\n"
        'for r in 0 1 2 3; do wait $(echo $pids | cut -d" " -f$((r + 1))); echo "rank $r exit status $?"; done '
        "> out/launch.log 2>&1",
        (2,),
        also=("host_oom",),
        fix="Rank 2 got SIGKILL from outside; see the kernel's log of its host.",
    ),
    Job(
        "terminated-torchrun",
        LOOP,
        "external_kill",
        "hit SIGTERM 1 out/train.log 'step 16 '\n"
        "torchrun --standalone --nproc-per-node 3 ranker.py --timeout 15 --lines glog > out/train.log 2>&1",
        (1,),
        fix="Somebody ended rank 1 with SIGTERM.",
    ),
    Job(
        "killed-torchrun",
        LOOP,
        "external_kill",
        "(while ! grep -qs 'step 16 ' $(find out/logs -name 'std*.log'); do sleep 0.2; done\n"
        "f=$(mktemp); echo go > $f; python3 hit.py SIGKILL 0 $f go) &\n"
        "torchrun --standalone --nproc-per-node 3 --log-dir out/logs --redirects 3 ranker.py --timeout 15 "
        "> out/launcher.log 2>&1",
        (0,),
        also=("host_oom",),
        fix="Rank 0 got SIGKILL from outside.",
    ),
    Job(
        "wall-limit",
        LOOP,
        "external_kill",
        "timeout --verbose --signal=TERM 30 torchrun --standalone --nproc-per-node 2 ranker.py --steps 9000 "
        "> out/slurm-7731.out 2>&1\n"
        'echo "command ended by its time limit, status $?" >> out/slurm-7731.out',
        None,
        fix="The time limit of the command ended a job that was training.",
    ),
    Job(
        "hung-up",
        LOOP,
        "external_kill",
        "hit SIGHUP self:torchrun out/nohup.out 'step 20 '\n"
        "torchrun --standalone --nproc-per-node 2 ranker.py --steps 9000 --lines short > out/nohup.out 2>&1",
        None,
        fix="The launcher got SIGHUP: its terminal was closed.",
    ),
    Job(
        "launcher-option",
        LOOP,
        "config_error",
        "torchrun --standalone --nproc-per-node 2 ranker.py --log glog > out/train.log 2>&1",
        None,
        fix="torchrun takes --log for an abbreviation of its own options.",
    ),
    Job(
        "stopped-rank",
        LOOP,
        "unknown",
        "hit SIGSTOP 1 out/rank0.log 'step 12 '; plain 3 ranker.py --timeout 10; sleep 60; kill -9 $pids",
        (1,),
        also=("slow_rank_preprocess", "external_kill", "watchdog_or_heartbeat", "rank_exception_masked"),
        sufficiency="hint",
        fix="Rank 1 was stopped (SIGSTOP); its log ends before the others' and they time out.",
    ),
    Job(
        "stopped-rank-ps",
        LOOP,
        "external_kill",
        "hit SIGSTOP 2 out/rank0.log 'step 20 '; plain 3 ranker.py --timeout 10 --lines bare; sleep 29\n"
        "ps -o pid,stat,wchan:20,etime,args -p $(echo $pids | tr ' ' ',') > out/ps.txt; sleep 10; kill -9 $pids",
        (2,),
        also=("unknown", "slow_rank_preprocess", "rank_exception_masked"),
        fix="Rank 2 is stopped (state T).",
    ),
    Job(
        "index-late",
        LOOP,
        "slow_rank_preprocess",
        "plain 3 ranker.py --index rank1 --index-items 70 --timeout 12; sleep 46; kill $pids",
        (1,),
        fix="Rank 1 builds the index while the others wait in the first broadcast.",
    ),
    Job(
        "index-late-0",
        LOOP,
        "slow_rank_preprocess",
        "FILE=out/slurm-5150.out; labelled '%d: ' 2 ranker.py --index rank0 --index-items 60 --timeout 10 "
        "--lines none\n"
        "finish",
        (0,),
        also=("slow_collective_timeout",),
        fix="Rank 0 builds the index while rank 1 waits.",
    ),
    Job(
        "tail-metric",
        LOOP,
        "rank_divergent_branch",
        "plain 2 ranker.py --metrics tail --threshold 0.69 --lr 0.0001 --timeout 12 --lines long; finish",
        None,
        alt=((0,), (1,), (0, 1)),
        also=("unknown", "slow_collective_timeout", "rank_exception_masked"),
        sufficiency="hint",
        fix="Only some ranks reduce the metric tail_loss.",
    ),
    Job(
        "metric-type",
        LOOP,
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL; plain 2 ranker.py --metrics typed --timeout 12; finish",
        None,
        alt=((1,), (0,), (0, 1)),
        also=("rank_exception_masked", "config_error"),
        sufficiency="hint",
        fix="The ranks reduce the metric with different types.",
    ),
    Job(
        "eval-main-only",
        LOOP,
        "rank_divergent_branch",
        "plain 3 ranker.py --eval-every 10 --eval-guard main --timeout 12 --lines glog; finish",
        (0,),
        alt=((1, 2),),
        also=("uneven_data",),
        fix="Only rank 0 evaluates, and the evaluation has an all-reduce.",
    ),
    Job(
        "eval-root-detail",
        LOOP,
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL\n"
        "torchrun --standalone --nproc-per-node 2 ranker.py --eval-every 10 --eval-guard root --timeout 12 "
        "> out/run.log 2>&1",
        (0,),
        alt=((1,), (0, 1)),
        fix="Only rank 0 evaluates, and the evaluation has an all-reduce.",
    ),
    Job(
        "dims-differ",
        LOOP,
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL; plain 2 ranker.py --dims 1:32 --timeout 12; finish",
        (1,),
        alt=((0, 1), (0,)),
        also=("config_error", "uneven_data"),
        fix="Rank 1 has a model of another width.",
    ),
    Job(
        "dims-differ-plain",
        LOOP,
        "rank_divergent_branch",
        "plain 2 ranker.py --dims 1:32 --timeout 12 --lines short; finish",
        None,
        alt=((1,), (0,), (0, 1)),
        also=("config_error", "unknown", "rank_exception_masked", "uneven_data", "network_blocked"),
        sufficiency="hint",
        fix="Rank 1 has a model of another width.",
    ),
    Job(
        "save-outlasts",
        LOOP,
        "checkpoint_timeout",
        "plain 3 ranker.py --save-every 12 --save-seconds 90 --timeout 12; sleep 60; kill $pids",
        (0,),
        also=("storage_fault", "slow_rank_preprocess"),
        fix="Rank 0 writes a checkpoint for longer than the others wait.",
    ),
    Job(
        "save-outlasts-srun",
        LOOP,
        "checkpoint_timeout",
        "FILE=out/slurm-61200.out\n"
        "labelled '%d: ' 2 ranker.py --save-every 20 --save-seconds 26 --timeout 10 --lines bare; finish",
        (0,),
        also=("slow_rank_preprocess", "storage_fault"),
        fix="The checkpoint of rank 0 takes 26 s, the limit is 10 s.",
    ),
    Job(
        "file-limit",
        LOOP,
        "os_limits",
        "FILE=out/all.log; (ulimit -f 4000; labelled '[%d] ' 2 ranker.py --save-every 12 --save-mb 8 --timeout 12\n"
        "finish)",
        (0,),
        also=("storage_fault", "rank_exception_masked"),
        fix="A file may not be larger than ulimit -f allows.",
    ),
    Job(
        "disk-full",
        LOOP,
        "storage_fault",
        "mkdir ckpt; mount -t tmpfs -o size=6m none ckpt 2>/dev/null\n"
        "plain 2 ranker.py --save-every 10 --save-mb 4 --timeout 12; finish; umount ckpt",
        (0,),
        also=("rank_exception_masked",),
        fix="No space left for the second checkpoint.",
    ),
    Job(
        "disk-full-torchrun",
        LOOP,
        "storage_fault",
        "mkdir ckpt; mount -t tmpfs -o size=6m none ckpt 2>/dev/null\n"
        "torchrun --standalone --nproc-per-node 2 ranker.py --save-every 10 --save-mb 4 --timeout 12 --lines glog "
        "> out/train.log 2>&1; umount ckpt",
        (0,),
        also=("rank_exception_masked",),
        fix="No space left for the second checkpoint.",
    ),
    Job(
        "memory-limit",
        LOOP,
        "host_oom",
        "(export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT\n"
        "RANK=0 python -u ranker.py --timeout 12 > out/rank0.log 2>&1 &\n"
        "(ulimit -v 6000000; RANK=1 exec python -u ranker.py --cache-mb 400 --timeout 12 > out/rank1.log 2>&1); wait)",
        (1,),
        also=("os_limits", "rank_exception_masked"),
        fix="The cache of rank 1 grows until it gets no more memory.",
    ),
    Job(
        "port-taken",
        LOOP,
        "port_in_use",
        "python3 -m http.server $PORT --bind 0.0.0.0 > /dev/null 2>&1 & sleep 1\n"
        "plain 2 ranker.py --timeout 10; finish; kill %1",
        None,
        alt=((0,),),
        fix="Another process listens on the master's port.",
    ),
    Job(
        "port-taken-torchrun",
        LOOP,
        "port_in_use",
        "python3 -m http.server $PORT --bind 0.0.0.0 > /dev/null 2>&1 & sleep 1\n"
        "timeout 60 torchrun --nproc-per-node 2 --master-port $PORT ranker.py --timeout 10 > out/train.log 2>&1",
        None,
        alt=((0,),),
        also=("master_unreachable",),
        fix="Another process listens on the master's port.",
    ),
    Job(
        "no-such-host",
        LOOP,
        "master_unreachable",
        "export ADDR=head-0.train.svc.invalid; plain 2 ranker.py --timeout 8; finish",
        ("head-0.train.svc.invalid",),
        alt=((0, 1),),
        also=("config_error",),
        fix="The name of the master cannot be resolved.",
    ),
    Job(
        "refused-host",
        LOOP,
        "master_unreachable",
        "mkdir out/node1; (export MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT WORLD_SIZE=4; for r in 2 3; do\n"
        "RANK=$r python -u ranker.py --timeout 10 > out/node1/rank$r.log 2>&1 & done; wait)",
        None,
        alt=(("127.0.0.1",), (0,), (2, 3), (0, 1)),
        also=("rendezvous_incomplete",),
        fix="Nobody listens where the master should be.",
    ),
    Job(
        "too-few-started",
        LOOP,
        "rendezvous_incomplete",
        "export WORLD=4; plain 3 ranker.py --timeout 10 --lines glog; finish",
        (3,),
        alt=((0, 1, 2),),
        also=("config_error", "master_unreachable"),
        fix="Three of four processes were started.",
    ),
    Job(
        "too-few-init",
        LOOP,
        "rendezvous_incomplete",
        "export WORLD=3; plain 2 ranker.py --timeout 8 --init tcp://127.0.0.1:$PORT --lines short; finish",
        None,
        alt=((2,), (0, 1)),
        also=("config_error", "master_unreachable"),
        fix="Two of three processes were started.",
    ),
    Job(
        "node-absent",
        "torchrun c10d rendezvous",
        "rendezvous_incomplete",
        f"timeout 80 {TWO_NODES} {LIMITED} ranker.py --timeout 10 > out/node0.log 2>&1",
        None,
        also=("config_error",),
        fix="The second node never joined.",
    ),
    Job(
        "head-absent",
        "torchrun static rendezvous",
        "master_unreachable",
        "timeout 100 torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --rdzv-conf timeout=15 "
        "--master-addr 127.0.0.1 --master-port $PORT ranker.py --timeout 10 > out/node1.log 2>&1",
        None,
        alt=(("127.0.0.1",), (0,), (0, 1)),
        also=("rendezvous_incomplete",),
        fix="The first node was not started, so its store refuses connections.",
    ),
    Job(
        "wrong-interface",
        LOOP,
        "wrong_network_interface",
        "export GLOO_SOCKET_IFNAME=ens5f0; plain 2 ranker.py --timeout 10; finish",
        None,
        alt=(("ens5f0",), (0, 1), ("ens5f0", 0, 1)),
        also=("config_error",),
        fix="There is no interface ens5f0.",
    ),
    Job(
        "wrong-interface-torchrun",
        LOOP,
        "wrong_network_interface",
        "export GLOO_SOCKET_IFNAME=ib0\n"
        "torchrun --standalone --nproc-per-node 2 ranker.py --timeout 10 > out/train.log 2>&1",
        None,
        alt=(("ib0",), (0, 1)),
        also=("config_error",),
        fix="There is no interface ib0.",
    ),
    Job(
        "two-nodes-node-dies",
        "PyTorch (torchrun, two nodes)",
        "external_kill",
        f"hit SIGKILL 3 out/node0.log 'step 12 '\n"
        f"{STATIC} --node-rank 0 ranker.py --timeout 12 > out/node0.log 2>&1 &\n"
        f"{STATIC} --node-rank 1 ranker.py --timeout 12 > out/node1.log 2>&1; wait $!; sleep 1",
        (3,),
        also=("host_oom",),
        fix="Rank 3 got SIGKILL.",
    ),
    Job(
        "h-two-nodes",
        "PyTorch (torchrun, two nodes)",
        "benign",
        f"(sleep 6; {TWO_NODES} ranker.py > out/node1.log 2>&1) &\n{TWO_NODES} ranker.py > out/node0.log 2>&1; wait",
        fix="Nothing to fix: the second node came some seconds later.",
    ),
    Job(
        "h-late-head",
        LOOP,
        "benign",
        "(export MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT WORLD_SIZE=2 TORCH_CPP_LOG_LEVEL=INFO\n"
        "RANK=1 python -u ranker.py > out/rank1.log 2>&1 & sleep 9; RANK=0 python -u ranker.py > out/rank0.log 2>&1\n"
        "wait)",
        fix="Nothing to fix: the master was started later, its clients tried again.",
    ),
    Job(
        "interrupted",
        LOOP,
        "external_kill",
        "hit SIGINT 0 out/rank0.log 'step 40 '; export RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT\n"
        "python -u ranker.py --forever --save-every 20 > out/rank0.log 2>&1",
        None,
        also=("benign",),
        fix="Its user ended it.",
    ),
    Job(
        "h-running-srun",
        LOOP,
        "benign",
        "FILE=w.log; labelled '%d: ' 2 ranker.py --forever --eval-every 20 --save-every 40 --pause 0.15; sleep 32\n"
        "cp w.log out/slurm-20418.out; kill $(jobs -p)",
        fix="Nothing to fix: the job runs.",
    ),
)
