"""The messages of a chat request, checked and flattened to text."""

from typing import Any

from kvflow.server.errors import bad_request
from kvflow.server.fields import Fields, refuse

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_messages(fields: Fields) -> list[dict[str, str]]:
    """The conversation as {"role", "content"[, "name"]} with plain text contents.

    "developer" is OpenAI's newer word for "system" and becomes it, because templates drop roles
    that they do not know. Raises 400 that names the message and the field.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", messages, "a non-empty list of messages")
    return [_read_message(message, f"messages[{idx}]") for idx, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise refuse(where, message, "an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refuse(f"{where}.role", role, f"one of {sorted(_ROLES)}")
    for unserved in ("tool_calls", "function_call", "audio"):
        if message.get(unserved):
            param = f"{where}.{unserved}"
            raise bad_request(param, f"{param} is not supported", code="unsupported_parameter")
    read = {"role": _ROLES[role], "content": _read_content(message.get("content"), where)}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise refuse(f"{where}.name", name, "a string")
        read["name"] = name
    return read


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(f"{where}.content", content, "a string or a list of text parts")
    parts = enumerate(content)
    return "\n".join(_read_part(part, f"{where}.content[{idx}]") for idx, part in parts)


def _read_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise refuse(f"{where}.type", kind, "'text', the only kind of part that is served")
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse(f"{where}.text", text, "a string")
    return text
