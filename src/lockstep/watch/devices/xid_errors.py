"""Which Xid errors of NVIDIA's driver show a broken device, and which a wrong program.

From NVIDIA's catalogue, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. The doctor's knowledge
base reads the same errors from the kernel's log; a test checks that it agrees.
"""

HARDWARE_XIDS = frozenset({
    46, 48, 54, 61, 62, 63, 64, 65, 69, 74, 78, 79, 80, 92, 94, 95, 110, 119, 120, 121, 123, 136, 140, 142, 143, 144,
    145, 146, 147, 148, 149, 150, 151, 155, 156, 158, 160, 161,
})  # fmt: skip
"""The device or its link is broken."""
PROGRAM_XIDS = frozenset({13, 31, 43})
"""Usually the program is wrong: an exception of a kernel, an illegal address."""


def xid_class(code: int) -> str:
    """The failure class that an Xid proves; empty if it proves none."""
    if code in HARDWARE_XIDS:
        return "gpu_hardware_fault"
    return "cuda_kernel_error" if code in PROGRAM_XIDS else ""
