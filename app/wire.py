"""What a client may say: the client's side of the wire protocol (design.md, `/v1/stream`)."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError

from engine.errors import BadMessage
from engine.types import TurnMode


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Auth(_Message):
    """First of all where the server has keys; else without effect, so that a client may always send it."""

    type: Literal["auth"]
    key: Annotated[SecretStr, Field(max_length=512)]


class SessionUpdate(_Message):
    """Fields that are null or absent stay as they are."""

    type: Literal["session.update"]
    instructions: Annotated[str, Field(max_length=4000)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=4096)] | None = None
    turn: TurnMode | None = None
    voice: bool | None = None


class InputCommit(_Message):
    type: Literal["input.commit"]


class ResponseCancel(_Message):
    type: Literal["response.cancel"]


class ResponsePlayed(_Message):
    """How much of a spoken answer was played: about four times a second, at its end, and after a flush."""

    type: Literal["response.played"]
    response_id: Annotated[str, Field(max_length=64)]
    played_ms: Annotated[int, Field(ge=0, le=86_400_000)]


class Ping(_Message):
    type: Literal["ping"]


ClientMessage = Annotated[
    Auth | SessionUpdate | InputCommit | ResponseCancel | ResponsePlayed | Ping,
    Field(discriminator="type"),
]
_ADAPTER: TypeAdapter[ClientMessage] = TypeAdapter(ClientMessage)


class UnknownMessage(ValueError):
    """JSON, but no message of ours; the text says what is wrong with it. The session can go on."""


def parse(text: str) -> ClientMessage:
    """Raises BadMessage for what is not JSON, UnknownMessage for JSON that is no message of ours."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise BadMessage("A text message was not JSON. Audio goes in binary messages.") from None
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        raise UnknownMessage(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    return f"{where}: {first['msg']}" if where else first["msg"]
