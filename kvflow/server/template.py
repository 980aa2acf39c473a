"""Chat templates: Jinja in a sandbox, with the helpers that published templates use."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from attrs import field, frozen
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvflow.errors import KvflowError


class TemplateError(KvflowError, ValueError):
    """A chat template that does not compile, or refuses these messages."""


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """JSON as it reads in a prompt: Jinja's own filter would escape < and > for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template does not compile: {error}") from error


@frozen
class ChatTemplate:
    """A compiled chat template; a broken source raises `TemplateError`."""

    source: str
    _template: jinja2.Template = field(init=False, eq=False, repr=False)

    @_template.default
    def _compiled(self) -> jinja2.Template:
        return _compile(self.source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt text; raises `TemplateError` when the template refuses its variables."""
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
