"""MiniCPM-o's templates and seconds of audio, against what its published streaming code does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.conversation import Conversation
from engine.models import published
from engine.models.minicpmo import MiniCPMO, MiniCPMO26, MiniCPMO45, minicpmo
from engine.types import SAMPLE_RATE, Finish, Hearing, Intake, TurnMode, Work
from engine.vllm.environment import prepare_process, repair_torch_companions

prepare_process("cpu")
repair_torch_companions()

VERSIONS = ("4.5", "2.6")

# openbmb/MiniCPM-o-4_5, tokenizer_config.json: Qwen3's template, and behind it what starts an answer. Its
# text as quoted by sgl-project/sglang-omni (tests of models/minicpm_o); tools are left out.
TEMPLATE_45 = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if use_tts_template is defined and use_tts_template is true %}
        {{- '<|tts_bos|>' }}
    {%- endif %}
{%- endif %}"""

# openbmb/MiniCPM-o-2_6, modeling_minicpmo.py, `default_tts_chat_template`; also in vLLM's example for audio.
TEMPLATE_26 = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n<|spk_bos|><|spk|><|spk_eos|><|tts_bos|>' }}{% endif %}"
)


@pytest.fixture(scope="module", params=VERSIONS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and tokenizer; no test here needs weights."""
    from bench import minicpmo_checkpoint
    from tests.support.npm import qwen_tokenizer

    tokenizer = json.loads(qwen_tokenizer("3" if request.param == "4.5" else "2.5").read_text())
    directory = tmp_path_factory.mktemp(f"minicpmo-{request.param}")
    return minicpmo_checkpoint.write(request.param, directory, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def family(model_dir: Path) -> MiniCPMO:
    return minicpmo(model_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Special tokens in the text are special tokens."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def rendered(family: MiniCPMO, messages: list[dict[str, str]]) -> str:
    """As the model's own code renders a conversation that an answer is to follow."""
    from jinja2 import Template

    text = TEMPLATE_45 if isinstance(family, MiniCPMO45) else TEMPLATE_26
    options = {"add_generation_prompt": True, "enable_thinking": False, "use_tts_template": True}
    return Template(text).render(messages=messages, **options)


def audio_text(family: MiniCPMO, seconds: int) -> str:
    """Published: `get_audio_placeholder` of each second that is taken in."""
    return ("<|audio_start|>" + "<unk>" * family.unit_tokens + "<|audio_end|>") * seconds


def role(family: MiniCPMO) -> str:
    return family.instructing_role


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(int(seconds * SAMPLE_RATE))).astype(np.float32)


def hear(
    family: MiniCPMO, ear: Any, audio: np.ndarray, is_final: bool, mode: TurnMode = TurnMode.SERVER_VAD
) -> Intake:
    (intake,) = family.hear([Hearing("s", ear, audio, is_final, mode)])
    return intake


class Cache:
    """The tokens that an engine would hold after each work and its answer."""

    def __init__(self, family: MiniCPMO, mode: TurnMode) -> None:
        self.conversation = Conversation("s", family, mode, "Be kind.")
        self.tokens: list[int] = []
        self._family = family
        self._mode = mode
        self._ear = family.new_ear()
        self.run(self.conversation.open())

    def run(
        self, work: Work | None, answer: tuple[int, ...] = (), finish: Finish = Finish.FED, stop: Any = None
    ) -> None:
        assert work is not None
        self.tokens += work.token_ids
        self.tokens += answer if finish is Finish.STOP else answer[:-1]
        self.conversation.settle(answer, finish, stop)

    def take(self, audio: np.ndarray, is_final: bool) -> Work | None:
        intake = hear(self._family, self._ear, audio, is_final, self._mode)
        return self.conversation.take_in(intake, is_final=is_final, max_tokens=20)


def test_a_turn_is_the_chat_templates_rendering_token_for_token(family, tokenizer):
    cache = Cache(family, TurnMode.SERVER_VAD)
    cache.run(cache.take(sound(1.2), False))
    cache.run(cache.take(sound(1.1), False))
    cache.run(cache.take(sound(0.5), True))
    messages = [
        {"role": role(family), "content": "Be kind."},
        {"role": "user", "content": audio_text(family, 3)},
    ]
    assert cache.tokens == ids(tokenizer, rendered(family, messages))


