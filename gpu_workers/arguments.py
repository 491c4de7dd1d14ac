"""How the commands of this package read their arguments: wrong ones end in one sentence."""

import argparse
from collections.abc import Callable
from enum import StrEnum
from typing import NoReturn, TypeVar

EXIT_USAGE = 64  # sysexits.h, as the daemon's

Kind = TypeVar("Kind", bound=StrEnum)


class Parser(argparse.ArgumentParser):
    """Exits with 64 where argparse does with 2, after a whole page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")


def one_of(kind: type[Kind]) -> Callable[[str], Kind]:
    """Reads a member by its value."""

    def read(text: str) -> Kind:
        try:
            return kind(text)
        except ValueError as error:
            values = ", ".join(member.value for member in kind)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {values}") from error

    return read


def count(text: str) -> int:
    """Reads a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def amount(text: str) -> float:
    """Reads a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number
