"""Keys moved in a real engine's cache, against the keys that the model makes where they were moved to.

The judge needs no second model. A session that is fed one token over and over has the same hidden state at
every position of every layer, whatever it attends to: its keys differ by their rotation alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.vllm.compaction.moving import BLOCK, TOKEN, blocks, caches, mover_of, start

pytestmark = pytest.mark.vllm

SIZES: dict[str, Any] = dict(
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=300,
    max_position_embeddings=512,
    initializer_range=0.2,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3, keys normed first": ("Qwen3", {"head_dim": 32}),
    "linear scaling": ("Llama", {"rope_parameters": LINEAR}),
    "YaRN": ("Qwen2", {"rope_parameters": YARN}),
    "partial": ("StableLm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    "partial GPT-J": ("Glm4", {"head_dim": 32, "pad_token_id": 0}),
}


def save(name: str, directory: Path) -> None:
    import transformers

    torch.manual_seed(2)
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(directory)


@pytest.fixture(scope="module", params=MODELS)
def stepper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tiny model with random weights in float32."""
    directory = tmp_path_factory.mktemp("model")
    save(request.param, directory)
    stepper = start(directory, "float32", 512)
    yield stepper
    stepper.core.shutdown()


def test_moved_keys_are_the_keys_made_there(stepper):
    stepper.run(stepper.work("a", [TOKEN] * 160))
    ids, mover, before = blocks(stepper, "a"), mover_of(stepper), caches(stepper)
    assert (before[:, ids[9], :, 0] - before[:, ids[2], :, 0]).abs().max() > 0.1  # the judge has an opinion
    mover.move([(ids[8:10], 6 * BLOCK), (ids[5:6], 5 * BLOCK)])
    after = caches(stepper)
    scale = before[:, ids[:10], :, 0].abs().max()
    for moved, place in ((8, 2), (9, 3), (5, 0)):
        difference = after[:, ids[moved], :, 0] - before[:, ids[place], :, 0]
        assert difference.abs().max() < 1e-5 * scale, moved
    others = [block for block in range(before.shape[1]) if block not in {ids[8], ids[9], ids[5]}]
    assert torch.equal(after[:, others], before[:, others])
    assert torch.equal(after[:, :, :, 1], before[:, :, :, 1])
    stepper.end_all()


def test_there_and_back_changes_nothing(stepper):
    text = [(7 * i + i * i) % 290 + 5 for i in range(64)]
    stepper.run(stepper.work("b", text), stepper.work("c", text))
    ids, other = blocks(stepper, "b"), blocks(stepper, "c")
    mover = mover_of(stepper)
    mover.move([(ids, -300)])
    mover.move([(ids, 200)])
    mover.move([(ids, 100)])
    after = caches(stepper)[:, :, :, 0]
    scale = after[:, other].abs().max()
    assert (after[:, ids] - after[:, other]).abs().max() < 1e-5 * scale
    stepper.end_all()
