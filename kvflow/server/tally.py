"""What a call has cost so far, and what is known about the way its KV took."""

from typing import Any

from attrs import define, field

from kvflow.engine.api import TokenOutput
from kvflow.server.protocol import Call, Choice


@define(eq=False)
class Tally:
    """Running sums of one call, fed with every engine output of every choice."""

    call: Call
    _num_tokens: dict[int, int] = field(factory=dict, init=False)
    _cached: dict[int, int] = field(factory=dict, init=False)
    _transfer: dict[int, Any] = field(factory=dict, init=False)

    def add(self, choice: Choice, output: TokenOutput) -> None:
        """Count one output."""
        index = choice.index
        if index not in self._num_tokens:
            self._cached[index] = output.cached_tokens
        self._num_tokens[index] = self._num_tokens.get(index, 0) + 1
        if output.transfer is not None:
            self._transfer.setdefault(index, dict(output.transfer))

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object.

        A prompt counts once, however many choices continue it; its cached tokens are those of
        the choice that reused the least, because the others may have reused that choice's work.
        """
        prompts: dict[int, int] = {}
        cached: dict[int, int] = {}
        for choice in self.call.choices:
            prompt_idx, index = choice.prompt_idx, choice.index
            prompts[prompt_idx] = len(choice.request.prompt)
            if index in self._cached:
                reused = self._cached[index]
                cached[prompt_idx] = min(reused, cached.get(prompt_idx, reused))
        num_prompt, num_completion = sum(prompts.values()), sum(self._num_tokens.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def report(self, choice: Choice) -> dict[str, Any]:
        """What a curious client is told about one choice."""
        return {
            "index": choice.index,
            "request_id": choice.request.request_id,
            "seed": choice.request.sampling.seed,
            "prompt_tokens": len(choice.request.prompt),
            "completion_tokens": self._num_tokens.get(choice.index, 0),
            "cached_tokens": self._cached.get(choice.index, 0),
            "transfer": self._transfer.get(choice.index),
        }
