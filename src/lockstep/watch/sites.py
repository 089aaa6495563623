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

    def find(self, frame: FrameType | None) -> tuple[int, int]:
        """Number and digest of the place that `frame` was called from."""
        first, files, left = frame, self._files, DEPTH
        while frame is not None and left:
            code = frame.f_code
            inner = files.get(code.co_filename)
            if inner is None:
                inner = self._judge(code.co_filename)
            if not inner:
                break
            frame = frame.f_back
            left -= 1
        frame = frame if frame is not None and left else first
        if frame is None:
            return 0, 0
        known = self._known.get((id(frame.f_code), frame.f_lasti))
        if known is not None and self._tape.fresh(known[0]):
            return known
        return self._note(frame)

    def _judge(self, filename: str) -> bool:
        inner = filename.startswith(self._inner) or filename.endswith(_PASSED)
        self._files[filename] = inner
        return inner

    def _note(self, frame: FrameType) -> tuple[int, int]:
        code, line = frame.f_code, frame.f_lineno
        name: Any = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on with the class
        text = f"{code.co_filename[-_LENGTH:]}:{line} in {name}"
        known = self._tape.text(text), digest(text.rsplit("/", 1)[-1])
        if len(self._codes) > 4096:  # code that is made anew again and again
            self._known.clear()
            self._codes.clear()
        self._codes[id(code)] = code
        self._known[id(code), frame.f_lasti] = known
        return known
