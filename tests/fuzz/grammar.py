"""What a client may rely on in the server's stream of events, whatever the client itself did."""

from __future__ import annotations

from pydantic import TypeAdapter

from engine.events import (
    Error,
    InputTranscript,
    Pong,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    ServerEvent,
    SessionCreated,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    Tick,
    Warning,
)

_ADAPTER: TypeAdapter[ServerEvent] = TypeAdapter(ServerEvent)


class Grammar:
    """Feed it every text message of one session; it asserts that each is allowed where it stands."""

    def __init__(self) -> None:
        self.events: list[ServerEvent] = []
        self.num_pongs = 0
        self._seq = 0
        self._response_id: str | None = None
        self._speech_ms = 0

    def push(self, text: str) -> ServerEvent:
        event = _ADAPTER.validate_json(text)
        # Every field that the type has is there, nulls included, and no other: strict clients rely on both.
        assert event.model_dump_json() == text
        if not self.events:
            assert isinstance(event, SessionCreated | Error), f"a session begins with {event}"
        self.events.append(event)
        self._check(event)
        return event

    def _check(self, event: ServerEvent) -> None:
        match event:
            case SessionCreated():
                assert len(self.events) == 1, "session.created came twice"
            case Tick():
                assert event.seq == self._seq + 1, f"tick {event.seq} after tick {self._seq}"
                assert (
                    event.lateness_ms >= 0
                    and event.audio_ms >= 0
                    and event.tokens >= 0
                    and event.kv_tokens >= 0
                )
                self._seq = event.seq
            case SpeechStarted() | SpeechStopped():
                assert event.audio_ms >= self._speech_ms, "speech went back in time"
                self._speech_ms = event.audio_ms
            case ResponseCreated(response_id=response_id):
                assert self._response_id is None, f"{response_id} began while {self._response_id} was open"
                self._response_id = response_id
            case ResponseTextDelta(response_id=response_id):
                assert response_id == self._response_id and event.delta
            case ResponseDone(response_id=response_id):
                assert response_id == self._response_id and event.tokens >= 0
                self._response_id = None
            case Pong():
                self.num_pongs += 1
            case InputTranscript() | SessionUpdated() | Warning() | Error():
                pass
