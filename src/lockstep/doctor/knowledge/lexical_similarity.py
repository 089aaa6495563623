"""Compares log lines with the knowledge base's own texts: which failure class describes lines that no rule knows.

The texts are the examples of the signatures, and title and explanation of each class. Texts are compared by the cosine
of their words and pairs of words, weighted by tf-idf: words that occur in many classes count little. A class counts
with its three most similar texts, so that one text that happens to share a word decides nothing.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, sqrt

_WORD = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}(?![a-z])|\d+")
_NAME = re.compile(r"(?:[\w.~-]{0,60}/){2,20}[\w.-]{0,60}|0x[0-9a-f]+|\b[0-9a-f]{12,64}\b|https?://\S{1,200}")
"""Paths, addresses and ids, which say nothing about the class."""
_CLAUSE_END = re.compile(r"(?<=[a-z])[.:;,] ")
_TEXTS_PER_CLASS = 3
_MAX_CHARS = 400
_MAX_WORDS = 60
"""Further words of a text are ignored."""
_NOT_COMPARED = frozenset(["benign", "unknown"])


@dataclass(frozen=True, slots=True)
class DescribedFailure:
    """A text of the knowledge base about a failure class."""

    cls: str
    text: str


@dataclass(frozen=True, slots=True)
class SimilarClass:
    """A failure class with the text of it that is most similar to a line.

    Attributes:
        similarity: Half of the sum of the highest three cosines of a text of the class with the line: from 0 to 1.5.
    """

    cls: str
    similarity: float
    text: str


class LexicalIndex:
    """The texts of the knowledge base, indexed by their words."""

    def __init__(self, described: Iterable[DescribedFailure]) -> None:
        self._texts = [each for each in described if each.cls not in _NOT_COMPARED]
        counted = [Counter(words_of(each.text)) for each in self._texts]
        classes: dict[str, set[str]] = defaultdict(set)
        for each, words in zip(self._texts, counted, strict=True):
            for word in words:
                classes[word].add(each.cls)
        self._most = len({each.cls for each in self._texts}) + 1
        self._rarity = {word: log(self._most / len(found)) for word, found in classes.items()}
        self._by_word: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for at, words in enumerate(counted):
            for word, weight in self._weights(words).items():
                self._by_word[word].append((at, weight))

    def _weights(self, words: Counter[str]) -> dict[str, float]:
        """Returns the words with their weights, as a vector of length 1. An unknown word is as rare as can be."""
        weights = {word: (1 + log(count)) * self._rarity.get(word, log(self._most)) for word, count in words.items()}
        length = sqrt(sum(each * each for each in weights.values())) or 1.0
        return {word: weight / length for word, weight in weights.items()}

    def similar_classes(self, line: str) -> Sequence[SimilarClass]:
        """Returns the classes with texts that share words with the line or a clause of it, the most similar first."""
        best: dict[str, SimilarClass] = {}
        for clause in dict.fromkeys([line, *_CLAUSE_END.split(line[:_MAX_CHARS])]):
            for each in self._similar_to(clause):
                if each.cls not in best or each.similarity > best[each.cls].similarity:
                    best[each.cls] = each
        return sorted(best.values(), key=lambda each: (-each.similarity, each.cls))

    def _similar_to(self, clause: str) -> Iterator[SimilarClass]:
        cosines: dict[int, float] = defaultdict(float)
        for word, weight in self._weights(Counter(words_of(clause))).items():
            for at, other in self._by_word.get(word, ()):
                cosines[at] += weight * other
        of_class: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for at, cosine in cosines.items():
            of_class[self._texts[at].cls].append((cosine, at))
        for cls, found in of_class.items():
            highest = sorted(found, reverse=True)[:_TEXTS_PER_CLASS]
            yield SimilarClass(cls, sum(cosine for cosine, _ in highest) / 2, self._texts[highest[0][1]].text)


def words_of(text: str) -> list[str]:
    """Returns the words and pairs of neighbouring words of a text, in lower case; all numbers are one word."""
    found = _WORD.findall(_NAME.sub(" ", text[:_MAX_CHARS]))[:_MAX_WORDS]
    words = ["#" if each[0].isdigit() else each.lower() for each in found]
    pairs = [f"{one} {other}" for one, other in pairwise(words) if one != other]
    return [*(each for each in words if each != "#"), *pairs]
