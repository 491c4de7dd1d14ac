"""Whatever is written down or spoken bears a version, and a mismatch names both."""

import json
import struct
import zlib
from pathlib import Path

import pytest

from daemon.admin_protocol import ADMIN_VERSION, BadMessage, read_request
from daemon.config import VERSION, read_config
from daemon.errors import ConfigError
from daemon.link_terms import Terms
from daemon.node_messages import LINK_VERSION, Join
from daemon.targets import read_table
from ipc import codec
from ipc.codec import WireError
from ipc.messages import PROTOCOL_VERSION
from ipc.placement_file import VERSION as PLACEMENT_VERSION
from ipc.placement_file import PlacementError, parse_placement
from ipc.profile_table import TABLE_VERSION

OTHER = 99


def test_a_console_of_another_version_is_told_both_even_by_a_command_that_only_it_knows() -> None:
    request = {"version": OTHER, "call_id": 1, "command": {"type": "FromTheFuture"}}
    with pytest.raises(BadMessage, match=rf"version {OTHER}, this daemon speaks {ADMIN_VERSION}"):
        read_request(json.dumps(request).encode())


def test_a_worker_of_another_version_is_refused_with_both() -> None:
    header = struct.pack("<BBQQ", OTHER, 1, 0, 0)
    frames = [header + struct.pack("<I", zlib.crc32(b"{}", zlib.crc32(header))), b"{}"]
    with pytest.raises(WireError, match=f"protocol {OTHER} where {PROTOCOL_VERSION} is spoken"):
        codec.read_header(frames)


def test_a_placement_of_another_version_is_refused_with_both() -> None:
    said = f"has version {OTHER}, this program reads version {PLACEMENT_VERSION}"
    with pytest.raises(PlacementError, match=said):
        parse_placement(json.dumps({"version": OTHER, "shards": []}).encode())


def test_a_profile_of_another_version_is_refused_with_both(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps({"version": OTHER, "steps": {}}))
    said = f"profile of version {OTHER}, and this daemon reads version {TABLE_VERSION}"
    with pytest.raises(ConfigError, match=said):
        read_table(tmp_path / "table.json")


def test_a_node_of_another_version_is_refused_with_both() -> None:
    terms = Terms(placement="p", model="m")
    join = Join(version=OTHER, home="n0", silence_s=1, placement="p", model="m")
    assert terms.objection(join) == f"n0 speaks version {OTHER} of the link, not {LINK_VERSION}"


def test_a_configuration_of_another_version_is_refused_with_both(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(f"version = {OTHER}\nfrom_the_future = 1\n")
    said = f"the file has version {OTHER}, this daemon reads version {VERSION}"
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path / "node.toml", {})
