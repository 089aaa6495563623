"""Which Xid errors of NVIDIA's driver show a broken device, and which a wrong program.

From NVIDIA's catalogue, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. The doctor's knowledge
base reads the same errors from the kernel's log; a test checks that it agrees.
"""

HARDWARE_XIDS = frozenset({
    46, 48, 54, 61, 62, 63, 64, 65, 69, 74, 78, 79, 80, 92, 94, 95, 110, 119, 120, 121, 123, 136, 140, 142, 143, 144,
    145, 146, 147, 148, 149, 150, 151, 155, 156, 158, 160, 161,
})  # fmt: skip
"""The device or its link has an error."""
HARMLESS_XIDS = frozenset({63, 92, 121, 160, 161})
"""Of these, those after which the catalogue's immediate action is "ignore": programs are not affected."""
UNGRADED_XIDS = frozenset(range(144, 151))
"""Of these, errors of NVLink that may be fatal or not, which the kernel's log says and the driver's event does not.
Fatal ones usually come with Xid 48."""
WHOLE_DEVICE_XIDS = frozenset({62, 64, 79, 95, 110, 119, 120, 140, 143, 158})
"""Of these, those after which the whole device must be reset. Others strike one of the programs that share it, such as
a contained error of the memory (94)."""
PROGRAM_XIDS = frozenset({13, 31, 43})
"""Usually the program is wrong: an exception of a kernel, an illegal address."""


def xid_class(code: int) -> str:
    """The failure class that an Xid proves; empty if it proves none."""
    if code in HARMLESS_XIDS | UNGRADED_XIDS:
        return ""
    if code in HARDWARE_XIDS:
        return "gpu_hardware_fault"
    return "cuda_kernel_error" if code in PROGRAM_XIDS else ""
