from pathlib import Path

from lockstep.ledger.sqlite_index import journal_mode_for

MOUNTS = """
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
40 21 0:45 / /home rw,relatime shared:20 - nfs4 server:/home rw,vers=4.2,hard
""".strip()


def test_journal_mode():
    assert journal_mode_for(Path("/root/runs/a"), MOUNTS) == "WAL"
    assert journal_mode_for(Path("/home/bob/runs/a"), MOUNTS) == "TRUNCATE"
    assert journal_mode_for(Path("/anywhere"), "") == "TRUNCATE"  # unknown: the one that is right everywhere
