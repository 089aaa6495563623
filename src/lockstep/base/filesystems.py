"""Which type of file system holds a path, and whether other hosts may share it."""

import re
from pathlib import Path, PurePosixPath

# fmt: off
_NETWORK_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fhgfs", "fuse", "gfs", "gfs2", "glusterfs", "gpfs",
    "lustre", "mmfs", "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
})
# fmt: on


def is_on_local_disk(folder: Path, mountinfo: str | None = None) -> bool:
    """Returns whether only this host uses the folder's file system; False for an unknown one.

    Args:
        mountinfo: the text of /proc/self/mountinfo; read if None.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return False
    kind = mounted_filesystem(PurePosixPath(folder.resolve()), mountinfo)
    return kind is not None and not is_network_filesystem(kind)


def is_network_filesystem(kind: str) -> bool:
    """Returns whether a file system type (`nfs4`, `fuse.sshfs`, ...) may be shared between hosts.

    True for `fuse.*`, whose storage is unknown, but not for `fuseblk`, a local disk."""
    return kind in _NETWORK_FILESYSTEMS or kind.startswith("fuse.")


def mounted_filesystem(path: PurePosixPath, mountinfo: str) -> str | None:
    """Returns the type of the file system that holds the absolute `path`, from the text of /proc/self/mountinfo
    (proc(5)); None if no mount point matches. Of two mounts at one mount point, the later one is visible."""
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        left, found, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not found or len(fields) < 5 or not kinds:
            continue
        point = PurePosixPath(_unescape_mount(fields[4]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), kinds[0])
    return None if best is None else best[1]


def _unescape_mount(text: str) -> str:
    """Decodes blanks and backslashes, which mountinfo writes in octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
