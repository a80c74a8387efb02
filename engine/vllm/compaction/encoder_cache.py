"""The encoder's outputs leave with the last token that needed them.

vLLM keeps them until it needs the space, in case another request brings the same item; ours never does.
"""

from __future__ import annotations

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request


class PromptEncoderCacheManager(EncoderCacheManager):
    """The worker is told to drop an output in the first step after the one that consumed it, unless its key
    was given out again meanwhile: keys must be new for ever (requests.py)."""

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        super().free_encoder_input(request, input_id)
        while self.freeable:
            identifier, num_embeds = self.freeable.popitem(last=False)
            del self.cached[identifier], self.num_embeds_by_hash[identifier]
            self.freed.append(identifier)
            self.num_free_slots += num_embeds
