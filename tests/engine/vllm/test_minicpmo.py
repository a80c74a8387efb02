"""MiniCPM-o in a real engine, against transformers' own Whisper and Qwen with the same weights.

transformers has no MiniCPM-o; the reference is composed of its parts: `WhisperEncoder`'s modules, two linear
layers, an average, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.types import SAMPLE_RATE, Features, Finish, Hearing, Sampling, TurnMode, Work
from engine.vllm.settings import VllmSettings
from tests.support.speech import recording

pytestmark = pytest.mark.vllm

W = 1024


@pytest.fixture(scope="module", params=["4.5", "2.6"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_minicpmo import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp(f"minicpmo-{request.param}"), request.param)


@pytest.fixture(scope="module")
def family(model_dir: Path) -> Any:
    from engine.models import published

    return published.load(str(model_dir))


@pytest.fixture(scope="module")
def engine_core(family: Any) -> Iterator:
    """Nothing of the checkpoint but config.json and weights: no code, no tokenizer, no image processor."""
    from engine.vllm.loading import load

    settings = VllmSettings(max_sessions=8, max_session_tokens=2047, kv_cache_bytes=64 << 20, window_tokens=W)
    core = load(family.engine_recipe(), settings)
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def module_stepper(engine_core):
    from engine.vllm.core import SessionCore
    from tests.engine.vllm.stepper import Stepper

    return Stepper(SessionCore(engine_core, "audio"))


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    samples, rate = recording("jfk.flac")
    assert rate == SAMPLE_RATE
    return (samples / 32768.0).astype(np.float32)


class Reference:
    """The published forward pass: `get_audio_embedding` of seconds, without a look back, and the LLM."""

    def __init__(self, directory: Path) -> None:
        from safetensors.torch import load_file
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        from tests.support.tiny_minicpmo import backbone

        config = json.loads((directory / "config.json").read_text())
        weights = load_file(directory / "model.safetensors")
        self._weights = weights
        self._pool_step = config["audio_pool_step"]
        self.encoder = WhisperEncoder(WhisperConfig(**config["audio_config"])).eval()
        self.encoder.load_state_dict(part(weights, "apm."))
        self.llm = backbone(config).eval()
        self.llm.load_state_dict(part(weights, "llm."))

    def embed(self, mel: torch.Tensor, position: int) -> torch.Tensor:
        """[mel bins, frames] -> [tokens, hidden size]; the margins are cut behind the convolutions."""
        encoder, gelu = self.encoder, torch.nn.functional.gelu
        hidden = gelu(encoder.conv2(gelu(encoder.conv1(mel[None])))).transpose(1, 2)
        if mel.shape[1] > 100:  # as published: prefix only where there is one, suffix always
            hidden = hidden[:, (1 if mel.shape[1] == 104 else 0) : -1]
        assert hidden.shape[1] == 50
        hidden = hidden + encoder.embed_positions.weight[position : position + 50]
        for layer in encoder.layers:
            out = layer(hidden, None)
            hidden = out[0] if isinstance(out, tuple) else out
        hidden = encoder.layer_norm(hidden)
        name = "audio_projection_layer.linear{}.{}"
        for i in (1, 2):
            weight, bias = (self._weights[name.format(i, kind)] for kind in ("weight", "bias"))
            hidden = torch.nn.functional.linear(hidden, weight, bias)
            hidden = hidden.relu() if i == 1 else hidden
        return torch.nn.functional.avg_pool1d(hidden.transpose(1, 2), self._pool_step)[0].T

    counts_on = True  # whether all features are of one stream

    @torch.inference_mode()
    def logits(self, tokens: list[int], features: list[Features]) -> torch.Tensor:
        """At every position, in one causal pass over all tokens."""
        embeds = self.llm.get_input_embeddings()(torch.tensor(tokens))
        for i, item in enumerate(features):
            mel = item.tensors["audio_features"][0]
            if bool(item.tensors["audio_is_first"]):
                mel = mel[:, 2:]  # a stream's first chunk has no prefix
            embeds[item.offset : item.offset + item.num_tokens] = self.embed(mel, 50 * i * self.counts_on)
        return self.llm(inputs_embeds=embeds[None]).logits[0]


def part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


class Talk:
    """A session's works, tick by tick, and all that it fed and was answered."""

    def __init__(self, family: Any, stepper: Any, name: str, mode: TurnMode) -> None:
        self.family, self.stepper, self.name, self.mode = family, stepper, name, mode
        self.ear = family.new_ear()
        self.head = family.head("Be kind.")
        self.owed: tuple[int, ...] = self.head
        self.tokens: list[int] = []
        self.features: list[Features] = []
        self.answers: list[int] = []

    def work(self, audio: np.ndarray, max_tokens: int) -> Work:
        (intake,) = self.family.hear([Hearing(self.name, self.ear, audio, True, self.mode)])
        before = (*self.owed, *self.family.open_turn(self.mode))
        placed = [replace(item, offset=item.offset + len(before)) for item in intake.features]
        self.features += [replace(item, offset=item.offset + len(self.tokens)) for item in placed]
        tokens = (*before, *intake.token_ids, *self.family.close_turn(self.mode))
        self.tokens += tokens
        greedy = Sampling()  # random weights: what they say, and when they stop, means nothing
        work = self.stepper.work(self.name, tokens, max_tokens, features=placed, sampling=greedy)
        return replace(work, num_head_tokens=len(self.head))

    def settle(self, work: Work) -> None:
        answer = self.stepper.tokens(work)
        self.answers += answer
        self.tokens += answer[:-1]
        self.owed = (answer[-1], *self.family.close_answer(self.mode))


