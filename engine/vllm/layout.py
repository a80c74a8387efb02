"""Whether an item of features is as its family states, before the encoder meets it.

A wrong shape, dtype, device or number of tokens fails inside vLLM's step, with everyone's audio in the same
batch; here it fails alone. That the statement itself is true is shown at the start, by encoding examples of
it (warming.py); so what passes here is of a kind that the encoder has taken.
"""

from __future__ import annotations

import torch

from engine.models.family import ItemLayout
from engine.types import Features

_CPU = torch.device("cpu")  # vLLM takes features there, and moves them itself


class LayoutCheck:
    """An `ItemLayout` held against items; a few microseconds each."""

    def __init__(self, layout: ItemLayout) -> None:
        self._layout = layout
        self._tensors = {
            name: (getattr(torch, dtype), shape) for name, (dtype, shape) in layout.tensors.items()
        }
        shortest, longest = layout.frames
        between = (shortest + 1, (shortest + longest) // 2, longest - 1)
        self.lengths = sorted({shortest, longest, *(n for n in between if shortest <= n <= longest)})
        """Frames of the items by which the layout is proved: the shortest, the longest, and some between."""

    def check(self, item: Features) -> int:
        """The item's frames. Raises ValueError, which says what is wrong."""
        tensors = item.tensors
        if tensors.keys() != self._tensors.keys():
            given, known = (", ".join(sorted(names)) for names in (tensors, self._tensors))
            raise ValueError(f"the features are {given or 'none'}, not {known}")
        num_frames: int | None = None
        for name, (dtype, shape) in self._tensors.items():
            tensor = tensors[name]
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{name} is no tensor but {type(tensor).__name__}")
            if tensor.device != _CPU:
                raise ValueError(f"{name} is on the device {tensor.device}, not on the CPU")
            sizes = tensor.shape
            fits = tensor.dtype is dtype and len(sizes) == len(shape)
            for size, wanted in zip(sizes, shape, strict=False):
                if wanted is None:
                    wanted = num_frames = size if num_frames is None else num_frames
                fits = fits and size == wanted
            if not fits:
                raise ValueError(
                    f"{name} is {_kind(tensor.dtype, sizes)}, not {_kind(dtype, shape, num_frames)}"
                )
        assert num_frames is not None
        self._check_length(item, num_frames)
        return num_frames

    def _check_length(self, item: Features, num_frames: int) -> None:
        layout = self._layout
        shortest, longest = layout.frames
        if not shortest <= num_frames <= longest:
            raise ValueError(f"an item has {num_frames} frames; it may have {shortest} to {longest}")
        num_tokens = layout.num_tokens(num_frames)
        if item.num_tokens != num_tokens:
            raise ValueError(
                f"the encoder makes {num_tokens} tokens of {num_frames} frames, "
                f"the item covers {item.num_tokens}"
            )
        for name, value in layout.values.items():
            said, meant = item.tensors[name].item(), value(num_frames)
            if said != meant:
                raise ValueError(f"{name} says {said} where {num_frames} frames mean {meant}")

    def example(self, num_frames: int) -> Features:
        """An item of zeros at the begin of its work."""
        values = self._layout.values
        tensors = {}
        for name, (dtype, shape) in self._tensors.items():
            value = values[name](num_frames) if name in values else 0
            sizes = [num_frames if size is None else size for size in shape]
            tensors[name] = torch.full(sizes, value, dtype=dtype)
        return Features(0, self._layout.num_tokens(num_frames), tensors)


def _kind(dtype: torch.dtype, sizes: tuple[int | None, ...], num_frames: int | None = None) -> str:
    shown = [num_frames or "frames" if size is None else size for size in sizes]
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shown))}]"
