"""Jobs that cannot run here (GPUs, InfiniBand, many hosts): re-told after the error formats of public issue threads,
with surroundings of our own. Their files are kept as they are."""

from benchmarks.set_aside_jobs.entry import Entry

ENTRIES = [
    Entry(
        "megatron-ib-port",
        "Megatron-LM",
        "ib_rdma_fault",
        culprit=("gpu-n37",),
        alt=(("mlx5_2",),),
        also_ok=("network_blocked",),
    ),
    Entry(
        "verl-bus-loss",
        "verl",
        "gpu_hardware_fault",
        culprit=("10.60.2.19",),
        alt=(("0000:9a:00",), ("10.60.2.19", "0000:9a:00")),
    ),
    Entry("nemo-sft", "NeMo", "benign"),
    Entry("megatron-local-nan", "Megatron-LM", "nan_or_inf", culprit=(13,), alt=(("hgx-02",),)),
    Entry("trl-nvlink-fatal", "TRL", "gpu_hardware_fault", culprit=("lab-h100",), alt=(("0000:ab:00",), (2,))),
    Entry(
        "openrlhf-vllm-dtype",
        "OpenRLHF",
        "vllm_weight_sync",
        culprit=("LLMRayActor",),
        alt=(("48835",),),
        also_ok=("config_error",),
    ),
    Entry("compose-nccl-segments", "NCCL", "shm_too_small"),
    Entry("megatron-410m", "Megatron-LM", "benign"),
    Entry("verl-gsm8k", "verl", "benign"),
    Entry("torch-h200-start", "PyTorch", "gpu_hardware_fault", also_ok=("version_mismatch",)),
    Entry(
        "torchtitan-two-hosts", "torchtitan", "wrong_network_interface", culprit=("docker0",), alt=(("trn-a", "trn-b"),)
    ),
    Entry("slurm-three-nodes", "PyTorch", "version_mismatch", culprit=("nd2",)),
    Entry("grpo-same-card", "PyTorch", "gpu_binding", culprit=(0, 1), alt=((1,), (0,), ("node3",))),
    Entry("openrlhf-reinforce", "OpenRLHF", "benign"),
    Entry("torchtitan-embedding", "torchtitan", "cuda_kernel_error", culprit=(5,)),
]
