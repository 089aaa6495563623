"""Which file system a folder is on: SQLite's write-ahead log needs shared memory, which no network has."""

import re
from pathlib import Path, PurePosixPath

# fmt: off
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fhgfs", "fuse", "gfs", "gfs2", "glusterfs", "gpfs",
    "lustre", "mmfs", "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
})
# fmt: on


def is_network(kind: str) -> bool:
    """Whether a file system type (`nfs4`, `fuse.sshfs`, ...) is, or may be, shared between hosts.

    All of `fuse.*` counts, because what is behind it cannot be known; `fuseblk` (a local disk) does not."""
    return kind in _NETWORK or kind.startswith("fuse.")


def filesystem_of(path: PurePosixPath, mountinfo: str) -> str | None:
    """Type of the file system that holds the absolute `path`, from the text of /proc/self/mountinfo (proc(5));
    None where no mount point matches. Of two mounts on one point the later one hides the earlier."""
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        left, found, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not found or len(fields) < 5 or not kinds:
            continue
        point = PurePosixPath(_unescape(fields[4]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), kinds[0])
    return None if best is None else best[1]


def journal_for(folder: Path, mountinfo: str | None = None) -> str:
    """`WAL` on a local disk, `TRUNCATE` (a rollback journal) on a network file system or an unknown one."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return "TRUNCATE"
    kind = filesystem_of(PurePosixPath(folder.resolve()), mountinfo)
    return "TRUNCATE" if kind is None or is_network(kind) else "WAL"


def _unescape(text: str) -> str:
    """mountinfo writes blanks and backslashes in octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
