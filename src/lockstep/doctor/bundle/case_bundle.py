"""Writes the redacted files of a job: as a bundle for a bug report, or as a case of the corpus."""

import hashlib
import itertools
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from lockstep.base.folders import scratch_dir, write_atomically
from lockstep.base.json_text import read_json
from lockstep.base.text import count_noun
from lockstep.doctor.bundle.redaction import Redactor
from lockstep.doctor.knowledge.knowledge_schema import FailureClass
from lockstep.doctor.logs.log_sources import CollectedSources, collect_sources, open_streams
from lockstep.doctor.logs.parsed_log import ParsedLog
from lockstep.doctor.output.job_answer import JobAnswer, judge_files
from lockstep.doctor.runs.run_outcome import RECORD_FILE, record_text
from lockstep.ledger.run_folder import CONFIG_FILE, SUMMARY_FILE
from lockstep.watch.diagnosis.verdict import Culprit, Verdict
from lockstep.watch.supervisor.incident import USUAL_FOLDER

MANIFEST = "bundle.json"
_HEAD_BYTES, _CHUNK_BYTES = 8192, 32 << 20
_HOST_FIELDS = ("host", "address", "peer", "node")
_OWN_RUN_PARTS = ("logs", USUAL_FOLDER, SUMMARY_FILE, CONFIG_FILE)
"""What a bundle has of a run folder: neither data nor weights."""
_HOST_FORM = re.compile(r"(?=[\w.-]*[A-Za-z])[\w.-]{2,253}")
_UNSURE = 0.6
"""Below this confidence a case says that its logs only hint at the cause."""


class BundleRefused(ValueError):
    """Nothing was written, because something would be overwritten, or a value is not possible."""


@dataclass(frozen=True, slots=True)
class WrittenBundle:
    """What was written.

    Attributes:
        left_out: Files that are not in it, with the reason.
        replaced: The number of names that were replaced.
        secrets: The number of secrets that were hidden.
        answer: What the redacted files say. All its names are substitutes.
        original: The class of the original.
    """

    path: Path
    files: int
    left_out: tuple[str, ...]
    replaced: int
    secrets: int
    answer: JobAnswer
    original: str

    @property
    def verdict(self) -> Verdict:
        return self.answer.verdict

    @property
    def same(self) -> bool:
        """Whether the class of the redacted files is that of the original."""
        return self.verdict.cause == self.original

    @property
    def lines(self) -> list[str]:
        """Says what was written, what is not in it, and what to check before it is shared."""
        counts = (
            f"{count_noun(self.files, 'file')}, {count_noun(self.replaced, 'name')} replaced, "
            f"{count_noun(self.secrets, 'secret')} hidden"
        )
        found = [f"wrote {self.path}: {counts}", *(f"not in it: {each}" for each in self.left_out)]
        if not self.same:
            found.append(f"note: its class is {self.verdict.cause}, that of the original {self.original}")
        return [*found, "Look through it before you share it: a name of an unusual form may have stayed."]


def write_bundle(answer: JobAnswer, target: Path, *, force: bool = False) -> WrittenBundle:
    """Writes the job's files without names and secrets into a folder, or a zip file if the target ends with `.zip`.

    Args:
        force: Replace an earlier bundle. Anything else is never replaced.

    Raises:
        BundleRefused: The target exists, or nothing can be bundled.
    """
    _check_target(target, force)
    with scratch_dir("lockstep-bundle-") as scratch:
        folder = scratch / "bundle"
        written = _write_files(answer, folder, target)
        manifest = {"format": 1, "left_out": list(written.left_out), "verdict": written.verdict.json()}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if target.suffix == ".zip":
            _zip(folder, target)
        else:
            if target.exists():
                shutil.rmtree(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, target)
    return written


