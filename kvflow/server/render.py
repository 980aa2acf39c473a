"""Pieces to OpenAI's JSON objects: chunks of a stream, or one whole response."""

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import define, field

from kvflow.server.choice import Piece
from kvflow.server.logprobs import chat_logprobs, completion_logprobs
from kvflow.server.protocol import Call, Choice
from kvflow.server.tally import Tally
from kvflow.server.tokenizer import TextTokenizer

_OBJECTS = {
    ("completions", False): "text_completion",
    ("completions", True): "text_completion",
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
}


def _envelope(call: Call, stream: bool) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "object": _OBJECTS[call.endpoint, stream],
        "created": call.created,
        "model": call.model,
    }


def _ending(piece: Piece) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": piece.finish_reason}
    if piece.finish_reason is not None:
        ending["stop_reason"] = piece.stop_reason
    return ending


def full_response(
    call: Call, tokenizer: TextTokenizer, tally: Tally, pieces: Sequence[Sequence[Piece]]
) -> dict[str, Any]:
    """The answer to a call that does not stream; `pieces` has one sequence per choice."""
    response = _envelope(call, False)
    response["choices"] = [_full_choice(call, tokenizer, own) for own in pieces]
    response["usage"] = tally.usage()
    if call.wants_report:
        response["kvflow"] = {"choices": [tally.report(choice) for choice in call.choices]}
    return response


def _full_choice(call: Call, tokenizer: TextTokenizer, pieces: Sequence[Piece]) -> dict[str, Any]:
    choice = pieces[0].choice
    text = choice.echo + "".join(piece.text for piece in pieces)
    outputs = [piece.output for piece in pieces]
    chosen: dict[str, Any] = {"index": choice.index}
    if call.endpoint == "chat":
        chosen["message"] = {"role": "assistant", "content": text, "refusal": None}
        chosen["logprobs"] = chat_logprobs(tokenizer, outputs) if call.wants_logprobs else None
    else:
        chosen["text"] = text
        known = completion_logprobs(tokenizer, outputs, 0) if call.wants_logprobs else None
        chosen["logprobs"] = known
    return chosen | _ending(pieces[-1])


@define(eq=False)
class ChunkRenderer:
    """Turns the pieces of a streaming call into chunks, in the order they come."""

    call: Call
    tokenizer: TextTokenizer
    tally: Tally
    _offsets: dict[int, int] = field(factory=dict, init=False)

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks that one piece causes: none when it shows nothing new."""
        choice, text = piece.choice, piece.text
        if choice.index not in self._offsets:
            self._offsets[choice.index] = 0
            opening = self._opening(choice)
            if opening is not None:
                yield self._chunk(opening | {"logprobs": None, "finish_reason": None})
        if not text and piece.finish_reason is None and not self.call.wants_logprobs:
            return
        delta: dict[str, Any] = {"text": text}
        if self.call.endpoint == "chat":
            delta = {"delta": {"content": text} if text else {}}
        logprobs = self._logprobs(piece) if self.call.wants_logprobs else None
        chunk = self._chunk(
            {"index": choice.index} | delta | {"logprobs": logprobs} | _ending(piece)
        )
        if piece.finish_reason is not None and self.call.wants_report:
            chunk["kvflow"] = {"choices": [self.tally.report(choice)]}
        yield chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk without choices that ends a stream with include_usage."""
        return _envelope(self.call, True) | {"choices": [], "usage": self.tally.usage()}

    def _opening(self, choice: Choice) -> dict[str, Any] | None:
        if self.call.endpoint == "chat":
            return {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
        return {"index": choice.index, "text": choice.echo} if choice.echo else None

    def _chunk(self, chosen: dict[str, Any]) -> dict[str, Any]:
        chunk = _envelope(self.call, True) | {"choices": [chosen]}
        if self.call.include_usage:
            chunk["usage"] = self.tally.usage() if self.call.continuous_usage else None
        return chunk

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if self.call.endpoint == "chat":
            return chat_logprobs(self.tokenizer, [piece.output])
        index = piece.choice.index
        known = completion_logprobs(self.tokenizer, [piece.output], self._offsets[index])
        self._offsets[index] += len(known["tokens"][0])
        return known
