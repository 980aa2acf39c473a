"""Stop strings over a stream of text: what may be the start of one is held back."""

from attrs import define


def held_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """(start, stop string) of the match that is complete first; of those, the longest.

    Reading character by character finds the same match, so the answer does not depend on how
    a text was cut into pieces.
    """
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, negative_length, stop = min(found)
    return end + negative_length, stop


@define(eq=False)
class StopHolder:
    """Lets text through up to, and without, the first stop string.

    Law: for every way to cut a text into pieces, the pushes and the flush concatenate to the
    text before its first complete stop string, or to the whole text when there is none.
    """

    stops: tuple[str, ...]
    matched: str | None = None
    _held: str = ""

    def push(self, text: str) -> str:
        """Take the next piece; return what is now safe to show. After a match always ""."""
        if self.matched is not None:
            return ""
        text = self._held + text
        match = first_stop(text, self.stops)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[:start]
        safe = len(text) - held_length(text, self.stops)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text ended: return what was held back."""
        held, self._held = self._held, ""
        return held
