"""Find the first of several stop strings in a text that arrives in pieces.

Exact hold-back: what is kept back is the longest end of the text that could still become a stop
string, never more. The match that is complete first wins, the longer of two that end together;
so the result does not depend on how the text was cut into pieces.
"""

from collections import deque
from functools import lru_cache


class StopMatcher:
    """One text on its way past the stop strings."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._root = self._state = _automaton(stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string was found and cut off."""
        if self._stopped:
            return "", True
        text = self._held + text
        end = self._first_match(text)
        if end is not None:
            self._stopped, self._held = True, ""
            return text[: end - self._state.match], True
        certain = len(text) - self._state.depth
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """What was held back; nothing more will come."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _first_match(self, text: str) -> int | None:
        """Walk over what is new in `text`; where the first match ends."""
        state = self._state
        for index in range(len(self._held), len(text)):
            state = state.after(text[index])
            if state.match:
                self._state = state
                return index + 1
        self._state = state
        return None


class _State:
    """How much of a stop string the text now ends with (Aho and Corasick's automaton).

    `depth` is that length, `match` the length of the longest stop string that ends here.
    """

    __slots__ = ("depth", "fall_back", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.match = 0
        self.next: dict[str, _State] = {}
        self.fall_back: _State | None = None

    def after(self, char: str) -> "_State":
        state = self
        while (longer := state.next.get(char)) is None:
            if state.fall_back is None:
                return state
            state = state.fall_back
        return longer


@lru_cache(maxsize=64)
def _automaton(stop: tuple[str, ...]) -> _State:
    root = _State(0)
    for string in stop:
        state = root
        for char in string:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.match = state.depth
    _link(root)
    return root


def _link(root: _State) -> None:
    """Breadth first, so that a state's shorter ends are linked before it."""
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for char, longer in state.next.items():
            longer.fall_back = root if state.fall_back is None else state.fall_back.after(char)
            longer.match = longer.match or longer.fall_back.match
            queue.append(longer)
