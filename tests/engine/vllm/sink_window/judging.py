"""A session's logits at every position, from the engine and from Hugging Face under an explicit mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.types import Finish
from engine.vllm.sink_window.layout import gap_blocks


def rounded_mask(chunks: list[int], num_sink_tokens: int, window: int, block_size: int) -> torch.Tensor:
    """bool [T, T]: what each position sees when the tokens came in these chunks."""
    total = sum(chunks)
    mask = torch.zeros((total, total), dtype=torch.bool)
    done = 0
    for size in chunks:
        first, last = gap_blocks(num_sink_tokens, done, window, block_size)
        for position in range(done, done + size):
            mask[position, : position + 1] = True
            mask[position, first * block_size : max(first, last) * block_size] = False
        done += size
    return mask


@torch.inference_mode()
def judged_logits(judge: Any, tokens: list[int], mask: torch.Tensor) -> torch.Tensor:
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    positions = torch.arange(len(tokens))[None]
    out = judge(torch.tensor([tokens]), attention_mask=additive[None, None], position_ids=positions)
    return out.logits[0]


def talk(
    stepper: Any, text: tuple[int, ...], sizes: list[int], max_tokens: int, num_sink_tokens: int
) -> tuple[list[int], Any, Any]:
    """Feed `text` in chunks, letting the model answer after each: its tokens, steps and logits."""
    from tests.engine.vllm.sink_window import recording

    tokens, start, owed = [], 0, ()
    engine_core = stepper.core._core
    with recording.hidden_states(engine_core) as recorded:
        for size in sizes:
            fed = (*owed, *text[start : start + size])
            start += size
            work = replace(stepper.work("a", fed, max_tokens), num_head_tokens=num_sink_tokens)
            assert stepper.run(work) == [Finish.LENGTH if max_tokens else Finish.FED]
            answer = stepper.tokens(work)
            tokens += [*fed, *answer[:-1]]
            owed = tuple(answer[-1:])
    with torch.inference_mode():
        logits = recording.runner_of(engine_core).model.compute_logits(torch.cat(recorded))
    return tokens, [len(step) for step in recorded], logits
