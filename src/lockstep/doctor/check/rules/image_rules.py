"""Judges what the images of a run need: packages, room on disk and in /dev/shm, vLLM's caches. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.base.text import count_noun
from lockstep.config.run_config import RunConfig
from lockstep.config.vision import VLLM_GPU_FAMILIES, VLLM_PACKAGES
from lockstep.doctor.check.rules.limit_rules import MIB, SHM_FIX, format_size
from lockstep.doctor.output.findings import Finding

QUEUE_CHUNKS = 10
"""Messages of vLLM's ring buffer in /dev/shm, through which an engine calls its tensor-parallel workers
(`MessageQueue`)."""
QUEUE_CHUNK_VARIABLE = "VLLM_MQ_MAX_CHUNK_BYTES_MB"
_QUEUE_CHUNK_MIB = 16
QUEUE_SOURCE = "https://github.com/vllm-project/vllm/blob/main/vllm/distributed/device_communicators/shm_broadcast.py"
DOCKER_SHM = 64 * MIB
"""The size of /dev/shm in a container that is started without `--shm-size`."""


@dataclass(frozen=True, slots=True)
class ImageDemand:
    """The images of a run, and what this host has for them."""

    family: str
    """`model_type` of the policy."""
    samples: int
    images: int
    """Number of images of all samples."""
    most_images: int
    """Number of images of the sample that has most."""
    most_tokens: int
    """Tokens that the images of one sample take, at most."""
    largest: int
    """Tokens of the largest image."""
    largest_size: tuple[int, int]
    """Width and height of that image, in pixels."""
    mean_tokens: float
    """Tokens of an image, on average."""
    token_bytes: int
    """Bytes of a prepared image, for each of its tokens."""
    tower: int = 0
    """Parameters of tower and projector."""
    disk_free: int | None = None
    """Free bytes where the run's folder will be."""
    shm_free: int | None = None
    shm_other: int = 0
    """Bytes of /dev/shm that the run needs for other things: published weights, checkpoints in memory."""
    on_cpu: bool = False
    """Whether engines run on CPUs."""
    missing: tuple[str, ...] = ()
    """Packages that are not installed on this host, of those that vLLM imports to serve images with this family."""

    @property
    def prepared(self) -> int:
        """Bytes of all prepared images, if none is in several samples."""
        return int(self.images * self.mean_tokens * self.token_bytes)


