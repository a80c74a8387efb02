"""Features that are not as their family states: refused alone, in a real engine, beside another session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models import published
from engine.types import SAMPLE_RATE, Features, Finish, Hearing
from engine.vllm.settings import VllmSettings
from tests.support import tiny_omni

pytestmark = pytest.mark.vllm

SETTINGS = VllmSettings(
    max_sessions=8, max_session_tokens=2047, kv_cache_bytes=64 << 20, window_tokens=256, max_sink_tokens=64
)


@pytest.fixture(scope="module", params=["ultravox", *tiny_omni.NAMES, "minicpm-o-4.5", "minicpm-o-2.6"])
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Any:
    from tests.support.tiny_minicpmo import write_checkpoint
    from tests.support.ultravox_family import TinyUltravox

    name: str = request.param
    if name == "ultravox":
        return TinyUltravox(model_dir)
    if name.startswith("minicpm"):
        version = name.removeprefix("minicpm-o-")
        return published.load(str(write_checkpoint(tmp_path_factory.mktemp(name), version)))
    return published.load(str(tiny_omni.cached(name)))


@pytest.fixture(scope="module")
def module_stepper(omni: Any) -> Iterator:
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from engine.vllm.warming import prove
    from tests.engine.vllm.stepper import Stepper

    recipe = omni.engine_recipe()
    core = load(recipe, SETTINGS)
    sessions = SessionCore(core, recipe.modality, recipe.layout)
    prove(sessions, recipe.layout)
    yield Stepper(sessions)
    core.shutdown()


def heard(omni: Any) -> tuple[tuple[int, ...], list[Features]]:
    """Two seconds of noise and a bit, as the family hears them."""
    audio = np.random.default_rng(0).normal(0, 0.1, 2 * SAMPLE_RATE + 5000).astype(np.float32)
    (intake,) = omni.hear([Hearing("a", omni.new_ear(), audio, True, omni.info.turn_modes[0])])
    return intake.token_ids, list(intake.features)


def main_name(item: Features) -> str:
    """Of the spectrogram."""
    return next(name for name, tensor in item.tensors.items() if tensor.is_floating_point())


def with_mel(item: Features, change: Any) -> Features:
    name = main_name(item)
    return replace(item, tensors={**item.tensors, name: change(item.tensors[name])})


def nan(mel: torch.Tensor) -> torch.Tensor:
    mel = mel.clone()
    mel.view(-1)[7] = float("nan")
    return mel


def number(item: Features) -> Features:
    """Another value in each tensor of one number."""
    return replace(
        item,
        tensors={
            k: t + 1 if t.numel() == 1 and t.dtype != torch.bool else t for k, t in item.tensors.items()
        },
    )


FAULTS = {
    "one bin less": (
        lambda item: with_mel(item, lambda mel: mel[..., 1:, :]),
        r"is float32 \[.*\], not float32 \[",
    ),
    "no batch, or one more": (
        lambda item: with_mel(item, lambda mel: mel[None]),
        r"is float32 \[1, .*, not float32",
    ),
    "half as precise": (lambda item: with_mel(item, torch.Tensor.half), r"is float16 .*, not float32"),
    "one frame less": (
        lambda item: with_mel(item, lambda mel: mel[..., 1:]),
        r"\d+ frames; it may have|tokens of \d+ frames|\d+ frames mean|is int32 \[1, \d+\], not int32",
    ),
    "another device": (
        lambda item: with_mel(item, lambda mel: mel.to("meta")),
        "on the device meta, not on the CPU",
    ),
    "an array": (lambda item: with_mel(item, torch.Tensor.numpy), "is no tensor but ndarray"),
    "not a number": (lambda item: with_mel(item, nan), "not finite"),
    "a tensor less": (
        lambda item: replace(item, tensors={k: t for k, t in item.tensors.items() if k != main_name(item)}),
        "the features are .*, not",
    ),
    "no tensors": (lambda item: replace(item, tensors={"mel": None}), "the features are mel, not"),
    "a placeholder less": (
        lambda item: replace(item, num_tokens=item.num_tokens - 1),
        r"makes (\d+) tokens of \d+ frames, the item covers \d+",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_features_of_a_wrong_kind_end_their_session_only(stepper, omni, fault):
    tokens, (first, *others) = heard(omni)
    spoil, reason = FAULTS[fault]
    good = stepper.work("good", tokens, 8, features=[first, *others])
    stepper.submit(good)
    stepper.step()
    bad = stepper.work("bad", tokens, 4, features=[spoil(first), *others])
    stepper.submit(bad)
    assert stepper.final(bad).finish is Finish.REFUSED
    assert re.search(reason, stepper.final(bad).error), stepper.final(bad).error
    stepper.step_until(lambda: stepper.final(good))
    assert stepper.final(good).finish in (Finish.LENGTH, Finish.STOP)
    more = stepper.work("good", tokens, 2, features=[first, *others])
    assert stepper.run(more)[0] in (Finish.LENGTH, Finish.STOP)


def test_a_number_that_contradicts_the_frames_is_refused(stepper, omni):
    if not omni.engine_recipe().layout.values:
        pytest.skip("nothing in its features tells of their length")
    tokens, (first, *others) = heard(omni)
    work = stepper.work("bad", tokens, 4, features=[number(first), *others])
    stepper.submit(work)
    assert "frames mean" in stepper.final(work).error


def test_an_item_longer_than_stated_is_refused(stepper, omni):
    layout = omni.engine_recipe().layout
    longest = layout.frames[1] + 1
    from engine.vllm.layout import LayoutCheck

    item = LayoutCheck(layout).example(longest)
    work = stepper.work("bad", (5,) * item.num_tokens, 4, features=[item])
    stepper.submit(work)
    assert f"an item has {longest} frames; it may have" in stepper.final(work).error


def test_an_item_of_a_known_length_is_cut_as_vllm_cuts_it(stepper, omni):
    """How a length is cut is asked once: with and without that memory the same reaches the encoder."""
    from engine.vllm.requests import RequestBuilder

    config, recipe = stepper.core._core.vllm_config, omni.engine_recipe()
    knows, asks = RequestBuilder(config, "audio", recipe.layout), RequestBuilder(config, "audio")
    tokens, features = heard(omni)
    for brighter in (0.0, 1.0, 2.0):
        items = [with_mel(item, lambda mel, more=brighter: mel + more) for item in features]
        work = stepper.work("a", tokens, features=items)
        built: list[Any] = [builder.build("a", work).mm_features for builder in (knows, asks)]
        for one, other, item in zip(*built, items, strict=True):
            assert one.data.keys() == other.data.keys() == item.tensors.keys()
            for name, element in one.data.items():
                assert torch.equal(element.data, other.data[name].data)
                assert element.field == other.data[name].field  # how the batch puts it together
    assert len(knows._fields_of_length) == len({num_frames(item) for item in features})


def num_frames(item: Features) -> int:
    return item.tensors[main_name(item)].shape[-1]
