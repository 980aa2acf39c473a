"""One choice of a call: engine outputs in, pieces of text out."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from attrs import frozen

from kvflow.engine.api import EngineClient, FinishReason, TokenOutput
from kvflow.errors import KvflowError
from kvflow.server.detokenize import Detokenizer
from kvflow.server.protocol import Call, Choice
from kvflow.server.stop import StopHolder
from kvflow.server.tokenizer import TextTokenizer


class EngineError(KvflowError, RuntimeError):
    """An engine that broke its contract."""


@frozen
class Piece:
    """What one token adds to a choice: `text` may be empty, or complete what was held back.

    stop_reason: the stop string or the id in stop_token_ids that ended the choice, else None.
    """

    choice: Choice
    text: str
    output: TokenOutput
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


async def choice_pieces(
    engine: EngineClient, tokenizer: TextTokenizer, call: Call, choice: Choice
) -> AsyncGenerator[Piece, None]:
    """Yield one piece per token until the choice ends, for whichever reason comes first.

    The token that ends a choice with "stop" adds no text. Closing this generator, or reaching a
    stop string, closes the engine's iterator.
    """
    detokenizer = Detokenizer(tokenizer, call.skip_special)
    holder = StopHolder(call.stops)
    async with aclosing(engine.generate(choice.request)) as outputs:
        async for output in outputs:
            piece = _piece(choice, output, detokenizer, holder)
            yield piece
            if piece.finish_reason is not None:
                return
    raise EngineError(f"{choice.request.request_id}: the engine ended without a finish reason")


def _piece(
    choice: Choice, output: TokenOutput, detokenizer: Detokenizer, holder: StopHolder
) -> Piece:
    text = "" if output.finish_reason == "stop" else detokenizer.push(output.token)
    if output.finish_reason is not None:
        text += detokenizer.flush()
    text = holder.push(text)
    if holder.matched is not None:
        return Piece(choice, text, output, "stop", holder.matched)
    if output.finish_reason is None:
        return Piece(choice, text, output, None)
    stopped = output.finish_reason == "stop"
    named = stopped and output.token in choice.request.sampling.stop_token_ids
    text += holder.flush()
    return Piece(choice, text, output, output.finish_reason, output.token if named else None)
