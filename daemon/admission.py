"""What fits and what is refused at the door: contexts, pools, queue bounds. Pure arithmetic."""

from daemon.errors import InvalidRequest, PromptTooLong
from daemon.generation import GenerationSpec
from ipc.kv_layout import RankLayout, blocks_for


class Capacity:
    """The longest sequence that the model and every instance's pool can hold.

    Pools are remembered by instance name while an instance is down: it comes back with the same.
    """

    def __init__(self, max_context_tokens: int) -> None:
        self._max_context = max_context_tokens
        self._pools: dict[str, RankLayout] = {}

    def learn(self, instance: str, layout: RankLayout) -> None:
        self._pools[instance] = layout

    @property
    def max_tokens(self) -> int:
        """Prompt and output together; a sequence may have to be prefilled again with its output,
        so it must fit the pools of both roles."""
        pools = [layout.num_blocks * layout.block_size for layout in self._pools.values()]
        return min([self._max_context, *pools])

    def max_output(self, num_prompt: int) -> int:
        """How many output tokens fit beside such a prompt.

        Raises:
            PromptTooLong: not even one.
        """
        room = self.max_tokens - num_prompt
        if room < 1:
            raise PromptTooLong(num_prompt=num_prompt, num_output=1, limit=self.max_tokens)
        return room

    def check(self, spec: GenerationSpec) -> None:
        """Raises PromptTooLong or InvalidRequest when the request could never be served."""
        num_prompt, num_output = len(spec.prompt), spec.sampling.max_tokens
        if num_prompt + num_output > self.max_tokens:
            raise PromptTooLong(num_prompt=num_prompt, num_output=num_output, limit=self.max_tokens)
        for layout in self._pools.values():
            need = blocks_for(num_prompt, layout.block_size) + spec.num_choices
            if need > layout.num_blocks:
                raise InvalidRequest(
                    f"n={spec.num_choices} choices of a prompt of {num_prompt} tokens need {need} "
                    f"KV blocks together, the pool has {layout.num_blocks}",
                    param="n",
                )