def judge_images(config: RunConfig, demand: ImageDemand, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Judges what the images of a run need.

    Args:
        environ: the environment of the engines.
    """
    if demand.images:  # the sizes of those that an environment answers with are not known
        yield _describe(demand)
        yield _judge_disk(config, demand)
    if config.needs_engines and config.rollout.engine.kind == "vllm":
        yield from _judge_packages(config, demand)
        if demand.on_cpu and demand.family in VLLM_GPU_FAMILIES:
            yield Finding(
                "images-attention", "error", "", f"engines of vLLM serve images with {demand.family} on CPUs",
                "its image tokens attend to each other, and vLLM's attention on CPUs is causal: the engine refuses it",
                "set rollout.engine.kind=builtin, or use GPUs",
            )  # fmt: skip
        yield from _judge_batch(config, demand)
        yield _judge_shm(config, demand, environ)


def _describe(demand: ImageDemand) -> Finding:
    width, height = demand.largest_size
    return Finding(
        "images", "note", "",
        f"{count_noun(demand.images, 'image')} in {count_noun(demand.samples, 'sample')}, at most {demand.most_images} "
        f"in one with {count_noun(demand.most_tokens, 'token')} together; the largest ({width} x {height} pixels) has "
        f"{count_noun(demand.largest, 'token')}, an image {demand.mean_tokens:,.0f} on average; tower and projector "
        f"have {demand.tower / 1e6:,.1f} million parameters",
    )  # fmt: skip


def _judge_disk(config: RunConfig, demand: ImageDemand) -> Finding:
    room = int(config.model.vision.store_gb * 1e9)
    needed = min(demand.prepared, room)
    seen = (
        f"prepared images take {format_size(demand.prepared)} of the run's folder "
        f"({format_size(demand.token_bytes * demand.mean_tokens)} each on average)"
    )
    if demand.prepared > room:
        seen += f", of which it keeps {format_size(room)} (model.vision.store_gb) and prepares the others again"
    if demand.disk_free is None:
        return Finding("images-disk", "unchecked", "", f"{seen}; the room there is not known")
    seen += f", and {format_size(demand.disk_free)} are free there"
    if needed <= demand.disk_free:
        return Finding("images-disk", "ok", "", seen)
    return Finding(
        "images-disk", "error", "", seen, "images are kept as the model gets them, for trainers and engines",
        "set folder to a larger disk, or lower model.vision.store_gb or model.vision.max_pixels",
    )  # fmt: skip


def _judge_packages(config: RunConfig, demand: ImageDemand) -> Iterator[Finding]:
    if not demand.missing:
        return
    local, verb = config.cluster.kind == "local", "is" if len(demand.missing) == 1 else "are"
    where = "here" if local else f"on this host; the hosts of engines need {' and '.join(demand.missing)}"
    yield Finding(
        "images-packages", "error" if local and demand.family in VLLM_PACKAGES else "warning", "",
        f"{' and '.join(demand.missing)} {verb} not installed {where}",
        f"vLLM imports it for images with {demand.family}, and does not start without it",
        f"pip install {' '.join(demand.missing)} (torchvision from the index of the installed torch, to which it "
        "belongs), or set rollout.engine.kind=builtin",
    )  # fmt: skip


def _judge_batch(config: RunConfig, demand: ImageDemand) -> Iterator[Finding]:
    """Judges whether an image fits into a step of vLLM, if images may not be divided among steps."""
    assert config.rollout.engine.kind == "vllm"
    extra = config.rollout.engine.extra
    batch = extra.get("max_num_batched_tokens")
    if extra.get("disable_chunked_mm_input") and isinstance(batch, int) and batch < demand.largest:
        yield Finding(
            "images-batch", "error", "",
            f"the largest image takes {count_noun(demand.largest, 'token')}, and rollout.engine.extra has "
            f"max_num_batched_tokens {batch} with disable_chunked_mm_input",
            "vLLM never begins with a prompt whose image does not fit into a step",
            f"set rollout.engine.extra.max_num_batched_tokens={demand.largest} or more, or lower "
            "model.vision.max_pixels",
        )  # fmt: skip


def _judge_shm(config: RunConfig, demand: ImageDemand, environ: Mapping[str, str]) -> Finding:
    assert config.rollout.engine.kind == "vllm"
    engine = config.rollout.engine
    if engine.tensor_parallel_size == 1:
        seen = "engines read prepared images from the run's folder: they take no room in /dev/shm"
        return Finding("images-shm", "ok", "", seen)
    chunk = environ.get(QUEUE_CHUNK_VARIABLE, "")
    each = QUEUE_CHUNKS * (int(chunk) if chunk.isdigit() else _QUEUE_CHUNK_MIB) * MIB
    needed = engine.count * each
    local = config.cluster.kind == "local"
    pixels = demand.most_tokens * demand.token_bytes
    seen = (
        f"{count_noun(engine.count, 'engine')} of vLLM with {engine.tensor_parallel_size} workers each "
        f"{'needs' if engine.count == 1 else 'need'} {format_size(needed)} of /dev/shm to send requests to workers, "
        f"each with up to {format_size(pixels)} of pixels; the rest of the run needs {format_size(demand.shm_other)}"
    )
    if demand.shm_free is None or not local:
        seen += f"; a container has {format_size(DOCKER_SHM)} unless it gets more"
        return Finding("images-shm", "note", "", seen, "", SHM_FIX, QUEUE_SOURCE)
    seen += f"; {format_size(demand.shm_free)} are free"
    if needed + demand.shm_other <= demand.shm_free:
        return Finding("images-shm", "ok", "", seen, source=QUEUE_SOURCE)
    return Finding(
        "images-shm", "error", "", seen, "a worker that writes beyond the room there ends with a bus error",
        f"{SHM_FIX}; {format_size(needed + demand.shm_other)} at least", QUEUE_SOURCE,
    )  # fmt: skip
