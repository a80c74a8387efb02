"""The Qwen-Omni families against the models' own processor, chat template and encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.conversation import Conversation
from engine.models import published
from engine.models.qwen_omni import BLOCK_SAMPLES, Qwen25Omni
from engine.models.qwen_tokenizer import load_tokenizer
from engine.types import SAMPLE_RATE, Finish, Hearing, Intake, TurnMode
from engine.vllm.environment import repair_torch_companions
from tests.support import tiny_omni

repair_torch_companions()


@pytest.fixture(scope="module", params=tiny_omni.NAMES)
def directory(request: pytest.FixtureRequest) -> Path:
    return tiny_omni.cached(request.param)


@pytest.fixture(scope="module")
def omni(directory: Path) -> Any:
    return published.load(str(directory))


@pytest.fixture(scope="module")
def processor(directory: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory)


@pytest.fixture(scope="module")
def speech(recordings: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([recordings["austen-0870"], recordings["austen-0890"], recordings["austen-0880"]])


@pytest.fixture(scope="module")
def thinker(directory: Path) -> Any:
    """transformers' own model of the checkpoint."""
    return tiny_omni.thinker(directory)


def hear(omni: Any, ear: Any, audio: np.ndarray, is_final: bool, mode=TurnMode.MANUAL) -> Intake:
    (intake,) = omni.hear([Hearing("a", ear, audio, is_final, mode)])
    return intake


def rendered(processor: Any, messages: list[dict], audio: list[np.ndarray] | None) -> list[int]:
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor(text=text, audio=audio, return_tensors="np")["input_ids"][0].tolist()


def user() -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "audio", "audio": "x"}]}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_a_conversation_equals_the_chat_templates_rendering_token_for_token(omni, processor, speech):
    """Two turns, the first in pieces as it is spoken, and an answer between them."""
    conversation = Conversation("a", omni, TurnMode.MANUAL, "You are brief.")
    first, second = speech[: int(5.3 * SAMPLE_RATE)], speech[100_000 : 100_000 + 18_000]
    tokens = [*conversation.open().token_ids]
    ear = omni.new_ear()
    pieces = [first[:20_000], first[20_000:55_000], first[55_000:]]
    for i, piece in enumerate(pieces):
        is_final = i == len(pieces) - 1
        work = conversation.take_in(hear(omni, ear, piece, is_final), is_final=is_final, max_tokens=9)
        tokens += () if work is None else work.token_ids
    answer = omni._codec.encode("Yes, 12 of them.")
    conversation.settle(answer, Finish.STOP)
    tokens += answer
    conversation.close_answer()
    work = conversation.take_in(hear(omni, ear, second, True), is_final=True, max_tokens=9)
    assert work is not None
    tokens += work.token_ids
    said = {"role": "assistant", "content": "Yes, 12 of them."}
    messages = [system("You are brief."), user(), said, user()]
    assert tokens == rendered(processor, messages, [first, second])


def test_the_head_is_the_system_message_and_holds_no_audio(omni, processor):
    head = list(omni.head(""))
    assert (
        rendered(processor, [system(omni.default_instructions), user()], [np.zeros(8_000, np.float32)])[
            : len(head)
        ]
        == head
    )
    if isinstance(omni, Qwen25Omni):  # the template's own default
        assert rendered(processor, [user()], [np.zeros(8_000, np.float32)])[: len(head)] == head
    assert omni._audio_pad not in head and omni._audio_bos not in head


def test_features_equal_the_processors_and_carry_what_vllm_takes(omni, processor, speech):
    for num in (BLOCK_SAMPLES, 24_000, 17_920, 4_000):
        (item,) = hear(omni, omni.new_ear(), speech[:num], True).features
        text = omni.audio_tokens[1]
        theirs = processor(text=text, audio=[speech[:num]], return_tensors="pt")
        mask = theirs["feature_attention_mask"][0].bool()
        torch.testing.assert_close(
            item.tensors["input_audio_features"], theirs["input_features"][0][:, mask], atol=2e-6, rtol=0
        )
        assert item.tensors["audio_feature_lengths"].tolist() == [int(mask.sum())]
        assert item.num_tokens == (theirs["input_ids"] == omni._audio_pad).sum()


def test_token_counts_equal_the_encoders_for_any_number_of_frames(omni, thinker):
    tower = thinker.audio_tower
    if isinstance(omni, Qwen25Omni):
        counts = tower._get_feat_extract_output_lengths(torch.arange(3, 900))[1].tolist()
    else:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            _get_feat_extract_output_lengths,
        )

        counts = _get_feat_extract_output_lengths(torch.arange(3, 900)).tolist()
    assert [omni.num_tokens(n) for n in range(3, 900)] == counts


def test_audio_waits_for_its_block_while_the_user_talks(omni, speech):
    ear = omni.new_ear()
    assert hear(omni, ear, speech[:31_000], False) == Intake()
    intake = hear(omni, ear, speech[31_000:70_000], False)
    assert [item.num_tokens for item in intake.features] == [2 * omni.audio_tokens_per_s] * 2
    assert [item.offset for item in intake.features] == [0, 2 * omni.audio_tokens_per_s]
    assert len(intake.token_ids) == 4 * omni.audio_tokens_per_s
    assert len(ear.rest) == 6_000
    last = hear(omni, ear, speech[70_000:70_500], True)
    assert len(last.features) == 1 and len(ear.rest) == 0
    assert hear(omni, ear, speech[:0], True) == Intake()


