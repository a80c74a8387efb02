"""What a client may rely on in the server's stream of events, whatever the client itself did."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from engine.events import (
    Error,
    InputTranscript,
    Pong,
    ResponseAudio,
    ResponseAudioDone,
    ResponseCreated,
    ResponseDone,
    ResponseFlush,
    ResponseHeard,
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
    """Feed it every message of one session; it asserts that each is allowed where it stands."""

    def __init__(self) -> None:
        self.events: list[ServerEvent] = []
        self.num_pongs = 0
        self._seq = 0
        self._response_id: str | None = None
        self._speech_ms = 0
        self._texts: dict[str, str] = {}  # of all answers
        self._sounding: dict[str, int] = {}  # answers that may still sound -> ms so far
        self._flushed: set[str] = set()
        self._awaited_bytes: int | None = None  # of the binary message that must come next

    @property
    def response_ids(self) -> list[str]:
        return list(self._texts)

    def push(self, text: str | bytes) -> ServerEvent | None:
        """None for a binary message."""
        if isinstance(text, bytes):
            assert len(text) == self._awaited_bytes, "sound that was not announced"
            self._awaited_bytes = None
            return None
        assert self._awaited_bytes is None, "an event where sound was announced"
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
                assert response_id not in self._texts, f"{response_id} came twice"
                self._response_id, self._texts[response_id] = response_id, ""
                self._sounding[response_id] = 0
            case ResponseTextDelta(response_id=response_id):
                assert response_id == self._response_id and event.delta
                self._texts[response_id] += event.delta
            case ResponseAudio(response_id=response_id):
                assert response_id in self._sounding, "sound of an answer that was flushed or is over"
                assert event.num_bytes == pytest.approx(48 * event.duration_ms, abs=48)
                assert 0 < event.duration_ms <= 1000 and event.text in self._texts[response_id]
                self._sounding[response_id] += event.duration_ms
                self._awaited_bytes = event.num_bytes
            case ResponseAudioDone(response_id=response_id):
                sent_ms = self._sounding.pop(response_id)
                assert event.duration_ms == pytest.approx(sent_ms, abs=60), f"{sent_ms} ms were sent"
            case ResponseFlush(response_id=response_id):
                assert response_id in self._texts and response_id not in self._flushed
                self._flushed.add(response_id)
                self._sounding.pop(response_id, None)
            case ResponseHeard(response_id=response_id):
                assert response_id in self._flushed and self._texts[response_id].startswith(event.text)
            case ResponseDone(response_id=response_id):
                assert response_id == self._response_id and event.tokens >= 0
                self._response_id = None
            case Pong():
                self.num_pongs += 1
            case InputTranscript() | SessionUpdated() | Warning() | Error():
                pass