def share_case(
    answer: JobAnswer, corpus: Path, *, cause: str | None = None, culprits: Sequence[str] = ()
) -> tuple[str, WrittenBundle]:
    """Adds the redacted job to a corpus: `truth.json` and `jobs/ID/`. Returns the id of the case.

    Args:
        cause: The class that the user confirms; None proposes the verdict's.
        culprits: What the user confirms as culprits, in the original names: `rank:3` or a host.

    Raises:
        BundleRefused: The class is unknown, the case is in the corpus already, or the folder is no corpus.
    """
    if cause is not None and cause not in get_args(FailureClass):
        raise BundleRefused(f"--class {cause!r}: no such class. One of: {', '.join(get_args(FailureClass))}")
    truth_file = corpus / "truth.json"
    if corpus.exists() and not truth_file.is_file() and any(corpus.iterdir()):
        raise BundleRefused(f"{corpus} is not empty and has no truth.json; give a new folder or a corpus")
    truth = read_json(truth_file) if truth_file.is_file() else {}
    if not isinstance(truth, dict):
        raise BundleRefused(f"{truth_file} is not a mapping of cases")
    with scratch_dir("lockstep-case-") as scratch:
        folder = scratch / "job"
        redactor = _redactor_of(answer)
        written = _write_files(answer, folder, corpus, redactor)
        name = f"{(cause or answer.verdict.cause).replace('_', '-')}-{_digest(folder)}"
        if name in truth or (corpus / "jobs" / name).exists():
            raise BundleRefused(f"{corpus} has this job already: jobs/{name}")
        about = _truth_of(written.verdict, cause, [redactor.text(each) for each in culprits])
        (corpus / "jobs").mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, corpus / "jobs" / name)
    text = json.dumps({**truth, name: about}, indent=1, ensure_ascii=False)
    write_atomically(truth_file, (text + "\n").encode())
    return name, written


def _truth_of(verdict: Verdict, cause: str | None, culprits: Sequence[str]) -> dict[str, Any]:
    """Returns the entry of `truth.json`; `confirmed` says whether a person confirmed the class."""
    named: list[Any] = [int(each[5:]) if re.fullmatch(r"rank:\d+", each) else each for each in culprits]
    proposed = [each for each in map(_name_of, verdict.culprits) if each is not None]
    return {
        "class": cause or verdict.cause,
        "culprit": (named or proposed) or None,
        "sufficiency": "root" if cause is not None or verdict.confidence >= _UNSURE else "hint",
        "framework": "",
        "confirmed": cause is not None,
    }


def _name_of(culprit: Culprit) -> str | int | None:
    return culprit.rank if culprit.rank is not None else culprit.name or culprit.host or None


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()[:8]


def _check_target(target: Path, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not force:
        raise BundleRefused(f"{target} exists; give another name, or --force to replace an earlier bundle")
    if not _is_bundle(target):
        raise BundleRefused(f"{target} is not a bundle, so that --force does not replace it; give another name")


def _is_bundle(target: Path) -> bool:
    if target.is_symlink():
        return False
    if target.is_dir():
        return (target / MANIFEST).is_file()
    try:
        with zipfile.ZipFile(target) as archive:
            return MANIFEST in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _zip(folder: Path, target: Path) -> None:
    """Writes a zip file whose times say nothing about the user's."""
    draft = folder.parent / "bundle.zip"
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                member = zipfile.ZipInfo(file.relative_to(folder).as_posix())
                archive.writestr(member, file.read_bytes(), zipfile.ZIP_DEFLATED)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, draft.read_bytes())


