import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.options import load, options
from app.settings import Settings, SettingsError, machine_has_cuda, resolve

ALL = options()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith("METRONOME_"):
            monkeypatch.delenv(name)


def test_every_option_has_help_a_default_and_a_unique_name():
    assert len(ALL) > 30
    for option in ALL:
        assert option.info.description and not option.info.is_required(), option.path
        assert option.range
    assert len({option.env for option in ALL}) == len({option.flag for option in ALL}) == len(ALL)


def test_every_option_can_be_set_by_its_variable(monkeypatch: pytest.MonkeyPatch):
    """Each default, written as text, comes back as itself through the environment."""
    for option in ALL:
        monkeypatch.setenv(option.env, option.default)
    assert load() == Settings()


@pytest.mark.parametrize("option", [o for o in ALL if not o.range.startswith("text")], ids=lambda o: o.env)
def test_every_wrong_value_is_told_with_names_and_range(option, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(option.env, "nan")
    with pytest.raises(SettingsError) as caught:
        load()
    expected = f"{option.flag} ({option.env}): must be {option.range}; got 'nan'"
    assert expected in str(caught.value).splitlines()
    monkeypatch.delenv(option.env)
    with pytest.raises(SettingsError) as caught:
        load({option.path: "nan"})
    assert expected in str(caught.value).splitlines()


@pytest.mark.parametrize("option", [o for o in ALL if " to " in o.range], ids=lambda o: o.env)
def test_ranges_told_are_ranges_kept(option):
    low, high = option.range.removesuffix(", or none").split(" to ")
    load({option.path: high, ("session", "max_tokens_ceiling"): 65536} if "ceiling" not in option.env else {})
    with pytest.raises(SettingsError, match=option.env):
        load({option.path: str(float(high) * 2 + 1)})
    below = low.removeprefix("more than ") if "more" in low else str(float(low) - 1)
    with pytest.raises(SettingsError, match=option.env):
        load({option.path: below})


def test_arguments_win_over_the_environment_within_one_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("METRONOME_VAD_SILENCE_MS", "700")
    monkeypatch.setenv("METRONOME_VAD_THRESHOLD", "0.4")
    settings = load({("vad", "threshold"): "0.6"})
    assert (settings.vad.silence_ms, settings.vad.threshold) == (700, 0.6)


def test_none_and_empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("METRONOME_PORT", "")
    monkeypatch.setenv("METRONOME_SESSION_MAX_AGE_S", "60")
    assert load().port == 8000
    assert load({("session", "max_age_s"): "none"}).session.max_age_s is None


def test_a_misspelt_variable_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("METRONOME_VAD_SILENCE", "700")
    monkeypatch.setenv("METRONOME_TALK_URL", "ws://elsewhere")
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value) == (
        "METRONOME_VAD_SILENCE: no such option; the nearest is METRONOME_VAD_SILENCE_MS"
    )


def test_several_mistakes_are_told_at_once():
    with pytest.raises(SettingsError) as caught:
        load({("port",): "99999", ("device",): "tpu", ("vad", "silence_ms"): "soon"})
    assert str(caught.value).splitlines() == [
        "--port (METRONOME_PORT): must be 0 to 65535; got '99999'",
        "--device (METRONOME_DEVICE): must be auto | cpu | cuda; got 'tpu'",
        "--vad-silence-ms (METRONOME_VAD_SILENCE_MS): must be 100 to 5000; got 'soon'",
    ]


def test_unknown_paths_and_contradictions_are_refused():
    with pytest.raises(SettingsError, match="nonsense"):
        load({("nonsense",): "1"})
    with pytest.raises(SettingsError, match=r"session\.max_tokens \(2000\) must not exceed"):
        load({("session", "max_tokens"): 2000})
    with pytest.raises(SettingsError, match=r"tls\.key needs tls\.cert"):
        load({("tls", "key"): "key.pem"})
    for origin in ("example.com", "https://example.com/page", "https://ok.example, *.example"):
        with pytest.raises(SettingsError, match=r"auth\.origins"):
            load({("auth", "origins"): origin})
    origins = load({("auth", "origins"): " https://A.example,*"}).auth.allowed_origins
    assert origins == {"https://a.example", "*"}


def test_settings_are_frozen():
    settings = load()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        settings.vad.threshold = 0.1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("has_cuda", "device", "eager", "gib"), [(True, "cuda", False, None), (False, "cpu", True, 2)]
)
def test_auto_is_resolved_to_a_new_object(has_cuda: bool, device: str, eager: bool, gib: float | None):
    settings = load()
    resolved = resolve(settings, lambda: has_cuda, num_cores=3)
    assert (settings.device, settings.threads, settings.engine.eager) == ("auto", None, None)
    assert (resolved.device, resolved.threads) == (device, 3)
    assert (resolved.engine.eager, resolved.engine.kv_cache_gib) == (eager, gib)
    assert resolved.cache_dir == Path.home() / ".cache/metronome"


def test_what_was_chosen_stays_when_resolved():
    chosen = load({("device",): "cpu", ("threads",): "1", ("engine", "eager"): "false"})
    resolved = resolve(chosen, lambda: True, num_cores=3)
    assert (resolved.device, resolved.threads, resolved.engine.eager) == ("cpu", 1, False)
    assert machine_has_cuda() in (True, False)


def test_the_limit_takes_the_familys_figures_and_the_hard_limit():
    config = load().aimd_config(2.0, 0.3)
    assert (config.budget_s, config.target_fraction, config.initial, config.maximum) == (2.0, 0.3, 8, 64)
    config = load({("max_sessions",): 2, ("aimd", "target_fraction"): 0.5}).aimd_config(1.0, 0.3)
    assert (config.target_fraction, config.minimum, config.initial, config.maximum) == (0.5, 1, 2, 2)
    config = load({("aimd", "minimum"): 20}).aimd_config(1.0, 0.3)
    assert (config.minimum, config.initial) == (20, 20)
