"""Sink-window attention inside vLLM: which KV is kept, and the attention over what is kept.

layout.py    arithmetic of blocks: what is the gap, how many blocks a session can hold
options.py   the sizes, on their way through vLLM's configuration
spec.py      the KV cache spec of a windowed layer and the manager that frees the gap
starting.py  at an engine's start: puts our parts where vLLM finds them, refuses what they cannot do
heads.py     each request's S, from our scheduler to the batch on the device
cpu.py       attention on the CPU: vLLM's kernel over a compacted block table
cuda.py      attention on CUDA: our kernel over the whole block table
graphs.py    CUDA graphs of whole steps
"""
