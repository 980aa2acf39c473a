"""ModelList: the answers of `/v1/models`."""

import time
from collections.abc import Callable

from attrs import field, frozen
from starlette.requests import Request
from starlette.responses import Response

from kvflow.server.errors import json_response
from kvflow.server.fields import Fields
from kvflow.server.protocol import check_model


@frozen
class ModelList:
    """Of the one model that is served. `max_model_len` says how many positions a request of it may
    have now; `created` is in seconds since 1970."""

    name: str
    max_model_len: Callable[[], int]
    created: int = field(factory=lambda: int(time.time()))

    async def every(self, request: Request) -> Response:
        """All models."""
        return json_response({"object": "list", "data": [self._card()]})

    async def one(self, request: Request) -> Response:
        """The model that the path names; raises `ApiError` (404) for another."""
        check_model(Fields({"model": request.path_params["name"]}), self.name)
        return json_response(self._card())

    def _card(self) -> dict[str, object]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvflow",
            "max_model_len": self.max_model_len(),
        }
