"""What a client that plays nothing would have played."""

from __future__ import annotations

from app.playing import FirstTimes, Player


def audio(duration_ms: int, response_id: str = "r1") -> dict:
    return {"type": "response.audio", "response_id": response_id, "duration_ms": duration_ms}


def played(player: Player, now: float) -> int | None:
    message = player.report(now)
    return None if message is None else message["played_ms"]


def test_sound_is_played_in_real_time_and_each_figure_is_told_once():
    player = Player()
    assert player.report(0.0) is None
    player.on_event(audio(1000), 10.0)
    player.on_event(audio(500), 10.1)
    assert [played(player, at) for at in (10.25, 10.5, 11.5, 11.75)] == [250, 500, 1500, None]
    assert not player.is_playing(11.6)


def test_a_dry_spell_delays_what_follows():
    player = Player()
    player.on_event(audio(1000), 10.0)
    player.on_event(audio(1000), 12.0)
    assert played(player, 12.5) == 1500


def test_a_flush_stops_and_is_told_exactly():
    player = Player()
    player.on_event(audio(1000), 10.0)
    assert played(player, 10.4) == 400
    player.on_event({"type": "response.flush", "response_id": "other"}, 10.4)
    assert player.is_playing(10.5)
    player.on_event({"type": "response.flush", "response_id": "r1"}, 10.4)
    assert not player.is_playing(10.5) and [played(player, 10.5), played(player, 11.0)] == [400, None]
    player.on_event(audio(1000, "r2"), 11.0)
    assert player.report(11.2) == {"type": "response.played", "response_id": "r2", "played_ms": 200}


def test_first_times_run_from_the_end_of_what_was_said():
    times = FirstTimes()
    times.on_event({"type": "response.text.delta"}, 1.0)  # of a pause in the recording
    times.spoken(2.0)
    times.on_event({"type": "response.text.delta"}, 2.5)
    times.on_event(audio(100), 2.6)
    times.on_event(audio(100), 2.9)
    assert times.as_event() == {"type": "client.timing", "first_text_ms": 500, "first_sound_ms": 600}
