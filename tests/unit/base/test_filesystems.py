from pathlib import Path, PurePosixPath

import pytest

from lockstep.base.filesystems import is_network_filesystem, is_on_local_disk, mounted_filesystem

MOUNTS = r"""
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
24 21 0:22 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw
40 21 0:45 / /home rw,relatime shared:20 - nfs4 server:/home rw,vers=4.2,hard
41 40 8:17 / /home/ann/scratch rw,relatime - xfs /dev/sdb1 rw
42 21 0:50 / /mnt/with\040blank rw - cifs //server/share rw
43 21 0:51 / /lustre rw - lustre 10.0.0.1@tcp:/fs rw
44 21 0:52 / /mnt/s3 rw - fuse.s3fs s3fs rw
45 21 8:33 / /mnt/usb rw - fuseblk /dev/sdc1 rw
46 21 0:53 / /data rw - autofs systemd-1 rw
47 46 0:54 / /data rw - nfs server:/data rw
48 21 0:55 / /var/lib/docker/overlay rw master:3 propagate_from:1 - overlay overlay rw
garbage that is no mount at all
""".strip()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/root/runs/a", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/home", "nfs4"),
        ("/home/bob/runs", "nfs4"),
        ("/home/ann/scratch/runs", "xfs"),
        ("/home/ann/scratchy/runs", "nfs4"),
        ("/mnt/with blank/runs", "cifs"),
        ("/lustre/project", "lustre"),
        ("/mnt/s3/runs", "fuse.s3fs"),
        ("/mnt/usb", "fuseblk"),
        ("/data/runs", "nfs"),
        ("/database", "ext4"),
        ("/var/lib/docker/overlay/runs", "overlay"),
    ],
)
def test_the_innermost_latest_mount_decides(path, kind):
    assert mounted_filesystem(PurePosixPath(path), MOUNTS) == kind


def test_without_a_mount_the_type_is_unknown():
    assert mounted_filesystem(PurePosixPath("/x"), "") is None


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "9p", "fuse.sshfs", "virtiofs", "ceph", "gpfs"]
)
def test_network_file_systems(kind):
    assert is_network_filesystem(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk"])
def test_local_file_systems(kind):
    assert not is_network_filesystem(kind)


def test_only_known_local_file_systems_are_local():
    assert is_on_local_disk(Path("/dev/shm/lockstep"), MOUNTS)
    assert not is_on_local_disk(Path("/home/bob"), MOUNTS)
    assert not is_on_local_disk(Path("/anywhere"), "")