def test_continuous_audio_is_taken_whole_across_ticks(omni, speech):
    """Ticks of uneven length: nothing is lost, nothing waits for longer than a tick, each item is short."""
    ear = omni.new_ear()
    position, heard = 0, 0
    for num in (31_680, 32_320, 32_000, 33_000, 60_000, 16_000):
        intake = hear(omni, ear, speech[position : position + num], True, TurnMode.CONTINUOUS)
        position += num
        heard += sum(160 * int(item.tensors["audio_feature_lengths"]) for item in intake.features)
        assert heard + len(ear.rest) == position
        assert len(ear.rest) < SAMPLE_RATE // 2
        assert all(item.num_tokens <= 2 * omni.audio_tokens_per_s for item in intake.features)


def test_many_sessions_at_once_are_heard_as_each_alone(omni, speech):
    sizes = (32_000, 5_000, 48_000, 0, 20_000)
    batch = [Hearing(str(i), omni.new_ear(), speech[i * 999 :][:n], True) for i, n in enumerate(sizes)]
    for hearing, intake in zip(batch, omni.hear(batch), strict=True):
        alone = hear(omni, omni.new_ear(), hearing.audio, True)
        assert intake.token_ids == alone.token_ids
        for ours, theirs in zip(intake.features, alone.features, strict=True):
            torch.testing.assert_close(
                ours.tensors["input_audio_features"],
                theirs.tensors["input_audio_features"],
                atol=2e-6,
                rtol=0,
            )


def test_broken_audio_stays_in_its_session(omni, speech, monkeypatch):
    bad = np.full(16_000, np.nan, np.float32)
    bad[:100] = np.inf
    batch = [Hearing("a", omni.new_ear(), bad, True), Hearing("b", omni.new_ear(), speech[:16_000], True)]
    a, b = omni.hear(batch)
    assert a.features[0].tensors["input_audio_features"].isfinite().all()
    assert len(b.features) == 1
    whole = omni._mel

    def fails_on_zeros(chunks):
        if any(chunk[200] == 0 for chunk in chunks):
            raise RuntimeError("out of memory")
        return whole(chunks)

    monkeypatch.setitem(omni.__dict__, "_mel", fails_on_zeros)
    ear = omni.new_ear()
    (begun,) = omni.hear([Hearing("b", ear, speech[:40_000], False)])
    batch = [Hearing("a", omni.new_ear(), bad, True), Hearing("b", ear, speech[40_000:48_000], True)]
    with pytest.raises(RuntimeError):
        omni.hear(batch)
    (ended,) = omni.hear(batch[1:])  # as if the other had not been there
    whole_turn = omni.hear([Hearing("c", omni.new_ear(), speech[:48_000], True)])[0]
    assert begun.token_ids + ended.token_ids == whole_turn.token_ids
    (item,) = ended.features
    ours, theirs = (i.tensors["input_audio_features"] for i in (item, whole_turn.features[1]))
    assert torch.equal(ours, theirs)


def encode(tower: Any, mels: list[torch.Tensor], omni: Any) -> torch.Tensor:
    lengths = torch.tensor([mel.shape[1] for mel in mels])
    after = tower._get_feat_extract_output_lengths(lengths)[0] if isinstance(omni, Qwen25Omni) else None
    if after is None:
        after = torch.tensor([omni.num_tokens(int(n)) for n in lengths])
    with torch.no_grad():
        made = tower(torch.cat(mels, dim=1), feature_lens=lengths, aftercnn_lens=after)
    return made.last_hidden_state


@pytest.mark.parametrize("num_frames", [1000, 730, 401, 203])
def test_encoding_blocks_one_by_one_against_encoding_the_whole(omni, thinker, speech, num_frames):
    """Qwen2.5-Omni: the same. Qwen3-Omni: the same in pieces of 8 s, its attention's reach; other in 2 s."""
    tower = thinker.audio_tower
    (mel,) = omni._mel([speech[: 160 * num_frames]])

    def in_pieces(size: int) -> torch.Tensor:
        pieces = [mel[:, start : start + size] for start in range(0, num_frames, size)]
        return torch.cat([encode(tower, [piece], omni) for piece in pieces])

    whole = encode(tower, [mel], omni)
    if isinstance(omni, Qwen25Omni):
        torch.testing.assert_close(in_pieces(200), whole, atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(in_pieces(800), whole, atol=1e-5, rtol=1e-5)
        assert in_pieces(200).shape == whole.shape
        if num_frames > 300:
            assert (in_pieces(200) - whole).abs().max() > 1e-3


def test_positions_of_audio_and_text_are_one_row_counting_up(omni, thinker):
    """The thinker's own M-RoPE: three equal rows without a gap, so plain RoPE is the same."""
    head, frames = list(omni.head("")), [400, 130]
    tokens = list(head)
    for num in frames:
        pads = [omni._audio_pad] * omni.num_tokens(num)
        tokens += [*omni.open_turn(TurnMode.MANUAL), *pads, *omni.close_turn(TurnMode.MANUAL), *head[:5]]
    ids = torch.tensor([tokens])
    positions, delta = thinker.get_rope_index(
        ids, None, None, torch.ones_like(ids), False, torch.tensor(frames), None
    )
    assert positions.shape == (3, 1, len(tokens))
    assert all(row.tolist() == list(range(len(tokens))) for row in positions[:, 0])
    assert delta.abs().sum() == 0


def test_the_tokenizer_can_be_put_together_from_vocabulary_and_merges(directory, tmp_path: Path):
    """As Qwen3-Omni is published: without tokenizer.json."""
    whole = load_tokenizer(directory)
    data = json.loads((directory / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    added = {str(token["id"]): token for token in data["added_tokens"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    parts = load_tokenizer(tmp_path)
    for text in (
        "It's 1234 o'clock\n\n  in Zürich, 北京!",
        "<|im_start|>user\n<|im_end|>",
        "a  b\t\r\nc é e\u0301",
    ):
        assert parts.encode(text).ids == whole.encode(text).ids
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "nothing")
