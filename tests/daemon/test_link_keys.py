"""The keys of links between nodes: made once, for their owner's eyes, and never guessed at."""

from pathlib import Path

import pytest

from daemon.__main__ import main
from daemon.errors import ConfigError
from daemon.link_keys import KEY_FILE, make_keys, read_keys


def test_keygen_makes_a_pair_that_its_owner_alone_may_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "new" / "keys"
    assert main(["keygen", str(directory)]) == 0
    file = directory / KEY_FILE
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert (file.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)
    keys = read_keys(directory)
    assert keys.public != keys.secret
    assert keys.secret not in repr(keys)


def test_a_file_is_no_directory_for_keys(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"/file is no directory$"):
        make_keys(tmp_path / "file")


def test_keys_that_are_in_use_are_not_overwritten(tmp_path: Path) -> None:
    before = make_keys(tmp_path).read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        make_keys(tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == before


def test_keys_that_others_may_read_are_not_taken(tmp_path: Path) -> None:
    make_keys(tmp_path).chmod(0o640)
    with pytest.raises(ConfigError, match="may be read by others: chmod 600"):
        read_keys(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory; `distserve keygen` makes it"),
        ("{", "holds no keys"),
        ('{"public": "a", "secret": 1}', r"Expected `str`, got `int` - at `\$.secret`"),
        ('{"public": "a", "secret": "b"}', "each has 40 characters"),
    ],
)
def test_what_is_no_key_file_is_refused_by_name(
    tmp_path: Path, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / KEY_FILE).write_text(content)
        (tmp_path / KEY_FILE).chmod(0o600)
    with pytest.raises(ConfigError, match=f"{KEY_FILE}.*{why}"):
        read_keys(tmp_path)
