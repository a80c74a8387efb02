"""Sink-window attention: a paged Triton kernel, its torch reference and its checked launcher."""

from kernels.sink_window.config import Config, Scratch
from kernels.sink_window.launcher import sink_window_attention
from kernels.sink_window.reference import sink_window_attention_reference

__all__ = ["Config", "Scratch", "sink_window_attention", "sink_window_attention_reference"]
