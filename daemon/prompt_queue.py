"""A leader's queue of prompts as the daemon knows it: given to it, and not given back yet.

Kept in the very queue that the leader runs, so that what goes before a prompt that comes now can
be told: by its order, not by all that waits. The leader says when prompts begin and when chunks of
them are done; what is on its way between the two is counted as still to be computed.
"""

from daemon.recent_prompts import RecentPrompts
from ipc.kv_layout import fork_blocks
from ipc.prefill_policy import FirstComeFirstServed, Ticket, WaitingPrompt


class PromptQueue:
    """By request id.

    Args:
        policy: made as the leader's is.
        keeps: whether the choices are decoded there, too.
    """

    def __init__(
        self, policy: FirstComeFirstServed[int], block_size: int, *, keeps: bool = False
    ) -> None:
        self._policy = policy
        self._block_size = block_size
        self._keeps = keeps
        self._tickets: dict[int, Ticket[int]] = {}
        self._recent = RecentPrompts()
        self.num_tokens = 0  # that are still to be computed

    def __len__(self) -> int:
        return len(self._tickets)

    def add(
        self, request_id: int, arrival: int, num_tokens: int, *, now_s: float, num_choices: int = 1
    ) -> None:
        """It is sent there."""
        num_places = num_choices if self._keeps else 1
        num_blocks = fork_blocks(num_tokens, num_places, self._block_size)
        ticket = Ticket(request_id, arrival, WaitingPrompt(num_tokens, num_blocks, num_places))
        self._tickets[request_id] = ticket
        self._policy.join(ticket)
        self._recent.came(self._policy.level(num_tokens), num_tokens, now_s)
        self.num_tokens += num_tokens

    def advance(self, request_id: int, num_tokens: int) -> None:
        """So many of its tokens have been computed, and some are left; none: it begins."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and num_tokens < ticket.prompt.num_tokens:
            self._policy.advance(ticket, num_tokens)
            self.num_tokens -= num_tokens

    def finish(self, request_id: int) -> int | None:
        """It has been prefilled; how many tokens its last chunk had. None: it is not there."""
        if (ticket := self._tickets.pop(request_id, None)) is None:
            return None
        num_tokens = ticket.prompt.num_tokens
        self._policy.advance(ticket, num_tokens)
        self.num_tokens -= num_tokens
        return num_tokens

    def drop(self, request_id: int) -> None:
        """It came back without having been prefilled. Idempotent."""
        if (ticket := self._tickets.pop(request_id, None)) is not None:
            self._policy.leave(ticket)
            self.num_tokens -= ticket.prompt.num_tokens

    def left(self) -> list[int]:
        """Of each prompt, the tokens that are still to be computed."""
        return [ticket.prompt.num_tokens for ticket in self._tickets.values()]

    def before(self, num_tokens: int) -> list[int]:
        """The same, of those that go before a prompt that comes now."""
        return self._policy.before(num_tokens)

    def overtaking(self, num_tokens: int, now_s: float) -> list[tuple[float, int]]:
        """What goes before such a prompt though it comes later, if others go on coming as they did
        of late: how many a second, and how many tokens one has."""
        return self._recent.below(self._policy.level(num_tokens), now_s)

    def last_of(self, prompts: list[int]) -> int:
        """Which of several that come now is finished last, by its index."""
        return self._policy.last_of(prompts)

    @property
    def blocks_to_go_on(self) -> int:
        """With fewer free blocks than that, nothing of it can be computed now."""
        return self._policy.blocks_to_go_on
