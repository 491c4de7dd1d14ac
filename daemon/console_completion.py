"""What may come next on a console's line: verbs, options, values, and what lives in the daemon.

Pure: reads argparse's tree, is given the words before the cursor. It looks at argparse's private
lists, since the tree has no public face.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence

from daemon.console_parser import NODE

Live = Callable[[str], Iterable[str]]
"""Names of that kind in the daemon now: `instance` or `request`."""


def candidates(parser: argparse.ArgumentParser, words: Sequence[str], live: Live) -> list[str]:
    """What the last word, which may be empty, may become."""
    *before, current = words
    place = _Place(parser)
    for word in before:
        place.pass_by(word)
    return [word for word in place.next_words(current, live) if word.startswith(current)]


class _Place:
    """Where in the tree a line has come to."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._used: set[str] = set()
        self._option: argparse.Action | None = None  # that waits for its value
        self._enter(parser)

    def _enter(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._positionals = [a for a in parser._actions if not a.option_strings]

    def pass_by(self, word: str) -> None:
        if self._option is not None:
            self._option = None
        elif word.startswith("-"):
            action = self._parser._option_string_actions.get(word)
            self._used.update(action.option_strings if action else [])
            takes_value = action is not None and action.nargs != 0
            self._option = action if takes_value else None
        elif self._positionals:
            action = self._positionals.pop(0)
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                self._enter(action.choices[word])

    def next_words(self, current: str, live: Live) -> list[str]:
        if self._option is not None:
            return _values(self._option, live)
        if current.startswith("-"):
            options = self._parser._option_string_actions
            return [option for option in options if option not in self._used]
        return _values(self._positionals[0], live) if self._positionals else []


def _values(action: argparse.Action, live: Live) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    found = list(live(action.dest))
    return [NODE, *found] if action.default == NODE else found
