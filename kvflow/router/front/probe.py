"""What a server is asked before it gets calls: whether it is well, and which models it serves."""

import msgspec

from kvflow.router.front.http import Address, ServerLost, call


class Card(msgspec.Struct, frozen=True):
    """A model as `/v1/models` lists it. `max_model_len`: positions of a request, at most."""

    id: str
    max_model_len: int


class _Cards(msgspec.Struct):
    data: list[Card]


async def check_health(address: Address, connect_timeout_s: float) -> None:
    """Raises `ServerLost` for a server that cannot be reached or says that it is not well."""
    await _get(address, "/health", connect_timeout_s)


async def served_models(address: Address, connect_timeout_s: float) -> dict[str, Card]:
    """The models of a server by name. Raises `ServerLost` as `check_health` does, and for an
    answer that is something else."""
    body = await _get(address, "/v1/models", connect_timeout_s)
    try:
        return {card.id: card for card in msgspec.json.decode(body, type=_Cards).data}
    except msgspec.MsgspecError as error:
        raise ServerLost(f"/v1/models answers something else than models: {error}") from error


async def _get(address: Address, path: str, connect_timeout_s: float) -> bytes:
    async with call(address, "GET", path, connect_timeout_s=connect_timeout_s) as answer:
        body = await answer.body()
    if answer.status != 200:
        raise ServerLost(f"{path} answers {answer.status}")
    return body
