"""The types of training data: prompts, completions, groups, rollouts, documents.

All are dataclasses of numpy arrays and JSON values, so that they are sent between processes and stored in the ledger
without pickle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort"]
EpisodeEnd = Literal["answer", "environment", "turns", "tokens", "error", "abort"]
"""Why a conversation with an environment ended: the model's turn called no tool, the environment ended it, the limit of
turns or of tokens was reached, the environment failed, or the run aborted it."""


@dataclass(slots=True)
class PlacedImage:
    """An image of a prompt, or of an environment's answer, with the places of its features. The pixels are in the run's
    `ImageStore`."""

    digest: str
    """The key of the prepared image in the store: a hash of its content and of the settings of its preparation."""
    places: np.ndarray
    """int32 `[features]`: indices of the tokens whose embeddings are the image's features, ascending. Only they say
    where an image is: a model may generate the placeholder token as text."""
    source: str = ""
    """Path of the file. An image in the data itself is written to one beside the prepared image; without a store it is
    named, such as `image 0 of row 7`."""
    size: tuple[int, int] = (0, 0)
    """Width and height in the file, in pixels."""
    resized: tuple[int, int] = (0, 0)
    """Width and height as the model gets it: boxes that it predicts may refer to these."""
    origin: str = ""
    """Of a frame of a video file: the video's path, and the frame's number in it, such as `clip.mp4#12`."""

    def moved(self, by: int) -> "PlacedImage":
        """Returns the image with places that are `by` larger: where it is in a row that has its tokens from there."""
        return replace(self, places=self.places + np.int32(by))

    def to_json(self) -> dict[str, Any]:
        """The image as JSON values; consecutive places as `[first, count]`."""
        breaks = np.flatnonzero(np.diff(self.places) != 1) + 1
        runs = [[int(run[0]), int(run.size)] for run in np.split(self.places, breaks) if run.size]
        return {**self.description(), "places": runs}

    def description(self) -> dict[str, Any]:
        """The image as JSON values, without its places."""
        about = {"source": self.source, "size": list(self.size), "resized": list(self.resized)}
        return {"digest": self.digest, **about, **({"origin": self.origin} if self.origin else {})}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "PlacedImage":
        """The inverse of `to_json`. Raises LookupError, TypeError or ValueError for other values."""
        runs = [np.arange(first, first + count, dtype=np.int32) for first, count in value["places"]]
        places = np.concatenate([np.empty(0, np.int32), *runs])
        (width, height), (new_width, new_height) = value["size"], value["resized"]
        resized, origin = (new_width, new_height), value.get("origin", "")
        return cls(value["digest"], places, value["source"], (width, height), resized, origin)


@dataclass(slots=True)
class Prompt:
    """A tokenized prompt with the other columns of its row."""

    uid: str
    """`"{epoch}:{row}"`: identifies this use of the row. A run uses each uid once."""
    row: int
    """Row of the dataset."""
    tokens: np.ndarray
    """int32 `[prompt tokens]`."""
    text: str
    messages: list[dict[str, Any]] | None = None
    """The conversation as it is in the data; None if the prompt is text."""
    answer: Any = None
    """Ground truth for the verifiers; None if the data has none."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of the row except prompt and completion, unchanged; passed to reward functions."""
    conversation: list[dict[str, Any]] | None = None
    """What the chat template wrote, if that is not `messages`: a text as a user's message, or messages with the system
    message of the config. Reward models read it; the ledger, whose prompts are scored, does not store it."""
    images: list[PlacedImage] = field(default_factory=list)
    """In the order of their places in `tokens`."""

    @property
    def scored_conversation(self) -> list[dict[str, Any]] | None:
        """The conversation that reward models read; None if the prompt is text."""
        return self.conversation or self.messages


@dataclass(slots=True)
class Episode:
    """A conversation between the model and an environment, turn by turn, without the tokens."""

    messages: list[dict[str, Any]]
    """The messages after the prompt, with `role` and `content`: the model's and the environment's. A part
    `{"type": "image"}` of a content stands for the next one of the completion's images."""
    rewards: list[float]
    """The environment's reward for each turn of the model that it answered."""
    ended: EpisodeEnd
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts of events, such as `calls` of tools and their `errors`."""

    @property
    def turns(self) -> int:
        """Number of the model's turns."""
        return sum(message.get("role") == "assistant" for message in self.messages)