def _write_files(answer: JobAnswer, folder: Path, target: Path, redactor: Redactor | None = None) -> WrittenBundle:
    """Writes the redacted files and judges them."""
    redactor = redactor or _redactor_of(answer)
    folder.mkdir()
    found, left_out = _sources(answer)
    for _, text in _texts(found, []):
        redactor.learn(text)
    for name, text in _texts(found, left_out):
        path = folder / _safe_name(redactor.text(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(redactor.text(text))
    if answer.run is not None:
        (folder / RECORD_FILE).write_text(redactor.text(record_text(answer.run)), encoding="utf-8")
    files = sum(each.is_file() for each in folder.rglob("*"))
    if not files:
        raise BundleRefused(f"{', '.join(answer.paths)}: no text to write; left out: {'; '.join(left_out)}")
    left = tuple(redactor.text(each) for each in left_out)
    found_again = judge_files([str(folder)], answer.rules, ranks=answer.ranks, world_size=answer.world_size)
    return WrittenBundle(target, files, left, len(redactor.names), redactor.secrets, found_again, answer.verdict.cause)


def _redactor_of(answer: JobAnswer) -> Redactor:
    """Returns a redactor that knows the hosts of the job, and the name of the run."""
    hosts = {each.host for each in answer.verdict.culprits}
    for log in answer.logs if answer.run is None else ():  # the logs of our runs are named after workers, not hosts
        hosts |= _hosts_of(log)
    runs = {answer.run.name, Path(answer.run.folder).absolute().name} if answer.run is not None else set()
    return Redactor((each for each in hosts if _HOST_FORM.fullmatch(each or "")), (each for each in runs if each))


def _hosts_of(log: ParsedLog) -> set[str]:
    found = {log.origin.host, *(origin.host for origin in log.origins)}
    for match in log.matches:
        found.add(match.origin.host)
        found |= {value for name, value in match.fields.items() if name in _HOST_FIELDS and re.search(r"\d", value)}
    return found


def _sources(answer: JobAnswer) -> tuple[CollectedSources, list[str]]:
    """Returns the sources of the job, and what is left out."""
    if "-" in answer.paths:
        raise BundleRefused("standard input can be read only once; save it to a file, and give the file")
    paths = list(answer.paths)
    if answer.run is not None:
        top = Path(paths[0])
        found = collect_sources([paths[0]])
        own = [each for each in found.sources if each.name.split("/")[0] in _OWN_RUN_PARTS]
        found.sources = [each for each in own if each.path is not None and not _leads_out(each.path, paths)]
        return found, [f"{top.name}: everything but {', '.join(_OWN_RUN_PARTS)} and the record of the ledger"]
    found = collect_sources(paths)
    outside = [each for each in found.sources if each.path is not None and _leads_out(each.path, paths)]
    found.sources = [each for each in found.sources if each not in outside]
    links = dict.fromkeys(each.name for each in outside)
    return found, [*found.gaps, *(f"{name}: a link to something outside of what was given" for name in links)]


def _leads_out(file: Path, given: Sequence[str]) -> bool:
    """Whether a file is in a given folder only by a link, so that nobody may have meant to share it."""
    tops = [Path(each) for each in given]
    folders = [top if top.is_dir() else _fixed_part(top) for top in tops if not top.is_file()]
    around = [folder for folder in folders if file.is_relative_to(folder)]
    real = file.resolve()
    return bool(around) and not any(real.is_relative_to(folder.resolve()) for folder in around)


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part of a pattern that has a wildcard."""
    return Path(*itertools.takewhile(lambda part: not set("*?[") & set(part), pattern.parts))


def _texts(found: CollectedSources, left_out: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the name of each source with its text, long ones in parts that end with a line."""
    gaps: list[str] = []
    for source, blocks in open_streams(found.sources, gaps):
        rest, is_text = b"", True
        for block in blocks:
            if not rest and b"\0" in block[:_HEAD_BYTES]:
                left_out.append(f"{source.name}: not a text")
                is_text = False
                break
            rest += block
            if len(rest) > _CHUNK_BYTES:
                end = rest.rfind(b"\n") + 1 or len(rest)
                yield source.name, rest[:end].decode("utf-8", "replace")
                rest = rest[end:]
        if is_text and rest:
            yield source.name, rest.decode("utf-8", "replace")
    left_out += gaps


def _safe_name(name: str) -> str:
    """Returns a relative path without parts that lead out of the bundle."""
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..", ".")]
    return "/".join(parts) or "file"