@pytest.mark.parametrize("mode", [TurnMode.CONTINUOUS, TurnMode.MANUAL])
def test_logits_of_a_streamed_session_equal_one_offline_pass(
    stepper, engine_core, family, model_dir, speech, mode
):
    """Below W, at every position, within 1e-3 of logits that reach over 10 (3e-4 was seen)."""
    from tests.engine.vllm.sink_window import recording as steps

    talk = Talk(family, stepper, "a", mode)
    with steps.hidden_states(engine_core) as recorded:
        for i in range(8):
            work = talk.work(speech[i * SAMPLE_RATE : (i + 1) * SAMPLE_RATE], 5)
            assert stepper.run(work) == [Finish.LENGTH]
            talk.settle(work)
    assert len(talk.features) == 8 and len(talk.tokens) < W
    with torch.inference_mode():
        logits = steps.runner_of(engine_core).model.compute_logits(torch.cat(recorded))
    reference = Reference(model_dir)
    reference.counts_on = mode is TurnMode.CONTINUOUS  # elsewhere each turn is a stream of its own
    expected = reference.logits(talk.tokens, talk.features)
    assert logits.shape == expected.shape and expected.abs().max() > 10
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert talk.answers[:5] != talk.answers[5:10]  # and it is the audio that answers


def test_sessions_side_by_side_answer_as_each_alone(stepper, family, speech):
    """Seconds of other sessions in the encoder's batch, first ones and later ones, change nothing."""
    alone: list[list[int]] = []
    for start in range(4):
        talk = Talk(family, stepper, f"alone{start}", TurnMode.CONTINUOUS)
        for i in range(2):
            work = talk.work(speech[(start + i) * SAMPLE_RATE : (start + i + 1) * SAMPLE_RATE], 4)
            stepper.run(work)
            talk.settle(work)
        alone.append(talk.answers)
        stepper.end(talk.name)
    talks = [Talk(family, stepper, f"both{start}", TurnMode.CONTINUOUS) for start in range(4)]
    for i in range(2):
        works = [
            talk.work(speech[(start + i) * SAMPLE_RATE : (start + i + 1) * SAMPLE_RATE], 4)
            for start, talk in enumerate(talks)
            if start < 2 or i == 1
        ]
        stepper.run(*works)
        for work in works:
            next(talk for talk in talks if talk.name == work.session_id).settle(work)
    assert [talk.answers for talk in talks[:2]] == alone[:2]
    assert len({tuple(answers) for answers in alone}) == 4


def test_which_of_its_stop_tokens_ended_an_answer_is_told(stepper, family, speech):
    first = Talk(family, stepper, "a", TurnMode.CONTINUOUS).work(speech[:SAMPLE_RATE], 3)
    stepper.run(first)
    said = stepper.tokens(first)
    for i, stop in enumerate(said[:2]):
        work = Talk(family, stepper, f"b{i}", TurnMode.CONTINUOUS).work(speech[:SAMPLE_RATE], 3)
        work = replace(work, sampling=Sampling(stop_token_ids=(1, stop)))
        assert stepper.run(work) == [Finish.STOP]
        assert stepper.final(work).stop_token == stop and stepper.tokens(work) == said[:i]
    assert stepper.final(first).stop_token is None


def test_features_of_another_shape_are_refused_and_the_engine_lives(stepper, family, speech):
    talk = Talk(family, stepper, "a", TurnMode.CONTINUOUS)
    work = talk.work(speech[:SAMPLE_RATE], 4)
    (item,) = work.features
    short = {**item.tensors, "audio_features": item.tensors["audio_features"][..., :50]}
    bad = replace(work, features=(replace(item, tensors=short),))
    stepper.submit(bad)
    assert "audio_features are [80, 50] an item" in stepper.final(bad).error
    good = Talk(family, stepper, "b", TurnMode.CONTINUOUS).work(speech[:SAMPLE_RATE], 4)
    assert stepper.run(good) == [Finish.LENGTH]


def test_a_seconds_embeddings_are_as_many_as_its_placeholders(engine_core, family, speech):
    from tests.engine.vllm.sink_window import recording as steps

    (intake,) = family.hear([Hearing("a", family.new_ear(), speech[: 3 * SAMPLE_RATE], True)])
    model = steps.runner_of(engine_core).model
    for item in intake.features:
        with torch.inference_mode():
            (embeds,) = model.embed_multimodal(**item.tensors)
        assert embeds.shape[0] == item.num_tokens == family.unit_tokens


def test_no_tower_but_the_ears_is_loaded(engine_core):
    from tests.engine.vllm.sink_window import recording as steps

    names = {name.split(".")[0] for name, _ in steps.runner_of(engine_core).model.named_parameters()}
    assert names == {"llm", "apm", "audio_projection_layer"}
