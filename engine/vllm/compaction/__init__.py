"""Compaction: a session's length in vLLM shrinks to what is resident, so that no session grows old.

Sink-window attention frees the gap between a session's first S tokens and its last W, but its tokens, its
block table and its positions go on growing. Between two turns, once it is worth it, the gap leaves them all:

    tokens     0 .. S | gap ............ | window        length 5,000, of which 1,200 are resident
    compacted  0 .. S | window                           length 1,200

A key in the cache carries the rotation of its position (RoPE), so the window's keys are rotated back by the
length of the gap, a multiple of the block size: R(-d) R(p) k = R(p - d) k. Queries and new keys count on from
there. Distances inside the window stay what they were; the sinks come nearer, as in StreamingLLM
(arXiv:2309.17453), and positions stay where the model was trained.

A session that goes back (an interruption) has its gap closed at once, beside a window that is shorter than W
until as many tokens have followed as were taken back. So long, queries reach over the window's beginning to
what stands before it: the rest of the head's last block, up to block size - 1 of the conversation's oldest
tokens behind S. The CPU's mask, which rounds S to its block, always shows them; the CUDA kernel's shows them
then, for its mask knows S and W only. What can be freed and moved are blocks: to hide a part of one would
take a third number for each row in the kernel and on the way to it, for 15 tokens beside hundreds.

options.py        slack and cap, on their way through vLLM's configuration
parked.py         the scheduler's side: what a parked session's record in vLLM becomes
worker.py         the device's side: runs the moves that come with a step, before its forward
mover.py          rotates keys in the cache (rotation.py: a model's angles; key_layout.py: the CPU's layout)
encoder_cache.py  an encoder's outputs leave with the last token that needed them
"""
