"""Streamed Qwen-Omni sessions in a real engine against one offline pass of transformers' thinker, float32.

The judge computes its own three-row M-RoPE positions; the engine runs plain RoPE (`plain_rope`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.conversation import Conversation
from engine.models import published
from engine.types import Features, Finish, Hearing, TurnMode, Work
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings
from tests.support import tiny_omni

pytestmark = pytest.mark.vllm

prepare_process("cpu")
repair_torch_companions()

NUM_SESSIONS = 64
SETTINGS = VllmSettings(
    max_sessions=NUM_SESSIONS, kv_cache_bytes=160 << 20, window_tokens=1024, max_sink_tokens=64
)


@pytest.fixture(scope="module", params=tiny_omni.NAMES)
def directory(request: pytest.FixtureRequest) -> Path:
    return tiny_omni.cached(request.param)


@pytest.fixture(scope="module")
def omni(directory: Path) -> Any:
    return published.load(str(directory))


@pytest.fixture(scope="module")
def stepper(omni) -> Iterator:
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from tests.engine.vllm.stepper import Stepper

    core = load(omni.engine_recipe(), SETTINGS)
    yield Stepper(SessionCore(core, "audio"))
    core.shutdown()


@pytest.fixture(scope="module")
def judge(directory: Path) -> Any:
    return tiny_omni.thinker(directory)


@pytest.fixture(scope="module")
def speech(recordings: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([recordings["austen-0870"], recordings["austen-0890"], recordings["austen-0880"]])


@dataclass
class Talk:
    """One session's conversation, and all that was given to the engine."""

    omni: Any
    stepper: Any
    name: str
    tokens: list[int] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    answers: list[tuple[int, list[int]]] = field(default_factory=list)  # position of the first token, tokens

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.name, self.omni, TurnMode.MANUAL, "Be brief.")
        self.ear = self.omni.new_ear()

    def next(self, audio: np.ndarray, is_final: bool, max_tokens: int = 0) -> Work | None:
        (intake,) = self.omni.hear([Hearing(self.name, self.ear, audio, is_final, TurnMode.MANUAL)])
        work = self.conversation.take_in(intake, is_final=is_final, max_tokens=max_tokens)
        return None if work is None else replace(work, sampling=replace(work.sampling, temperature=0.0))

    def note(self, work: Work) -> None:
        """The work has run: keep what it took in and what was decoded."""
        start = len(self.tokens)
        self.features += [Features(start + f.offset, f.num_tokens, f.tensors) for f in work.features]
        self.tokens += work.token_ids
        decoded = self.stepper.tokens(work)
        result = self.stepper.final(work)
        self.conversation.settle(tuple(decoded), result.finish, result.stop_token)
        if decoded:
            self.answers.append((len(self.tokens), decoded))
            self.tokens += decoded if result.finish is Finish.STOP else decoded[:-1]
            self.conversation.close_answer()

    def run(self, work: Work | None) -> None:
        assert work is not None
        self.stepper.run(work)
        self.note(work)


def offline_logits(judge: Any, talk: Talk) -> torch.Tensor:
    """[tokens, vocabulary] of one pass over everything the session was given."""
    ids = torch.tensor([talk.tokens])
    lengths = [int(item.tensors["audio_feature_lengths"]) for item in talk.features]
    mel = torch.zeros(len(lengths), 128, max(lengths))
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, (item, num) in enumerate(zip(talk.features, lengths, strict=True)):
        mel[row, :, :num] = item.tensors["input_audio_features"]
        mask[row, :num] = 1
    turns: dict[int, int] = {}  # audio of a turn: the frames of its blocks together, as its one item has them
    for item, num in zip(talk.features, lengths, strict=True):
        before = talk.tokens[: item.offset].count(talk.omni._audio_bos)
        turns[before] = turns.get(before, 0) + num
    positions, _ = judge.get_rope_index(
        ids, None, None, torch.ones_like(ids), False, torch.tensor(list(turns.values())), None
    )
    with torch.no_grad():
        made = judge(input_ids=ids, input_features=mel, feature_attention_mask=mask, position_ids=positions)
    return made.logits[0].float()


def streamed_logits(stepper: Any, recorded: list[torch.Tensor]) -> torch.Tensor:
    from tests.engine.vllm.sink_window.recording import runner_of

    with torch.inference_mode():
        return runner_of(stepper.core._core).model.compute_logits(torch.cat(recorded)).float()


