"""Key rotation: moves cached keys to earlier positions, in place; a Triton kernel and its torch reference."""

from kernels.rebase.launcher import KeyCaches, Moves, check_moves, plan_moves, rebase_keys
from kernels.rebase.reference import Rotation, rebase_keys_reference, rotate_back, turn_table

__all__ = [
    "KeyCaches",
    "Moves",
    "Rotation",
    "check_moves",
    "plan_moves",
    "rebase_keys",
    "rebase_keys_reference",
    "rotate_back",
    "turn_table",
]
