"""Every option of the server: one frozen tree, parsed once (options.py).

An option's name is its path: `vad.silence_ms` is `--vad-silence-ms` and `METRONOME_VAD_SILENCE_MS`.
Arguments win over the environment. Unknown variables are refused, for a misspelt one would be silently
without effect. None means "the model's or the machine's own": `resolve` fills in the machine's part.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine.aimd import AimdConfig
from engine.models import DEFAULT_FAMILY

ENV_PREFIX = "METRONOME_"

Fraction = Annotated[float, Field(gt=0, le=1)]


class SettingsError(ValueError):
    """One readable line per wrong option: its names, its range, what was given."""


class Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Group):
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        le=1024,
        description="GiB of KV cache; none: 2 on a CPU, what is left on a GPU",
    )
    max_session_tokens: int | None = Field(
        default=None,
        ge=256,
        le=1_048_576,
        description="Length at which a session ends; none: never where sessions are compacted, else the "
        "model's trained length",
    )
    max_batch_tokens: int = Field(default=2048, ge=64, le=131_072, description="Tokens of one engine step")
    eager: bool | None = Field(
        default=None, description="Run without compiling; none: yes on a CPU, no on a GPU"
    )
    kv: Literal["windowed", "unbounded"] = Field(
        default="windowed",
        description="What a session keeps: its head and its last tokens, or all (for comparison only)",
    )
    window_tokens: int = Field(default=1024, ge=16, le=1_048_576, description="Last tokens a session keeps")
    max_sink_tokens: int = Field(
        default=256,
        ge=0,
        le=65_536,
        description="Longest head (template and instructions), kept for ever; a longer one is refused",
    )
    max_chunk_tokens: int = Field(
        default=256, ge=16, le=131_072, description="Tokens of one session in one engine step"
    )
    compaction_slack_tokens: int = Field(
        default=512,
        ge=0,
        le=65_536,
        description="Freed tokens (64 or more) at which a session's positions are moved back; 0: never, it "
        "ends at the model's trained length",
    )
    weights: Literal["checkpoint", "fp8"] = Field(
        default="checkpoint", description="Precision of the weights; fp8 quantises them while loading (GPU)"
    )
    kv_dtype: Literal["model", "fp8"] = Field(
        default="model", description="Precision of the KV cache; fp8 holds twice the sessions (GPU)"
    )


class TickSettings(Group):
    budget_ms: int | None = Field(
        default=None, ge=20, le=60_000, description="Frame budget B; none: the model family's"
    )
    slots: int = Field(default=8, ge=1, le=100, description="Slots that B is cut into; each makes one batch")


class SessionSettings(Group):
    max_tokens: int = Field(
        default=256, ge=1, le=65_536, description="Tokens of one answer unless the client asks"
    )
    max_tokens_ceiling: int = Field(
        default=1024, ge=1, le=65_536, description="Most tokens a client may ask for"
    )
    max_message_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        le=1 << 26,
        description="Longest WebSocket message; a longer one closes with 1009",
    )
    backlog_budgets: float = Field(
        default=2.0, ge=1, le=100, description="Waiting audio kept, in budgets; older audio is dropped"
    )
    idle_limit_s: float = Field(
        default=300.0, ge=1, le=86_400, description="A session that sends nothing for so long is closed"
    )
    max_age_s: float | None = Field(
        default=None, ge=1, le=2_592_000, description="Longest life of a session; none: endless"
    )

    max_messages_per_s: float | None = Field(
        default=200.0,
        ge=1,
        le=100_000,
        description="Messages a client may send, on average over 5 s; more closes with 1008",
    )

    @model_validator(mode="after")
    def _check(self) -> SessionSettings:
        if self.max_tokens > self.max_tokens_ceiling:
            raise ValueError(
                f"session.max_tokens ({self.max_tokens}) must not exceed "
                f"session.max_tokens_ceiling ({self.max_tokens_ceiling})"
            )
        return self


class AimdSettings(Group):
    initial: int = Field(
        default=8, ge=1, le=4096, description="Sessions admitted before anything was measured"
    )
    minimum: int = Field(default=1, ge=1, le=4096, description="The cap never falls below")
    target_fraction: Fraction | None = Field(
        default=None, description="Part of B that the median lateness stays under; none: the model family's"
    )
    increase: float = Field(default=1.0, gt=0, le=100, description="Sessions added per healthy window")
    decrease: float = Field(default=0.9, ge=0.1, le=0.99, description="The cap's factor on overload")
    used_fraction: Fraction = Field(default=0.9, description="The cap grows only when used to this part")
    miss_fraction: float = Field(
        default=0.05, ge=0, le=1, description="More misses than this part are an overload"
    )
    max_surge: float = Field(
        default=4.0, ge=1, le=100, description="How many times today's busy sessions might speak at once"
    )
    window_s: float | None = Field(
        default=None, ge=0.1, le=600, description="Control window; none: 3 budgets, at least 3 s"
    )
    cooldown_s: float | None = Field(
        default=None, ge=0, le=600, description="Pause after a cut; none: two control windows"
    )
    min_samples: int = Field(default=8, ge=1, le=100_000, description="Samples a control window needs")


class VadSettings(Group):
    threshold: float = Field(
        default=0.5, ge=0.05, le=0.95, description="Speech probability that counts as speech"
    )
    min_speech_ms: int = Field(
        default=100, ge=30, le=2000, description="Speech shorter than this starts no turn"
    )
    interrupt_ms: int = Field(
        default=320,
        ge=30,
        le=5000,
        description="While an answer is written or played, speech shorter than this does not interrupt it",
    )
    silence_ms: int = Field(default=500, ge=100, le=5000, description="Silence that ends the user's turn")


class VoiceSettings(Group):
    name: Literal["hibari", "none"] = Field(
        default="hibari", description="Who speaks the answers of sessions that want it"
    )


class AuthSettings(Group):
    keys: SecretStr = Field(
        default=SecretStr(""),
        description="API keys, 'NAME KEY [MAX_SESSIONS]' separated by commas; none and no file: open to all",
    )
    key_file: Path | None = Field(
        default=None, description="File with API keys, 'NAME KEY [MAX_SESSIONS]' a line"
    )
    deadline_s: float = Field(
        default=10.0, ge=0.1, le=300, description="How long a socket may take to send its key"
    )
    max_pending: int = Field(
        default=64, ge=1, le=65_536, description="Sockets that may wait at once without having sent a key"
    )
    origins: str = Field(
        default="",
        description="Origins of browser pages that may connect, separated by commas, * for all; "
        "pages of this server always may",
    )

    @property
    def allowed_origins(self) -> frozenset[str]:
        return frozenset(origin.strip().lower() for origin in self.origins.split(",")) - {""}

    @model_validator(mode="after")
    def _check(self) -> AuthSettings:
        for origin in sorted(self.allowed_origins - {"*"}):
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@ ]+", origin):
                raise ValueError(f"auth.origins: {origin} must look like https://example.com, without a path")
        return self


class TlsSettings(Group):
    cert: Path | None = Field(default=None, description="Certificate chain (PEM); none: plain HTTP")
    key: Path | None = Field(
        default=None, description="The certificate's private key (PEM); none: it is in the same file"
    )

    @model_validator(mode="after")
    def _check(self) -> TlsSettings:
        if self.key is not None and self.cert is None:
            raise ValueError("tls.key needs tls.cert")
        return self


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        env_parse_none_str="none",
        env_ignore_empty=True,
    )

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all")
    port: int = Field(default=8000, ge=0, le=65_535, description="Port to listen on; 0: any free one")
    model: str = Field(
        default=DEFAULT_FAMILY,
        min_length=1,
        description="Model family, a checkpoint's directory, or its name on the Hub[@revision]; "
        "null: echoes, needs no model",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model runs")
    cache_dir: Path = Field(default=Path("~/.cache/metronome"), description="Where prepared models are kept")
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of the model; none: all cores"
    )
    max_sessions: int = Field(
        default=64, ge=1, le=4096, description="Hard limit of sessions, whatever is measured"
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="TCP connections at once, more are closed unheard; none: 2 x max_sessions + 256",
    )
    close_s: float = Field(default=5.0, ge=0.1, le=60, description="How long a closing handshake may take")
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="How long sessions may go on after SIGTERM"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level logged"
    )
    log_format: Literal["text", "json"] = Field(default="text", description="One log line's form")
    log_words: bool = Field(default=False, description="Also log what was heard and what was answered")
    engine: EngineSettings = EngineSettings()
    tick: TickSettings = TickSettings()
    session: SessionSettings = SessionSettings()
    aimd: AimdSettings = AimdSettings()
    vad: VadSettings = VadSettings()
    voice: VoiceSettings = VoiceSettings()
    auth: AuthSettings = AuthSettings()
    tls: TlsSettings = TlsSettings()

    def aimd_config(self, budget_s: float, target_fraction: float) -> AimdConfig:
        """The limit's configuration; budget and target are the family's, and used where no option says else.

        `max_sessions` bounds the whole range: with `--max-sessions 2` the cap starts and ends at 2 at most.
        """
        chosen = self.aimd.model_dump(exclude={"initial", "minimum", "target_fraction"})
        initial = min(max(self.aimd.initial, self.aimd.minimum), self.max_sessions)
        return AimdConfig(
            budget_s=budget_s,
            target_fraction=self.aimd.target_fraction or target_fraction,
            initial=initial,
            minimum=min(self.aimd.minimum, initial),
            maximum=self.max_sessions,
            **chosen,
        )


def resolve(
    settings: Settings, has_cuda: Callable[[], bool] | None = None, num_cores: int | None = None
) -> Settings:
    """A new object in which what "auto" and none leave to the machine is decided."""
    device = settings.device
    if device == "auto":
        device = "cuda" if (has_cuda or machine_has_cuda)() else "cpu"
    engine = settings.engine
    on_cpu = device == "cpu"
    engine = engine.model_copy(
        update={
            "eager": on_cpu if engine.eager is None else engine.eager,
            "kv_cache_gib": 2.0 if on_cpu and engine.kv_cache_gib is None else engine.kv_cache_gib,
        }
    )
    threads = settings.threads or num_cores or len(os.sched_getaffinity(0))
    return settings.model_copy(
        update={
            "device": device,
            "engine": engine,
            "threads": threads,
            "cache_dir": settings.cache_dir.expanduser().absolute(),
            "max_connections": settings.max_connections or 2 * settings.max_sessions + 256,
        }
    )


def machine_has_cuda() -> bool:
    """A GPU and the vLLM that can use it; found without importing torch, which takes seconds."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return Path("/dev/nvidiactl").exists()