class Completion(msgspec.Struct):
    """One completion of a prompt, with the values that training needs. A step has thousands: a struct is made in a
    quarter of the time of a dataclass."""

    request: str
    """Id of the request that produced it."""
    tokens: np.ndarray
    """int32 `[tokens]`, including the end-of-sequence token if it was generated."""
    logprobs: np.ndarray
    """float32 `[tokens]`, under the distribution that was sampled from; 0 for tokens that an environment wrote."""
    versions: np.ndarray
    """int32 `[tokens]`: version of the weights that generated each token; -1 for tokens that an environment wrote."""
    finish: FinishReason
    text: str
    """The text without special tokens. With an environment: the model's last turn, which has the answer. The whole
    conversation is in `episode`."""
    mask: np.ndarray | None = None
    """bool `[tokens]`: False for tokens that an environment wrote, which are not learned; None if there are none."""
    episode: Episode | None = None
    """None without an environment."""
    images: list[PlacedImage] = msgspec.field(default_factory=list)
    """The images that an environment answered with, in the order of their places in `tokens`. Their tokens are not
    learned."""

    @property
    def generated(self) -> int:
        """Number of tokens that the model wrote; lengths, limits and denominators count only these."""
        return len(self.tokens) if self.mask is None else int(np.count_nonzero(self.mask))

    def own(self, values: np.ndarray) -> np.ndarray:
        """Selects the values of the tokens that the model wrote from values `[tokens]`."""
        return values if self.mask is None else values[self.mask]


@dataclass(slots=True)
class Group:
    """The completions of one prompt, with their rewards after scoring."""

    prompt: Prompt
    completions: list[Completion]
    rewards: np.ndarray | None = None
    """float32 `[completions]`."""
    breakdown: dict[str, np.ndarray] = field(default_factory=dict)
    """Unweighted value of each reward term, float32 `[completions]`."""


@dataclass(slots=True)
class Rollouts:
    """The completions of one step: groups of equal size."""

    step: int
    version: int
    """Version of the weights with which the step's generation began."""
    groups: list[Group]

    @property
    def rewards(self) -> np.ndarray:
        """float32 `[groups, group size]`. Raises ValueError if a group is not scored."""
        rows = [group.rewards for group in self.groups if group.rewards is not None]
        if len(rows) != len(self.groups):
            raise ValueError(f"{len(self.groups) - len(rows)} of {len(self.groups)} groups are not scored")
        return np.stack(rows)


@dataclass(slots=True)
class Pair:
    """A prompt with a better and a worse completion. All tokens are int32 `[tokens]`."""

    uid: str
    row: int
    prompt: np.ndarray
    chosen: np.ndarray
    """As a model would generate it: with the end-of-sequence token, and without what a chat template writes after."""
    rejected: np.ndarray
    margin: float = 0.0
    """How much better the chosen completion is, for the loss of reward models; the data's column `margin`."""
    chosen_mask: np.ndarray | None = None
    """bool `[tokens]`: False for tokens that an environment wrote, which are not learned; None if there are none."""
    rejected_mask: np.ndarray | None = None
    images: list[PlacedImage] = field(default_factory=list)
    """In the order of their places in `prompt`."""
    chosen_images: list[PlacedImage] = field(default_factory=list)
    """The images of an environment's answers, with places in `chosen`."""
    rejected_images: list[PlacedImage] = field(default_factory=list)


@dataclass(slots=True)
class LabelledCompletion:
    """A prompt with a completion that is desirable or not. Tokens as in `Pair`."""

    uid: str
    row: int
    prompt: np.ndarray
    completion: np.ndarray
    desirable: bool
    images: list[PlacedImage] = field(default_factory=list)
    """In the order of their places in `prompt`."""


@dataclass(slots=True)
class Document:
    """One sample of supervised fine-tuning."""

    uid: str
    row: int
    tokens: np.ndarray
    """int32 `[tokens]`."""
    loss_mask: np.ndarray
    """bool `[tokens]`: which tokens are targets; the first token never is one."""
    images: list[PlacedImage] = field(default_factory=list)
    """In the order of their places in `tokens`."""
