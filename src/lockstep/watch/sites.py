"""Which line of the program issued a call: the innermost frame that is neither torch's nor the recorder's."""

from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lockstep.watch.collectives import digest
from lockstep.watch.tape import Tape

DEPTH = 80
"""Frames that are looked at: FSDP's hooks stand some thirty frames below the line that called the model."""
_PASSED = ("/contextlib.py", "/functools.py", "/threading.py")
_LENGTH = 150
_NEAR = 8
_PARAM_GROUP = "/_fsdp_param_group.py"


class Sites:
    """Call sites by number of their text in the tape, and a digest of file name, line and function.

    Cheap where it is called often: a place is known by its code object and instruction, and formatted once."""

    def __init__(self, tape: Tape, torch_file: str) -> None:
        self._tape = tape
        self._inner = (f"{Path(torch_file).parent}/", f"{Path(__file__).parent}/", "<frozen ")
        self._files: dict[str, bool] = {}
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        self._codes: dict[int, CodeType] = {}
        """Keeps the code objects, so that an id means one of them for good."""

    def find(self, frame: FrameType) -> tuple[int, int]:
        """Number of the text and digest of the place that issued a call from `frame`."""
        first, files = frame, self._files
        found: FrameType | None = frame
        for _ in range(DEPTH):
            if found is None:
                break
            name = found.f_code.co_filename
            inner = files.get(name)
            if not (self._judge(name) if inner is None else inner):
                known = self._known.get((id(found.f_code), found.f_lasti))
                return known if known is not None and self._tape.fresh(known[0]) else self._note(found)
            found = found.f_back
        return self._said(first)  # a thread of torch's own, or too deep

    def module(self, frame: FrameType | None) -> str:
        """The module that FSDP2 gathers or reduces for, where one of its frames is near; else empty."""
        for _ in range(_NEAR):
            if frame is None:
                break
            if frame.f_code.co_filename.endswith(_PARAM_GROUP):
                name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
                if name:
                    return str(name)
            frame = frame.f_back
        return ""

    def keep(self, frame: FrameType) -> bool:
        """Whether `frame` itself is the place, so that its code and instruction stand for it from now on."""
        return not self._files.get(frame.f_code.co_filename, True)

    def _judge(self, filename: str) -> bool:
        inner = filename.startswith(self._inner) or filename.endswith(_PASSED)
        self._files[filename] = inner
        return inner

    def _note(self, frame: FrameType) -> tuple[int, int]:
        code = frame.f_code
        if len(self._codes) > 4096:  # code that is made anew again and again
            self._known.clear()
            self._codes.clear()
        self._codes[id(code)] = code
        said = self._known[id(code), frame.f_lasti] = self._said(frame)
        return said

    def _said(self, frame: FrameType) -> tuple[int, int]:
        code = frame.f_code
        name: Any = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on with the class
        text = f"{code.co_filename[-_LENGTH:]}:{frame.f_lineno} in {name}"
        return self._tape.text(text), digest(text.rsplit("/", 1)[-1])