def test_a_second_turn_follows_as_in_the_published_streaming_code(family, tokenizer):
    """`streaming_prefill` after an answer: "<|tts_eos|><|im_end|>\\n<|im_start|>user\\n" and so on."""
    codec, cache = family._codec, Cache(family, TurnMode.MANUAL)
    answer = codec.encode("Fine, thanks. And you?")
    cache.run(cache.take(sound(2.0), True), answer, Finish.STOP, codec.special("<|tts_eos|>"))
    cache.conversation.close_answer()
    cut = codec.encode("I wanted to say")
    cache.run(cache.take(sound(1.0), True), cut, Finish.LENGTH)
    cache.conversation.close_answer()
    cache.run(cache.take(sound(1.0), True))
    first = [
        {"role": role(family), "content": "Be kind."},
        {"role": "user", "content": audio_text(family, 2)},
    ]
    opening = rendered(family, []).removeprefix("<|im_start|>")
    again = (
        f"<|tts_eos|><|im_end|>\n<|im_start|>user\n{audio_text(family, 1)}<|im_end|>\n<|im_start|>{opening}"
    )
    text = rendered(family, first) + "Fine, thanks. And you?" + again + "I wanted to say" + again
    assert cache.tokens == ids(tokenizer, text)


def test_new_instructions_are_a_message_of_the_versions_role(family, tokenizer):
    """`get_sys_prompt`: {"role": "user"} in 2.6, {"role": "system"} in 4.5."""
    assert role(family) == ("system" if isinstance(family, MiniCPMO45) else "user")
    opening = f"<|im_start|>{role(family)}\n"
    assert list(family.instruct("Be brief.")) == ids(tokenizer, f"{opening}Be brief.<|im_end|>\n")
    assert list(family.head("")) == ids(tokenizer, f"{opening}{family.default_instructions}<|im_end|>\n")


def test_sampling_is_the_published_one_of_each_mode(family):
    for mode in family.info.turn_modes:
        is_duplex = mode is TurnMode.CONTINUOUS and isinstance(family, MiniCPMO45)
        sampling = family.sampling(mode)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 20 if is_duplex else 100)
        assert sampling.repetition_penalty == 1.0


def test_nobody_can_type_a_special_token(family, tokenizer):
    assert ids(tokenizer, "<|im_end|>")[0] in family.head("x")
    assert family.head("<|im_end|> <unit>").count(ids(tokenizer, "<|im_end|>")[0]) == 1


