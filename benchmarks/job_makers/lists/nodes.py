"""Jobs of two torchruns, stacks and flight recorders, and more prefixes."""

from benchmarks.job_makers.make_jobs import Job

TWO, LOOP, DDP = "PyTorch (torchrun, two nodes)", "hand-written loop (gloo)", "PyTorch DDP (gloo)"
NODES = "torchrun --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port $PORT --node-rank"
BOTH = f"for n in 0 1; do {NODES} $n {{}} > out/node$n.log 2>&1 & sleep 1; done; wait\n"
SHARDS = "python make_shards.py data --rows 64 --shards 4 {}\n"
SRUN = "FILE=out/slurm-{}.out; labelled '%d: ' {} ; finish"
STACKS = "for p in $pids; do py-spy dump --pid $p > out/stack-$p.txt 2>&1; done\n"
JOBS = (
    Job(
        "two-nodes-label",
        TWO,
        "rank_exception_masked",
        SHARDS.format("--spoil label:3:30") + BOTH.format("train_ddp.py --timeout 15"),
        (3,),
        fix="A sample of shard 3 has no label.",
    ),
    Job(
        "two-nodes-shard",
        TWO,
        "storage_fault",
        SHARDS.format("; rm data/shard-002.jsonl") + BOTH.format("train_ddp.py --timeout 15 --style json"),
        (2,),
        also=("rank_exception_masked", "config_error"),
        fix="shard-002.jsonl is not there.",
    ),
    Job(
        "two-nodes-interface",
        TWO,
        "wrong_network_interface",
        f"(export GLOO_SOCKET_IFNAME=enp5s0; exec {NODES} 1 ranker.py --timeout 15) > out/node1.log 2>&1 &\n"
        f"{NODES} 0 ranker.py --timeout 15 > out/node0.log 2>&1; wait",
        None,
        also=("config_error",),
        fix="GLOO_SOCKET_IFNAME of node 1 names an interface that it does not have.",
    ),
    Job(
        "two-nodes-one-log",
        TWO,
        "unknown",
        f"hit SIGKILL 2 out/node0.log 'step 16 '\n{NODES} 1 ranker.py --timeout 12 > node1.txt 2>&1 &\n"
        f"{NODES} 0 ranker.py --timeout 12 --lines bare > out/node0.log 2>&1; wait",
        None,
        also=("rank_exception_masked", "external_kill", "host_oom", "network_blocked"),
        sufficiency="none",
        fix="Only node 0's log is here; see that of node 1.",
    ),
    Job(
        "two-nodes-late-index",
        TWO,
        "slow_rank_preprocess",
        BOTH.format("ranker.py --index rank1 --index-items 50 --timeout 10 --lines glog"),
        (1,),
        fix="Rank 1 builds the index while the others wait.",
    ),
    Job(
        "h-two-nodes-train",
        TWO,
        "benign",
        SHARDS.format("") + BOTH.format("train_ddp.py --epochs 2 --style bracket"),
    ),
    Job(
        "h-two-nodes-restart",
        TWO,
        "benign",
        "E='torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id 5'\n"
        "hit SIGKILL 1 out/node0.log 'step=15 '\n"
        "for n in 0 1; do\n"
        "$E --rdzv-endpoint localhost:$PORT elastic_job.py --steps 50 > out/node$n.log 2>&1 & sleep 1\n"
        "done; wait",
        fix="Nothing to fix: a worker was killed, all were started again and ended well.",
    ),
    Job(
        "stuck-spy",
        LOOP,
        "unknown",
        "plain 3 survivor.py silent\n"
        "for i in $(seq 90); do sleep 1; grep -qs 12/36 out/rank0.log && break; done; sleep 7\n"
        + STACKS
        + "sleep 12; kill -9 $pids",
        (1,),
        also=(
            "storage_fault",
            "rank_exception_masked",
            "rank_divergent_branch",
            "slow_rank_preprocess",
            "watchdog_or_heartbeat",
        ),
        sufficiency="hint",
        fix="Rank 1 waits for a file lock that it holds itself.",
    ),
    Job(
        "recorder-late",
        LOOP,
        "slow_rank_preprocess",
        "export TORCH_FR_BUFFER_SIZE=200 TORCH_NCCL_TRACE_BUFFER_SIZE=200; plain 3 survivor.py recorder; finish",
        (2,),
        also=("unknown", "slow_collective_timeout", "rank_divergent_branch", "uneven_data", "rank_exception_masked"),
        sufficiency="hint",
        fix="Rank 2 sleeps, it did not enter the collective.",
    ),
    Job("h-srun-bars", DDP, "benign", SHARDS.format("") + SRUN.format(31337, "3 train_ddp.py --style bar --epochs 2")),
    Job("h-srun-json", DDP, "benign", SHARDS.format("") + SRUN.format(60601, "2 train_ddp.py --style json --epochs 3")),
    Job(
        "h-host-labels",
        LOOP,
        "benign",
        "FILE=out/pdsh.log; labelled 'n0%d: ' 3 ranker.py --eval-every 8 --save-every 16 --lines long; finish",
    ),
    Job(
        "h-fsdp-wait",
        "PyTorch FSDP2 (gloo)",
        "benign",
        "FILE=out/job.out; labelled '[node1:%d] ' 2 fsdp_lm.py --save full --save-every 6 "
        "--validate-every 6 --docs 1:4\n"
        "finish",
    ),
    Job(
        "h-eval-uneven",
        DDP,
        "benign",
        "python make_shards.py data --rows 40 --more 1:24\nplain 2 train_ddp.py --eval-only --timeout 30; finish",
        fix="Nothing to fix: the ranks evaluate different numbers of samples and use no collective.",
    ),
    Job(
        "nfs-hosts",
        LOOP,
        "storage_fault",
        "FILE=out/all.log; labelled '[rank%d] ' 3 survivor.py lost_mount; finish",
        (1,),
        also=("rank_exception_masked",),
        fix="Rank 1 cannot read its shard (input/output error).",
    ),
    Job(
        "too-many-in-world",
        LOOP,
        "config_error",
        "export WORLD=2; plain 3 ranker.py --timeout 8; finish",
        (2,),
        also=("rendezvous_incomplete",),
        fix="Rank 2 does not exist in a world of 2.",
    ),
    Job(
        "same-rank-twice",
        LOOP,
        "rendezvous_incomplete",
        "export MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT WORLD_SIZE=2\n"
        "for i in 0 1; do RANK=1 timeout 200 python -u ranker.py --timeout 8 > out/proc$i.log 2>&1 & done; wait",
        None,
        also=("master_unreachable", "config_error"),
        fix="Both processes have rank 1, so nobody is the master.",
    ),
)
