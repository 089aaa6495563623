"""How many bytes a recorded call was given, and how many of them its collective moves over the links."""

import re

_CUT_TEXT = 168
"""A beacon has room for 176 bytes of these texts with four separators and a root: a longer one may have been cut."""
_LIST = re.compile(r"\[([0-9, ]*)\]")
_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2,
    "float16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex128": 16,
}  # fmt: skip


def call_bytes(operation: str, shapes: str, dtype: str, module: str) -> int | None:
    """The bytes of the tensors that a call was given; None if they are not recorded, or their text may have been
    cut."""
    cut = sum(len(each.encode(errors="replace")) for each in (operation, dtype, module, shapes)) >= _CUT_TEXT
    return None if cut else tensor_bytes(shapes, dtype)


def tensor_bytes(shapes: str, dtype: str) -> int | None:
    """The bytes of tensors whose shapes are written as `[4, 2], [3]`; None if there are no shapes, or several types."""
    size = _BYTES.get(dtype)
    if size is None or not shapes.endswith("]"):
        return None
    total = 0
    for match in _LIST.finditer(shapes):
        elements = 1
        for each in match[1].split(","):
            elements *= int(each) if each.strip() else 1
        total += elements
    return total * size


def bus_bytes(operation: str, nbytes: int, members: int) -> float | None:
    """The bytes that a collective moves over each member's link at least (nccl-tests, PERFORMANCE.md): divided by the
    time, they are its bus bandwidth. None for an operation without a known factor.

    Args:
        nbytes: of the tensors that the call is given.
    """
    others = members - 1
    if operation in ("all_gather_into_tensor", "all_gather_coalesced", "gather", "scatter"):
        return nbytes * others  # given one member's part of the data
    if operation in ("all_reduce", "all_reduce_coalesced"):
        return 2 * nbytes * others / members
    if operation in ("all_gather", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_coalesced"):
        return nbytes * others / members
    return nbytes if operation in ("broadcast", "reduce") else None
