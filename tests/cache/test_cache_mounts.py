from __future__ import annotations

import pytest

from tlhub.cache import mounts

pytestmark = pytest.mark.light

MOUNTS = r"""
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local xfs rw 0 0
//host/share /mnt/with\040space cifs rw 0 0
me@host: /mnt/ssh fuse.sshfs rw 0 0
sqfs /mnt/image fuse.squashfuse rw 0 0
torn
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/", "ext4", False),
        ("/homes/me", "ext4", False),
        ("/home", "nfs4", True),
        ("/home/me/.cache/tlhub", "nfs4", True),
        ("/home/local/tlhub", "xfs", False),
        ("/mnt/with space/x", "cifs", True),
        ("/mnt/ssh/x", "fuse.sshfs", True),
        ("/mnt/image/x", "fuse.squashfuse", False),
    ],
)
def test_file_systems(path: str, kind: str, network: bool) -> None:
    assert mounts.file_system(path, MOUNTS) == kind
    assert mounts.is_network(kind) == network


def test_what_is_not_known_is_no_network() -> None:
    assert mounts.file_system("/x", "") is None and not mounts.is_network(None)


def test_this_machines() -> None:
    found = mounts.check("/")
    assert found.name == "file system" and found.ok and found.detail and found.hint is None