def test_logits_of_a_streamed_session_equal_one_offline_pass(stepper, omni, judge, speech):
    """Two turns in chunks, two answers, below W: every position within 1e-3."""
    from tests.engine.vllm.sink_window.recording import hidden_states

    talk = Talk(omni, stepper, "a")
    with hidden_states(stepper.core._core) as recorded:
        talk.run(talk.conversation.open())
        talk.run(talk.next(speech[:40_000], False))
        talk.run(talk.next(speech[40_000:70_000], False))
        talk.run(talk.next(speech[70_000:83_333], True, 6))
        talk.run(talk.next(speech[90_000:110_000], True, 5))
    streamed = streamed_logits(stepper, recorded)
    assert len(streamed) == len(talk.tokens) > 120
    offline = offline_logits(judge, talk)
    assert offline.abs().max() > 1
    torch.testing.assert_close(streamed, offline, atol=1e-3, rtol=1e-3)
    silent = Talk(omni, stepper, "-", talk.tokens, [])  # the audio is heard, not only the tokens around it
    silent.features = [
        replace(f, tensors={**f.tensors, "input_audio_features": f.tensors["input_audio_features"] * 0})
        for f in talk.features
    ]
    assert (offline_logits(judge, silent) - streamed).abs().max() > 0.1
    stepper.end("a")


def test_each_block_is_encoded_once_and_leaves_the_cache(stepper, omni, speech):
    from tests.engine.vllm.sink_window.recording import runner_of

    lengths: list[int] = []
    tower = runner_of(stepper.core._core).model.audio_tower
    hook = tower.register_forward_hook(
        lambda _module, _args, kwargs, _output: lengths.extend(kwargs["feature_lens"].tolist()),
        with_kwargs=True,
    )
    talk = Talk(omni, stepper, "once")
    try:
        talk.run(talk.conversation.open())
        for start in (0, 32_000, 64_000):
            talk.run(talk.next(speech[start : start + 32_000], False))
        talk.run(talk.next(speech[96_000:112_000], True, 3))
        talk.run(talk.next(speech[:32_000], True, 3))
    finally:
        hook.remove()
    assert lengths == [200, 200, 200, 100, 200]
    cache = stepper.scheduler.encoder_cache_manager
    assert cache.num_freeable_slots == cache.cache_size  # nothing is held for anybody
    stepper.end("once")


def test_sixty_four_sessions_at_different_ages_answer_as_the_judge(stepper, omni, judge, speech):
    """The batch in which a stale M-RoPE array crashed others' servers, at twice the size."""
    talks = [Talk(omni, stepper, f"s{i}") for i in range(NUM_SESSIONS)]

    def together(works: list[tuple[Talk, Work]]) -> None:
        stepper.run(*(work for _, work in works))
        for talk, work in works:
            talk.note(work)

    together([(talk, talk.conversation.open()) for talk in talks])
    for turn in range(3):
        due = []
        for i, talk in enumerate(talks):
            start = 700 * i + 30_000 * turn
            is_final = (i + turn) % 3 == 2  # others go on with their turn
            work = talk.next(speech[start : start + 12_000 + 8_000 * (i % 8)], is_final, 4)
            due += [(talk, work)] if work is not None else []
        together(due)
    together([(t, w) for t in talks if (w := t.next(speech[:8_000], True, 4)) is not None])
    ages = {len(talk.tokens) for talk in talks}
    assert len(ages) > 8
    for talk in talks[::7]:
        predicted = offline_logits(judge, talk).argmax(dim=-1).tolist()
        for start, decoded in talk.answers:
            assert predicted[start - 1 : start - 1 + len(decoded)] == decoded
    for talk in talks:
        stepper.end(talk.name)


def test_the_engine_runs_plain_rope(stepper):
    """No position array of three rows exists, so none can be stale or grow with a session's age."""
    from tests.engine.vllm.sink_window.recording import runner_of

    assert not stepper.core._core.vllm_config.model_config.uses_mrope
    runner = runner_of(stepper.core._core)
    assert not runner.uses_mrope
    rotary = runner.model.language_model.model.layers[0].self_attn.rotary_emb
    assert type(rotary).__name__ == "RotaryEmbedding"
