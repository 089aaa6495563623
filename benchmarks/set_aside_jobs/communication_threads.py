"""Jobs of `benchmarks/cases/threads_communication`: failures of communication and of processes, re-told from public
issue threads (`source`) with an odd number, in rounds. Each has the error lines that the named programs print, and
surroundings of our own. A thread was taken where its cause is established: by a maintainer, by the reporter's fix, or
by lines that leave one cause only.

The truth of a round was committed before any of its jobs was judged; `docs/explain.md` has the figures of that first
look. Its errors were then read and general rules written for them, so that the corpus is for development.
"""

from benchmarks.set_aside_jobs.entry import Entry
from benchmarks.set_aside_jobs.seventh_told_entries import told

_FIRST_ROUND = [
    told(
        "ipv6-of-a-veth",
        "Ray Train, PyTorch",
        "wrong_network_interface",
        "pytorch/pytorch",
        68893,
        culprit=("veth75fa783",),
        alt=(("veth1d6cc0e",), ("veth75fa783", "veth1d6cc0e")),
    ),
    told(
        "cifar-ssh-255",
        "DeepSpeed",
        "rendezvous_incomplete",
        "deepspeedai/DeepSpeed",
        4907,
        culprit=("192.168.3.100",),
        also_ok=("master_unreachable", "config_error", "network_blocked"),
    ),
    told(
        "rollout-ports-race",
        "verl, vLLM",
        "port_in_use",
        "verl-project/verl",
        6677,
        culprit=("32847",),
        alt=(("7181",), ("vLLMHttpServer",), ("6840",)),
    ),
    told(
        "communicator-port-again",
        "TRL, vLLM",
        "port_in_use",
        "vllm-project/vllm",
        15987,
        also_ok=("vllm_weight_sync",),
    ),
    told("train-node-shut-down", "Ray Train", "ray_node_or_gcs", "ray-project/ray", 22349, culprit=("10.128.0.103",)),
    told("ingest-node-died", "Ray Train", "ray_node_or_gcs", "ray-project/ray", 43751, culprit=("10.72.56.3",)),
    told(
        "engine-given-bridge-address",
        "OpenRLHF, vLLM, Ray",
        "wrong_network_interface",
        "OpenRLHF/OpenRLHF",
        265,
        culprit=("172.17.0.2",),
        also_ok=("master_unreachable", "vllm_weight_sync"),
    ),
    told(
        "learners-want-sixty-cpus",
        "open-instruct, Ray",
        "ray_resources_pending",
        "allenai/open-instruct",
        1431,
    ),
    told("one-card-called-tpu", "vLLM, Ray", "ray_resources_pending", "gpustack/gpustack", 5509),
    told("loader-thread-at-exit", "DeepSpeed", "benign", "deepspeedai/DeepSpeed", 887),
    told("walls-of-group-warnings", "PyTorch, LitGPT", "benign", "pytorch/pytorch", 126275),
    told(
        "send-while-peers-gather",
        "TRL, vLLM",
        "rank_divergent_branch",
        "huggingface/trl",
        7103,
        culprit=(0,),
        also_ok=("framework_bug", "vllm_weight_sync"),
    ),
    told(
        "no-route-before-rank-zero",
        "PyTorch-BigGraph, gloo",
        "master_unreachable",
        "pytorch/gloo",
        219,
        culprit=("learn-a01",),
        alt=((0,),),
        also_ok=("network_blocked", "rendezvous_incomplete"),
    ),
    told(
        "generation-two-on-one",
        "verl, Ray",
        "gpu_binding",
        "verl-project/verl",
        161,
        culprit=(0, 1),
        alt=((0,), (1,), ("10",)),
    ),
    told("pod-with-64-megabytes", "TensorFlow, Kubeflow", "shm_too_small", "NVIDIA/nccl", 525),
    told(
        "worker-node-stopped-once",
        "torchrun",
        "external_kill",
        "pytorch/pytorch",
        147064,
        culprit=("node-b",),
        alt=((1,), ("demo-worker-0",), ("38",)),
    ),
]

ENTRIES: list[Entry] = [*_FIRST_ROUND]
