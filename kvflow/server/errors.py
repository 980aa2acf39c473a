"""Errors as OpenAI clients read them: {"error": {"message", "type", "param", "code"}}."""

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvflow.engine.api import InvalidRequest, Overloaded, Unavailable

_log = logging.getLogger(__name__)

_NAMES = {
    400: ("invalid_request_error", None),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "overloaded"),
    503: ("server_error", "unavailable"),
}


class ApiError(Exception):
    """An answer other than success. `kind` is the `type` of OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind, default_code = _NAMES.get(status, ("server_error", "internal_error"))
        self.param = param
        self.code = code or default_code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object of this error."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": fields | {"code": self.code}}

    def response(self) -> Response:
        """The HTTP response of this error."""
        return json_response(self.body(), self.status, self.headers)


def bad_request(param: str, message: str, code: str | None = None) -> ApiError:
    """400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about `error`; what it must not see goes to the log."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return bad_request(error.param, str(error))
        case Overloaded():
            return ApiError(429, str(error), headers={"retry-after": "1"})
        case Unavailable():
            return ApiError(503, str(error))
        case HTTPException():
            headers = dict(error.headers or {})
            return ApiError(error.status_code, str(error.detail), headers=headers)
        case _:
            _log.error("internal error", exc_info=error)
            return ApiError(500, "internal error; the server's log has the details")


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`value` as JSON."""
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")
