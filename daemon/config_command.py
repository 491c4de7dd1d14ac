"""`distserve config`: is a configuration usable, and what does it come to?

`check` tells all that is wrong, in the file and in the files that it names, and starts nothing.
`show` writes TOML that `serve --config` would take again, each value with where it comes from.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from daemon.api_keys import read_keys
from daemon.config import VERSION, DaemonConfig, Settings, checked, model_context, read_settings
from daemon.errors import ConfigError
from daemon.link_keys import keys_for
from daemon.placement import placement_of
from daemon.targets import slo_of, target_of

AUTO_PLACEMENT = "auto"


def main(argv: list[str], serve_parser: argparse.ArgumentParser) -> int:
    """The exit code: 0, or 78 where something is wrong. Raises ConfigError."""
    verbs = {"check": check, "show": show}
    if argv and argv[0] in verbs:
        return verbs[argv[0]](argv[1:], serve_parser)
    stream = sys.stdout if argv and argv[0] in ("-h", "--help") else sys.stderr
    stream.write(_USAGE)
    return 0 if stream is sys.stdout else 64


def check(argv: list[str], serve_parser: argparse.ArgumentParser) -> int:
    """Every trouble on a line of its own."""
    file = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    flags = vars(serve_parser.parse_args(argv[1:] if file else argv))
    named = flags.pop("config")
    settings = read_settings(file or (Path(named) if named else None), flags)
    config, troubles = checked(settings)
    troubles = troubles or list(_troubles_of_files(config))
    for trouble in troubles:
        sys.stderr.write(f"distserve config: {trouble}\n")
    if not troubles:
        sys.stdout.write(f"{file or named or 'the default configuration'} can be used\n")
    return ConfigError.exit_code if troubles else 0


def show(argv: list[str], serve_parser: argparse.ArgumentParser) -> int:
    """What was set; with `--effective` also all defaults."""
    is_effective = "--effective" in argv
    flags = vars(serve_parser.parse_args([word for word in argv if word != "--effective"]))
    named = flags.pop("config")
    settings = read_settings(Path(named) if named else None, flags)
    config, troubles = checked(settings)
    if troubles:
        raise ConfigError(troubles[0])
    sys.stdout.write(to_toml(config, settings, is_effective=is_effective))
    return 0


def to_toml(config: DaemonConfig, settings: Settings, *, is_effective: bool) -> str:
    """The configuration as a file; what has no value stands there as a comment."""
    lines, tables = [f"version = {VERSION}"], []
    for key in DaemonConfig.__struct_fields__:
        origin = settings.origins.get(key)
        if origin is None and not is_effective:
            continue
        value = msgspec.to_builtins(getattr(config, key))
        told = f"  # {origin or 'default'}"
        if value is None:
            lines.append(f"# {key} is not set{told}")
        elif isinstance(value, dict):
            tables += [f"\n[{key}.{_word(name)}]{told}\n{_pairs(of)}" for name, of in value.items()]
        else:
            lines.append(f"{key} = {_literal(value)}{told}")
    return "\n".join([*lines, *tables, ""])


def _troubles_of_files(config: DaemonConfig) -> Iterator[str]:
    """What a daemon would find in the files that its configuration names."""
    looks: list[Callable[[], object]] = [
        lambda: model_context(config),
        lambda: target_of(config),
        lambda: slo_of(config),
    ]
    if config.api_keys is not None:
        keys_file = Path(config.api_keys)
        looks.append(lambda: read_keys(keys_file))
    if config.placement != AUTO_PLACEMENT:
        looks.append(lambda: keys_for(config, placement_of(config)))
    for look in looks:
        try:
            look()
        except ConfigError as error:
            yield str(error)


def _pairs(values: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {_literal(value)}" for key, value in values.items())


def _literal(value: Any) -> str:
    """JSON's words are TOML's for all that a configuration holds; lists may hold texts."""
    match value:
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return json.dumps(value)


def _word(name: str) -> str:
    is_bare = name.replace("-", "").replace("_", "").isalnum() and name.isascii()
    return name if is_bare else _literal(name)


_USAGE = """usage: distserve config check [FILE] [options of serve]
       distserve config show [--effective] [--config FILE] [options of serve]

  check  tell all that is wrong with a configuration and the files that it names; exit code 78
  show   what is set, as TOML, with where each value comes from; --effective: with all defaults
"""
