"""Token ids to text, one token at a time, never half a character.

A token of a byte-level BPE is a string of bytes, and a character may begin in one token and end
in another. Bytes go through an incremental UTF-8 decoder, which keeps an unfinished character
until it is complete or provably broken (then U+FFFD, the same as decoding all bytes at once).
"""

import codecs
from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from kvflow.server.tokenizer import TextTokenizer


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


@define(eq=False)
class Detokenizer:
    """The text of a growing token sequence.

    Law: the pushes and the flush concatenate to `TextTokenizer.decode` of all the tokens.
    """

    tokenizer: "TextTokenizer"
    skip_special: bool = True
    _decoder: codecs.IncrementalDecoder = field(factory=_utf8_decoder, init=False)

    def push(self, token: int) -> str:
        """Take one token id; return the characters that it completes, maybe none."""
        if self.skip_special and token in self.tokenizer.special_ids:
            return ""
        return self._decoder.decode(self.tokenizer.bytes_of(token))

    def flush(self) -> str:
        """The sequence ended: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
