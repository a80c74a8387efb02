"""SmolLM2's keys, moved in bf16; see test_mover.py for the judge. And what the mover refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.vllm.compaction.moving import BLOCK, TOKEN, blocks, caches, mover_of, start

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def stepper() -> Iterator[Any]:
    from engine.models import bundles
    from engine.models.prepare import prepare

    stepper = start(prepare(bundles.SMOLLM2, Path("~/.cache/metronome").expanduser()), "bfloat16", 8192)
    yield stepper
    stepper.core.shutdown()


def test_keys_to_the_rounding_of_bf16(stepper):
    """In bf16 a key is its product, cos and sin rounded; moving it rounds once more."""
    stepper.run(stepper.work("a", [TOKEN] * 384))
    ids, before = blocks(stepper, "a"), caches(stepper)[:, :, :, 0].float()
    mover_of(stepper).move([(ids[8:24], 8 * BLOCK)])
    after = caches(stepper)[:, :, :, 0].float()
    moved, made = after[:, ids[8:24]], before[:, ids[:16]]
    assert (moved - made).norm() / made.norm() < 2**-8
    assert (moved - made).abs().max() < 2**-6 * made.abs().max()
    assert (before[:, ids[8:24]] - made).norm() / made.norm() > 0.3


def test_what_is_no_block_of_a_session_is_refused(stepper):
    mover, before = mover_of(stepper), caches(stepper)
    for wrong in ([0], [-1], [before.shape[1]], [3, 3]):
        with pytest.raises(ValueError):
            mover.move([(wrong, 16)])
    mover.move([])
    mover.move([([], 16), ([4], 0)])
    assert torch.equal(caches(stepper).view(torch.uint8), before.view(torch.uint8))
