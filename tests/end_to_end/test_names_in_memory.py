"""Shared memory of a running service: by descriptors alone, so that nothing has a name to lose."""

import os
import stat
from pathlib import Path

from tests.end_to_end.service import Service


def shared_maps(pid: int) -> list[str]:
    """What of a process's memory others may write to as well, by the name that the kernel tells."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [fields[5] for fields in lines if fields[1].endswith("s") and len(fields) == 6]


def test_nothing_that_a_logout_or_another_user_could_remove_holds_the_pools_C2_C4(
    tiny_service: Service,
) -> None:
    """A login manager removes the named shared memory of users who have left."""
    tiny_service.complete("hello")  # the decode worker has mapped the other one's pool
    for name, worker in tiny_service.ranks().items():
        shared = shared_maps(worker.pid)
        pools = [path for path in shared if path.startswith("/memfd:distserved-")]
        assert len(pools) >= (2 if name.startswith("decode") else 1), shared
        assert not [path for path in shared if path.startswith(("/dev/shm", "/SYSV"))]


def test_what_has_a_name_is_a_socket_or_a_lock_of_our_own_user_C4(tiny_service: Service) -> None:
    for path in tiny_service.run_dir.iterdir():
        status = path.stat()
        assert status.st_uid == os.getuid()
        assert stat.S_ISSOCK(status.st_mode) or path.name == "lock"
