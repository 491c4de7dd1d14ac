"""The command line: what is wrong usage, and that the help tells every option."""

import pytest

from daemon.__main__ import main
from daemon.config import DaemonConfig


@pytest.mark.parametrize(
    "flags", [["--nonsense"], ["--port", "many"], ["--dtype", "int8"], ["--log-level", "loud"]]
)
def test_wrong_usage_has_an_exit_code_that_is_not_restarted(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags])
    assert ended.value.code == 64
    (told,) = capsys.readouterr().err.splitlines()
    assert flags[0] in told
    assert "(`distserve serve --help` lists the options)" in told


def test_a_value_that_is_none_of_an_options_is_told_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--dtype", "int8"])
    assert "'int8' (choose from 'bfloat16', 'float16', 'float32')" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["sevre"]])
def test_without_a_known_command_the_commands_are_told(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 64
    told = capsys.readouterr()
    assert "distserve serve --help" in told.out + told.err


def test_the_help_tells_every_option_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    defaults = DaemonConfig()
    for name in DaemonConfig.__struct_fields__:
        assert f"--{name.replace('_', '-')} " in text
        default = getattr(defaults, name)
        assert default in (None, {}, ()) or f"(default {default})" in text
