"""DDP under torchrun and as plain processes."""

from benchmarks.job_makers.make_jobs import Job

DDP, LOOP = "PyTorch DDP (gloo)", "hand-written loop (gloo)"
RUN = "torchrun --standalone --nproc-per-node"
JOBS = (
    Job(
        "h-ddp-epochs",
        DDP,
        "benign",
        f"python make_shards.py data --rows 48; {RUN} 2 train_ddp.py --style bar > out/train.log 2>&1",
    ),
    Job(
        "h-ddp-early-stop",
        DDP,
        "benign",
        f"python make_shards.py data --rows 32; "
        f"{RUN} 2 train_ddp.py --epochs 40 --lr 0.0001 --patience 2 --style bracket > out/stdout.txt 2>&1",
    ),
    Job(
        "h-ddp-resume",
        DDP,
        "benign",
        f"python make_shards.py data --rows 32; export TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO\n"
        f"{RUN} 2 train_ddp.py --epochs 2 --checkpoints ckpt > first.log 2>&1\n"
        f"{RUN} 2 train_ddp.py --epochs 5 --checkpoints ckpt --resume > out/resumed.log 2>&1",
    ),
    Job(
        "h-ddp-eval",
        DDP,
        "benign",
        f"python make_shards.py data --rows 80; {RUN} 2 train_ddp.py --eval-only > out/eval.log 2>&1",
    ),
    Job(
        "h-ddp-unused",
        DDP,
        "benign",
        f"python make_shards.py data --rows 48; "
        f"{RUN} 2 train_ddp.py --find-unused --style json > out/slurm-481516.out 2>&1",
    ),
    Job(
        "h-ddp-running",
        DDP,
        "benign",
        "python make_shards.py data --rows 64 --shards 3\n"
        "plain 3 train_ddp.py --epochs 500 --pause 0.1; sleep 25; mkdir keep; cp out/* keep/; kill $pids; sleep 1\n"
        "cp keep/* out/",
        fix="Nothing to fix: the job runs.",
    ),
    Job(
        "h-tcp-init",
        LOOP,
        "benign",
        "FILE=out/all.log; labelled '%d: ' 3 ranker.py --init tcp://127.0.0.1:$PORT --steps 60 --lines none; finish",
    ),
    Job(
        "h-file-init",
        LOOP,
        "benign",
        "plain 2 ranker.py --init file://$PWD/store --steps 48 --eval-every 12 --save-every 16 --lines glog; finish",
    ),
    Job(
        "h-slow-phase",
        LOOP,
        "benign",
        "FILE=out/job.out; labelled '[node1:%d] ' 2 ranker.py --index rank1 --index-items 24 --timeout 60 "
        "--lines short\n"
        "finish",
        fix="Nothing to fix: one rank built an index, the others waited within the limit.",
    ),
    Job(
        "h-slow-save",
        LOOP,
        "benign",
        "plain 2 ranker.py --save-every 10 --save-seconds 6 --timeout 40 --lines bare; finish",
    ),
    Job(
        "label-missing",
        DDP,
        "rank_exception_masked",
        f"python make_shards.py data --rows 64 --shards 3 --spoil label:2:37\n"
        f"{RUN} 3 train_ddp.py --timeout 20 > out/job.log 2>&1",
        (2,),
        fix="A sample of shard 2 has no label.",
    ),
    Job(
        "label-range",
        DDP,
        "rank_exception_masked",
        "python make_shards.py data --rows 64 --shards 3 --spoil class:1:41\n"
        "plain 3 train_ddp.py --timeout 20 --style json; finish",
        (1,),
        fix="A label of shard 1 is outside the classes.",
    ),
    Job(
        "row-width",
        DDP,
        "rank_exception_masked",
        "python make_shards.py data --rows 64 --spoil width:0:22\n"
        "FILE=out/slurm-90210.out; labelled '%d: ' 2 train_ddp.py --timeout 20 --batch-size 1 --style bracket; finish",
        (0,),
        fix="A row of shard 0 is too short.",
    ),
    Job(
        "json-cut",
        DDP,
        "rank_exception_masked",
        f"python make_shards.py data --rows 64 --shards 3 --spoil cut:1:63\n"
        f"{RUN} 3 --log-dir out/logs --redirects 3 train_ddp.py --timeout 20 > out/launcher.log 2>&1",
        (1,),
        also=("storage_fault",),
        fix="shard-001.jsonl ends in the middle of a line.",
    ),
    Job(
        "shard-missing",
        DDP,
        "storage_fault",
        f"python make_shards.py data --rows 64 --shards 2\n{RUN} 3 train_ddp.py --timeout 20 > out/train.log 2>&1",
        (2,),
        also=("rank_exception_masked", "config_error"),
        fix="There is no shard for rank 2.",
    ),
    Job(
        "more-rows",
        DDP,
        "uneven_data",
        "python make_shards.py data --rows 40 --more 1:24\n"
        "plain 2 train_ddp.py --timeout 12 --epochs 2 --print-freq 1 --style json; finish",
        (0,),
        alt=((1,), (0, 1)),
        also=("rank_divergent_branch",),
        fix="The shards have different numbers of rows; use Join or equal shards.",
    ),
    Job(
        "more-rows-3",
        DDP,
        "uneven_data",
        f"python make_shards.py data --rows 40 --shards 3 --more 0:16 --more 2:16\n"
        f"{RUN} 3 train_ddp.py --timeout 12 --print-freq 1 > out/out.log 2>&1",
        (1,),
        alt=((0, 2), (0, 1, 2)),
        also=("rank_divergent_branch",),
        sufficiency="hint",
        fix="Shard 1 has fewer rows than its peers.",
    ),
    Job(
        "nan-row",
        DDP,
        "nan_or_inf",
        f"python make_shards.py data --rows 64 --spoil nan:1:30\n"
        f"{RUN} 2 train_ddp.py --timeout 20 --print-freq 1 > out/train.log 2>&1",
        (1,),
        alt=((0, 1),),
        also=("rank_exception_masked",),
        fix="A sample of shard 1 holds NaN.",
    ),
    Job(
        "nan-rate",
        DDP,
        "nan_or_inf",
        f"python make_shards.py data --rows 64\n"
        f"{RUN} 2 train_ddp.py --timeout 20 --lr 1e22 --print-freq 1 --style bracket > out/train.log 2>&1",
        None,
        fix="The learning rate is far too high.",
    ),
    Job(
        "rare-head",
        DDP,
        "rank_divergent_branch",
        f"python make_shards.py data --rows 64\n{RUN} 2 train_ddp.py --timeout 12 --heads > out/console.log 2>&1",
        None,
        also=("framework_bug", "config_error"),
        fix="A head gets no gradient in a step; find_unused_parameters=True or use it in each step.",
    ),
    Job(
        "ckpt-cut",
        DDP,
        "storage_fault",
        f"python make_shards.py data --rows 32; {RUN} 2 train_ddp.py --epochs 1 --checkpoints ckpt > first.log 2>&1\n"
        f"truncate -s 3000 ckpt/last.pt; {RUN} 2 train_ddp.py --checkpoints ckpt --resume > out/train.log 2>&1",
        None,
        also=("rank_exception_masked",),
        fix="The checkpoint is cut short; take an older one.",
    ),
    Job(
        "ckpt-shape",
        DDP,
        "config_error",
        f"python make_shards.py data --rows 32; {RUN} 2 train_ddp.py --epochs 1 --checkpoints ckpt > first.log 2>&1\n"
        f"{RUN} 2 train_ddp.py --checkpoints ckpt --resume --classes 7 > out/train.log 2>&1",
        None,
        also=("rank_exception_masked", "version_mismatch"),
        fix="The checkpoint has four classes, the run seven.",
    ),
    Job(
        "no-such-option",
        DDP,
        "config_error",
        f"{RUN} 2 train_ddp.py --learning-rate 0.1 > out/train.log 2>&1",
        None,
        fix="The option is called --lr.",
    ),
    Job(
        "text-value",
        DDP,
        "rank_exception_masked",
        "python make_shards.py data --rows 64 --spoil text:1:50\n"
        "FILE=out/merged.log; labelled '[default%d]:' 2 train_ddp.py --timeout 20; finish",
        (1,),
        fix="A value of shard 1 is text.",
    ),
)
