"""Hugging Face Trainer, accelerate and TRL."""

from benchmarks.job_makers.make_jobs import Job

HF, ACCELERATE, TRL = "transformers Trainer", "accelerate", "TRL"
TINY = "python tiny_model.py tiny > /dev/null 2>&1\n"
RUN = "torchrun --standalone --nproc-per-node"
LAUNCH = "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no"
JUDGE = "python3 judge_server.py $PORT2 {} > /dev/null 2>&1 & J=$!; sleep 1\n"
URL = "export REWARD_URL=http://127.0.0.1:$PORT2/score\n"
JOBS = (
    Job("h-hf-plain", HF, "benign", TINY + "python hf_finetune.py --evaluate > out/finetune.log 2>&1"),
    Job(
        "h-hf-resume",
        HF,
        "benign",
        TINY + "python hf_finetune.py --steps 10 --save-steps 5 > first.log 2>&1\n"
        "python hf_finetune.py --steps 24 --save-steps 8 --resume > out/slurm-11871.out 2>&1",
    ),
    Job(
        "h-hf-early-stop",
        HF,
        "benign",
        TINY + "python hf_finetune.py --steps 200 --save-steps 4 --lr 1e-9 --patience 2 --best eval_loss "
        "> out/train.log 2>&1",
    ),
    Job(
        "h-hf-ddp",
        HF,
        "benign",
        TINY + f"export TOKENIZERS_PARALLELISM=true; {RUN} 2 hf_finetune.py --workers 1 --map-processes 2 --evaluate "
        "> out/train.log 2>&1",
    ),
    Job(
        "h-hf-running",
        HF,
        "benign",
        TINY + f"{RUN} 2 hf_finetune.py --steps 900 --pause 0.4 > w.log 2>&1 &\n"
        'for i in $(seq 90); do sleep 2; [ "$(grep -ao grad_norm w.log | wc -l)" -gt 14 ] && break; done\n'
        "cp w.log out/train.log; kill %1",
        fix="Nothing to fix: the job runs.",
    ),
    Job(
        "hf-no-column",
        HF,
        "config_error",
        TINY + "python hf_finetune.py --column content > out/train.log 2>&1",
        None,
        also=("rank_exception_masked",),
        fix="The data set has no column content.",
    ),
    Job(
        "hf-no-model",
        HF,
        "storage_fault",
        TINY + f"{RUN} 2 hf_finetune.py --model /models/qwen-base > out/train.log 2>&1",
        None,
        also=("config_error", "remote_service_timeout", "rank_exception_masked"),
        fix="There is no model at that path.",
    ),
    Job(
        "hf-truncated-weights",
        HF,
        "storage_fault",
        TINY + "truncate -s 40000 tiny/model.safetensors; python hf_finetune.py > out/train.log 2>&1",
        None,
        also=("rank_exception_masked",),
        fix="model.safetensors is cut short.",
    ),
    Job(
        "hf-disk-full",
        HF,
        "storage_fault",
        TINY + "mkdir output; mount -t tmpfs -o size=700k none output\n"
        f"{RUN} 2 hf_finetune.py --save-steps 6 --ddp-timeout 15 > out/train.log 2>&1; umount output",
        (0,),
        also=("rank_exception_masked",),
        sufficiency="hint",
        fix="No space left in the output folder.",
    ),
    Job(
        "hf-bad-optimizer",
        HF,
        "config_error",
        TINY + "python hf_finetune.py --optim adamw_fusedd > out/train.log 2>&1",
        None,
        fix="There is no such optimizer.",
    ),
    Job(
        "hf-no-metric",
        HF,
        "config_error",
        TINY + "python hf_finetune.py --save-steps 6 --best eval_accuracy --evaluate > out/train.log 2>&1",
        None,
        also=("rank_exception_masked",),
        fix="eval_accuracy is not among the metrics.",
    ),
    Job(
        "hf-old-tokenizers",
        HF,
        "version_mismatch",
        TINY + "mkdir -p shim/tokenizers-0.19.1.dist-info\n"
        "printf 'Metadata-Version: 2.1\\nName: tokenizers\\nVersion: 0.19.1\\n' > "
        "shim/tokenizers-0.19.1.dist-info/METADATA\n"
        f"PYTHONPATH=$PWD/shim {RUN} 2 hf_finetune.py > out/train.log 2>&1",
        None,
        also=("config_error",),
        fix="transformers needs newer tokenizers.",
    ),
    Job(
        "hf-interrupted-scheduler",
        HF,
        "external_kill",
        TINY + "hit SIGTERM self:hf_finetune out/slurm-7003.out \"'loss'\" 6\n"
        "python hf_finetune.py --steps 900 --pause 0.3 > out/slurm-7003.out 2>&1; s=$?\n"
        'echo "slurmstepd: error: *** STEP 7003.0 ON n07 CANCELLED AT 2026-11-27T20:41:09 DUE TO PREEMPTION ***" '
        ">> out/slurm-7003.out; echo exit $s >> out/slurm-7003.out",
        None,
        fix="The scheduler preempted the job.",
    ),
    Job(
        "hf-worker-killed",
        HF,
        "external_kill",
        TINY + "hit SIGKILL 1 out/train.log \"'loss'\" 2\n"
        f"{RUN} 2 hf_finetune.py --steps 900 --pause 0.3 --ddp-timeout 15 > out/train.log 2>&1",
        (1,),
        also=("host_oom",),
        fix="Rank 1 got SIGKILL.",
    ),
    Job("h-accelerate", ACCELERATE, "benign", f"{LAUNCH} accelerate_loop.py --save > out/run.log 2>&1"),
    Job(
        "h-accelerate-smaller-batch",
        ACCELERATE,
        "benign",
        "ulimit -v 9000000; accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no "
        "accelerate_loop.py --find-batch --batch 512 --rows 512 > out/run.log 2>&1",
        fix="Nothing to fix: the batch size was halved until it fitted.",
    ),
    Job(
        "h-accelerate-defaults",
        ACCELERATE,
        "benign",
        "export ACCELERATE_LOG_LEVEL=info; accelerate launch --cpu accelerate_loop.py --epochs 4 > out/run.log 2>&1",
    ),
    Job(
        "accelerate-wait-main",
        ACCELERATE,
        "rank_divergent_branch",
        f"{RUN} 2 accelerate_loop.py --wait main > out/run.log 2>&1",
        (0,),
        alt=((1,), (0, 1)),
        also=("unknown", "rank_exception_masked", "uneven_data"),
        sufficiency="hint",
        fix="Only the main process waits for everyone.",
    ),
    Job(
        "accelerate-gather",
        ACCELERATE,
        "rank_divergent_branch",
        f"{RUN} 2 accelerate_loop.py --metrics gather_own > out/run.log 2>&1",
        None,
        alt=((0,), (1,), (0, 1)),
        also=("uneven_data",),
        fix="The ranks gather different shapes.",
    ),
    Job(
        "accelerate-detail-crash",
        ACCELERATE,
        "framework_bug",
        f"export TORCH_DISTRIBUTED_DEBUG=DETAIL; {RUN} 2 accelerate_loop.py --metrics gather_own > out/run.log 2>&1",
        None,
        also=("unknown", "rank_exception_masked"),
        sufficiency="hint",
        fix="DDP of torch 2.13 crashes in its constructor at this debug level.",
    ),
    Job(
        "accelerate-precision",
        ACCELERATE,
        "config_error",
        f"{LAUNCH} accelerate_loop.py --precision fp12 > out/run.log 2>&1",
        None,
        fix="fp12 is no precision.",
    ),
    Job(
        "h-accelerate-two",
        ACCELERATE,
        "benign",
        f"{RUN} 2 accelerate_loop.py --epochs 3 --save > out/run.log 2>&1",
    ),
    Job(
        "accelerate-choice",
        ACCELERATE,
        "config_error",
        "accelerate launch --cpu --num_processes 1 --mixed_precision fp12 accelerate_loop.py > out/run.log 2>&1",
        None,
        fix="fp12 is no precision; the launcher refuses it.",
    ),
    Job("h-trl-sft", TRL, "benign", TINY + "python trl_train.py sft > out/sft.log 2>&1"),
    Job("h-trl-dpo", TRL, "benign", TINY + "python trl_train.py dpo --save-steps 5 > out/dpo.log 2>&1"),
    Job(
        "h-trl-grpo",
        TRL,
        "benign",
        TINY + f"{RUN} 2 trl_train.py grpo --steps 8 > out/grpo.log 2>&1",
    ),
    Job(
        "h-trl-no-reward",
        TRL,
        "benign",
        TINY + "python trl_train.py grpo --steps 5 --reward none > out/grpo.log 2>&1",
        None,
        also=("config_error", "nan_or_inf"),
        fix="Nothing failed; the reward function returns None for every sample, so nothing is learnt.",
    ),
    Job(
        "trl-dpo-column",
        TRL,
        "config_error",
        TINY + "python trl_train.py dpo --rename chosen:preferred > out/dpo.log 2>&1",
        None,
        also=("rank_exception_masked",),
        fix="DPO needs the column chosen.",
    ),
    Job(
        "trl-grpo-generations",
        TRL,
        "config_error",
        TINY + "python trl_train.py grpo --generations 3 > out/grpo.log 2>&1",
        None,
        fix="The batch of generations cannot be divided by three.",
    ),
    Job(
        "trl-grpo-reward-key",
        TRL,
        "rank_exception_masked",
        TINY + f"{RUN} 2 trl_train.py grpo --reward answer --timeout 20 > out/grpo.log 2>&1",
        None,
        also=("config_error",),
        fix="The reward function asks for a column solution, the data set has answer.",
    ),
    Job(
        "trl-grpo-judge",
        TRL,
        "remote_service_timeout",
        TINY + JUDGE.format("hang") + URL + "python trl_train.py grpo --reward remote --steps 20 > out/grpo.log 2>&1\n"
        "kill $J",
        None,
        fix="The reward server answers no more.",
    ),
    Job(
        "trl-grpo-judge-absent",
        TRL,
        "remote_service_timeout",
        TINY + URL + f"{RUN} 2 trl_train.py grpo --reward remote --timeout 20 > out/grpo.log 2>&1",
        None,
        also=("rank_exception_masked",),
        fix="Nothing listens where the reward server should be.",
    ),
    Job(
        "trl-sft-broken-json",
        TRL,
        "storage_fault",
        TINY + "truncate -s 5000 tiny/train.jsonl; python trl_train.py sft > out/sft.log 2>&1",
        None,
        also=("rank_exception_masked", "config_error"),
        fix="The data file ends in the middle of a row.",
    ),
)