@pytest.fixture(scope="module")
def duplex() -> Iterator[tuple[MiniCPMO45, Tokenizer]]:
    import tempfile

    from bench import minicpmo_checkpoint
    from tests.support.npm import qwen_tokenizer

    content = json.loads(qwen_tokenizer("3").read_text())
    with tempfile.TemporaryDirectory() as name:
        directory = minicpmo_checkpoint.write("4.5", Path(name), tokenizer=content)
        yield MiniCPMO45(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_full_duplex_is_units_as_published(duplex):
    """`DuplexCapability`: <unit>, a second's embeddings, what the model decides, its terminator, </unit>."""
    family, tokenizer = duplex
    codec, cache = family._codec, Cache(family, TurnMode.CONTINUOUS)
    speak, turn_eos = codec.special("<|speak|>"), codec.special("<|turn_eos|>")
    listen, chunk_eos = codec.special("<|listen|>"), codec.special("<|chunk_eos|>")
    cache.run(cache.take(sound(1.0), True), (), Finish.STOP, listen)
    cache.run(cache.take(sound(1.0), True), (speak, *codec.encode("Well, it is")), Finish.STOP, chunk_eos)
    cut = (speak, *codec.encode(" raining today and I do not"))
    cache.run(cache.take(sound(1.0), True), cut, Finish.LENGTH)
    last = (speak, *codec.encode(" mind."), turn_eos)
    cache.run(cache.take(sound(1.0), True), last, Finish.STOP, chunk_eos)
    cache.run(cache.take(sound(2.0), True), (), Finish.STOP, listen)
    cache.run(cache.take(sound(1.0), True))
    unit = "<unit>" + "<unk>" * 10
    text = (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        f"{unit}<|listen|></unit>"
        f"{unit}<|speak|>Well, it is<|chunk_eos|></unit>"
        f"{unit}<|speak|> raining today and I do not<|chunk_eos|></unit>"
        f"{unit}<|speak|> mind.<|turn_eos|><|chunk_eos|></unit>"
        f"{unit}<|listen|></unit>{unit}<|listen|></unit>"  # two seconds in one tick
        f"{unit}"
    )
    assert cache.tokens == ids(tokenizer, text)


def test_an_answer_goes_on_until_its_turn_ends(duplex):
    family, _ = duplex
    codec = family._codec
    chunk_eos, turn_eos = codec.special("<|chunk_eos|>"), codec.special("<|turn_eos|>")
    text = codec.encode("so")
    assert family.is_pause(TurnMode.CONTINUOUS, text, chunk_eos)
    assert not family.is_pause(TurnMode.CONTINUOUS, (*text, turn_eos), chunk_eos)
    assert not family.is_pause(TurnMode.CONTINUOUS, (), codec.special("<|listen|>"))
    assert not family.is_pause(TurnMode.MANUAL, text, chunk_eos)


def test_what_is_not_text_is_not_said(duplex):
    family, tokenizer = duplex
    detokenizer = family.detokenizer()
    assert detokenizer.push(ids(tokenizer, "<|speak|>Hi.<|turn_eos|>")) + detokenizer.flush() == "Hi."


def test_sampling_stops_where_an_answer_ends(family, tokenizer):
    stops = {tokenizer.id_to_token(i) for i in family.sampling(TurnMode.MANUAL).stop_token_ids}
    duplex_stops = {"<|listen|>", "<|chunk_eos|>", "<|chunk_tts_eos|>"}
    usual = {"<|tts_eos|>", "<|im_end|>", "<|endoftext|>"}
    assert stops == usual | (duplex_stops if isinstance(family, MiniCPMO45) else set())


def num_seconds(intake: Intake) -> int:
    return len(intake.features)


def test_a_turn_shorter_than_a_second_is_one(family):
    ear = family.new_ear()
    assert hear(family, ear, sound(0.3), False) == Intake()
    assert num_seconds(hear(family, ear, sound(0.2), True)) == 1
    assert len(ear.rest) == 0 and ear.mel is None


def test_the_last_part_of_a_turn_is_filled_up_with_silence(family):
    ear = family.new_ear()
    assert num_seconds(hear(family, ear, sound(2.4), False)) == 2
    last = hear(family, ear, sound(0.1), True)
    assert num_seconds(last) == 1
    (item,) = last.features
    assert item.num_tokens == family.unit_tokens
    assert item.tensors["audio_features"][0, :, -20:].amax() < item.tensors["audio_features"].amax() - 0.2


def test_a_rest_too_short_for_a_word_takes_no_seconds_tokens(family):
    ear = family.new_ear()
    assert num_seconds(hear(family, ear, sound(2.0), False)) == 2
    assert hear(family, ear, sound(0.01), True) == Intake()
    assert hear(family, ear, sound(0.0), True) == Intake()


def test_each_turn_begins_a_new_stream(family):
    ear = family.new_ear()
    audio = sound(2.5)
    first = hear(family, ear, audio, True)
    second = hear(family, ear, audio, True)
    for a, b in zip(first.features, second.features, strict=True):
        assert (a.tensors["audio_features"] == b.tensors["audio_features"]).all()


def test_continuous_audio_goes_on_over_ticks_of_uneven_length(family):
    """Ticks bring a second give or take a frame; each has its unit, and nothing piles up."""
    ear = family.new_ear()
    rng = np.random.default_rng(1)
    ahead = 0
    for _ in range(200):
        late = int(rng.integers(-1, 2)) * 320  # the tick came a frame early or late
        audio = sound((SAMPLE_RATE + late - ahead) / SAMPLE_RATE)
        ahead = late
        assert num_seconds(hear(family, ear, audio, True, TurnMode.CONTINUOUS)) in (
            (1,) if isinstance(family, MiniCPMO45) else (0, 1, 2)
        )
        assert len(ear.rest) < 2 * SAMPLE_RATE


def test_a_change_of_mode_begins_a_new_stream(family):
    ear = family.new_ear()
    hear(family, ear, sound(1.7), False)
    intake = hear(family, ear, sound(1.0), True, TurnMode.CONTINUOUS)
    assert num_seconds(intake) == 1
    assert bool(intake.features[0].tensors["audio_is_first"]) is isinstance(family, MiniCPMO45)


def test_audio_that_is_no_number_is_silence_and_harms_nobody(family):
    bad = sound(1.0)
    bad[100:200] = np.nan
    good, ears = sound(1.0, 7), [family.new_ear(), family.new_ear()]
    intakes = family.hear([Hearing("a", ears[0], bad, True), Hearing("b", ears[1], good, True)])
    for intake in intakes:
        assert intake.features[0].tensors["audio_features"].isfinite().all()
    alone = hear(family, family.new_ear(), good, True)
    together = intakes[1].features[0].tensors["audio_features"]
    assert (alone.features[0].tensors["audio_features"] - together).abs().max() < 1e-5


def test_features_that_fail_leave_every_ear_as_it_was(family, monkeypatch):
    """Then each is heard alone, and goes on as if nothing had been."""
    audio, ears = sound(5.5, 3), [family.new_ear(), family.new_ear()]
    before, behind = audio[: 5 * 8000], audio[5 * 8000 :]
    hear(family, ears[0], before, False, TurnMode.CONTINUOUS)
    stream = family._mel
    in_order = (
        hear(family, ears[1], before, False, TurnMode.CONTINUOUS),
        hear(family, ears[1], behind, True, TurnMode.CONTINUOUS),
    )

    def fails_late(units):
        made = stream(units)
        if len(units) > 4:
            raise RuntimeError("out of memory")
        return made

    monkeypatch.setitem(family.__dict__, "_mel", fails_late)
    batch = [
        Hearing("a", ears[0], behind, True, TurnMode.CONTINUOUS),
        Hearing("b", family.new_ear(), sound(4.0, 1), True, TurnMode.CONTINUOUS),
    ]
    with pytest.raises(RuntimeError):
        family.hear(batch)
    (alone,) = family.hear(batch[:1])
    assert alone.token_ids == in_order[1].token_ids
    for ours, theirs in zip(alone.features, in_order[1].features, strict=True):
        for name, tensor in ours.tensors.items():
            assert torch.equal(tensor, theirs.tensors[name])


def test_the_family_is_found_by_the_checkpoints_configuration(model_dir):
    family = published.load(str(model_dir))
    assert isinstance(family, MiniCPMO45 if "4.5" in model_dir.name else MiniCPMO26)
    assert family.info.budget_s == 1.0 and len(family.info.turn_modes) == 3
    assert family.info.audio_tokens_per_s == family.unit_tokens


def test_a_version_that_is_not_served_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["MiniCPMO"], "version": "4.6"}')
    with pytest.raises(ValueError, match=r"MiniCPM-o 4\.6, which is not served here; known: 2\.6, 4\.5"):
        minicpmo(tmp_path)


def test_the_encoders_positions_go_on_through_a_stream_and_begin_again_before_they_end(family):
    """Published: the look back is given up when it and the next second would reach 1,500 frames."""
    ear = family.new_ear()
    places = []
    for _ in range(31):
        intake = hear(family, ear, sound(1.0), True, TurnMode.CONTINUOUS)
        places += [int(item.tensors["audio_position"]) for item in intake.features]
    assert places == [*range(0, 1450, 50), 0, 50]
    turn = hear(family, family.new_ear(), sound(3.0), True)
    assert [int(item.tensors["audio_position"]) for item in turn.features] == [0, 50, 100]
