"""What a second encoded alone loses against MiniCPM-o's published streaming, which looks back in its stream.

MiniCPM-o's own weights cannot be had here. Its encoder began as Whisper medium's, so Whisper's say more than
random ones: tiny.en's (4 layers, 384 wide) on 24 s of people talking, mel frames as 4.5's processor makes
them, embeddings averaged over 5 frames. Cosine to the published, mean over all tokens (torch 2.13, CPU):

    alone, at its place in the stream           0.906   what is served
    alone, as if each second were the first     0.495
    with the second before it encoded anew      0.963
    published against the whole recording at once, everything seeing everything  0.962
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from engine.types import SAMPLE_RATE
from engine.vllm.environment import prepare_process, repair_torch_companions

prepare_process("cpu")
repair_torch_companions()

FRAMES = 50  # of the encoder, a second
HEADS, WIDTH, LAYERS = 6, 384, 4


def read_ctranslate2(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a CTranslate2 `model.bin`: a header, then name, shape, type and bytes of each."""
    with path.open("rb") as file:

        def number(code: str) -> int:
            return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]

        def text() -> str:
            return file.read(number("H"))[:-1].decode()

        _format, _kind, _revision = number("I"), text(), number("I")
        kinds = (np.float32, np.int8, np.int16, np.int32, np.float16)
        tensors = {}
        for _ in range(number("I")):
            name = text()
            shape = [number("I") for _ in range(number("B"))]
            kind = kinds[number("B")]
            values = np.frombuffer(file.read(number("I")), kind).reshape(shape)
            tensors[name] = torch.from_numpy(values.astype(np.float32))
    return tensors


class Encoder:
    """Whisper's encoder, written out: a second's frames, and what each frame may see."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def frames(self, mel: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        """Behind the convolutions: [50, width] of a second and its margins."""
        hidden = F.gelu(F.conv1d((mel[:, 2:] if is_first else mel)[None], *self._get("conv1"), padding=1))
        hidden = F.gelu(F.conv1d(hidden, *self._get("conv2"), stride=2, padding=1))[0].T
        return hidden[:FRAMES] if is_first else hidden[1 : 1 + FRAMES]

    def __call__(self, frames: torch.Tensor, position: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        places = self._weights["encoder/position_encodings/encodings"]
        hidden = frames + places[position : position + len(frames)]
        for i in range(LAYERS):
            part = f"layer_{i}/self_attention"
            qkv = F.linear(self._norm(hidden, f"{part}/layer_norm"), *self._get(f"{part}/linear_0"))
            q, k, v = (x.reshape(len(x), HEADS, -1).transpose(0, 1) for x in qkv.split(WIDTH, -1))
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1)
            hidden = hidden + F.linear(seen, *self._get(f"{part}/linear_1"))
            part = f"layer_{i}/ffn"
            inner = F.gelu(F.linear(self._norm(hidden, f"{part}/layer_norm"), *self._get(f"{part}/linear_0")))
            hidden = hidden + F.linear(inner, *self._get(f"{part}/linear_1"))
        return self._norm(hidden, "layer_norm")

    def _get(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._weights[f"encoder/{name}/weight"], self._weights[f"encoder/{name}/bias"]

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        gamma, beta = (self._weights[f"encoder/{name}/{kind}"] for kind in ("gamma", "beta"))
        return F.layer_norm(hidden, (WIDTH,), gamma, beta)


def chunk_mask(num_frames: int) -> torch.Tensor:
    """Published: a frame sees its own second and all before it (`subsequent_chunk_mask`, the KV cache)."""
    second = torch.arange(num_frames) // FRAMES
    return second[None, :] <= second[:, None]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean over the tokens: averages of five frames."""
    a, b = (F.avg_pool1d(x.T[None], 5)[0].T for x in (a, b))
    return float(F.cosine_similarity(a, b).mean())


@pytest.fixture(scope="module")
def encoder(whisper_dir: Path) -> Encoder:
    return Encoder(read_ctranslate2(whisper_dir / "model.bin"))


@pytest.fixture(scope="module")
def seconds(encoder: Encoder, recordings: dict[str, np.ndarray]) -> list[torch.Tensor]:
    """24 s, each as the encoder sees it behind the convolutions."""
    from engine.models.minicpmo_mel import FIRST_SAMPLES, MelStream, StreamingLogMel

    audio = np.concatenate(list(recordings.values())).astype(np.float32)
    stream, starts = MelStream(), range(FIRST_SAMPLES, 23 * SAMPLE_RATE + FIRST_SAMPLES, SAMPLE_RATE)
    units = [(stream, audio[:FIRST_SAMPLES]), *((stream, audio[at : at + SAMPLE_RATE]) for at in starts)]
    return [encoder.frames(mel, is_first=is_first) for mel, is_first in StreamingLogMel()(units)]


def test_how_far_a_second_alone_is_from_the_published_streaming(encoder, seconds):
    num = len(seconds)
    assert num == 24
    published = encoder(torch.cat(seconds), 0, chunk_mask(num * FRAMES))
    served = torch.cat([encoder(frames, i * FRAMES) for i, frames in enumerate(seconds)])
    torch.testing.assert_close(served[:FRAMES], published[:FRAMES], atol=1e-4, rtol=1e-4)
    assert cosine(served, published) == pytest.approx(0.906, abs=0.01)
    always_first = torch.cat([encoder(frames, 0) for frames in seconds])
    assert cosine(always_first, published) == pytest.approx(0.495, abs=0.02)
    pairs = [torch.cat(seconds[max(0, i - 1) : i + 1]) for i in range(num)]
    anew = [
        encoder(pair, max(0, i - 1) * FRAMES, chunk_mask(len(pair)))[-FRAMES:] for i, pair in enumerate(pairs)
    ]
    assert cosine(torch.cat(anew), published) == pytest.approx(0.963, abs=0.01)
    assert cosine(published, encoder(torch.cat(seconds), 0)) == pytest.approx(0.962, abs=0.01)


def test_the_margins_make_the_convolutions_equal_to_those_of_the_whole(encoder, seconds, recordings):
    """As far as the mel is the same: while the stream has less than 5 s, whose floor is fixed."""
    from engine.models.minicpmo_mel import FIRST_SAMPLES, MelStream, StreamingLogMel

    audio = np.concatenate(list(recordings.values())).astype(np.float32)
    stream, mel = MelStream(), StreamingLogMel()
    units = [mel([(stream, audio[:FIRST_SAMPLES])])[0][0]]
    units += [
        mel([(stream, audio[at : at + SAMPLE_RATE])])[0][0]
        for at in range(FIRST_SAMPLES, 3 * SAMPLE_RATE, SAMPLE_RATE)
    ]
    whole = torch.cat([units[0][:, 2:102], *(unit[:, 2:102] for unit in units[1:])], dim=1)
    hidden = F.gelu(F.conv1d(whole[None], *encoder._get("conv1"), padding=1))
    hidden = F.gelu(F.conv1d(hidden, *encoder._get("conv2"), stride=2, padding=1))[0].T
    for i, frames in enumerate(seconds[:2]):  # the last has no audio behind it in `whole`
        torch.testing.assert_close(frames, hidden[i * FRAMES : (i + 1) * FRAMES], atol=1e-4, rtol=1e-4)
