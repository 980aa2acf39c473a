"""Typed reading of a JSON object: every refusal names the field, its value and the rule.

null is the same as absence, as OpenAI's clients send it.
"""

from typing import Any

import msgspec
from attrs import frozen

from kvflow.server.errors import ApiError, bad_request


def shown(value: object) -> str:
    """`value` as it may stand in a message: short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(param: str, value: object, rule: str) -> ApiError:
    """The 400 for a value that breaks a rule."""
    return bad_request(param, f"{param} is {shown(value)}, but must be {rule}")


def is_int(value: object) -> bool:
    """A JSON integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


@frozen
class Fields:
    """One JSON object."""

    values: dict[str, Any]

    def get(self, name: str) -> Any:
        """The raw value, None when absent."""
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]."""
        value: int | None = self.get(name)
        if value is not None and not (is_int(value) and low <= value <= high):
            raise refuse(name, value, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, default: float) -> float:
        """Any JSON number; its range is the engine's rule."""
        value = self.get(name)
        if value is None:
            return default
        if not (is_int(value) or isinstance(value, float)):
            raise refuse(name, value, "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise refuse(name, value, "a number that a double can hold") from error

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise refuse(name, value, "true or false")
        return value

    def string(self, name: str) -> str | None:
        """A string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise refuse(name, value, "a string")
        return value

    def object(self, name: str) -> "Fields | None":
        """A JSON object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise refuse(name, value, "an object")
        return Fields(value)


def read_object(body: bytes) -> Fields:
    """The JSON object in a request's body, or 400."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {shown(value)}, but must be a JSON object")
    return Fields(value)
