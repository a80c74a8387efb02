"""The kernel at real sizes on a CUDA device: against torch, bit for bit across batches, in graphs."""

from dataclasses import replace

import pytest
import torch
from rebase_checks import raw

from kernels.rebase import KeyCaches, plan_moves, rebase_keys, rotate_back
from kernels.rebase.cases import PRIMARY, Batch, Case, build
from kernels.rebase.reference import FP8, rounded

pytestmark = pytest.mark.gpu

SHAPES = (
    PRIMARY,
    replace(PRIMARY, name="gpt-j, partial", is_neox=False, rotary_dim=64),
    replace(PRIMARY, name="HND, 48 layers", layout="HND", num_layers=48),
    replace(PRIMARY, name="fp8", dtype=FP8),
    replace(PRIMARY, name="fp16, block 128", dtype=torch.float16, block_size=128, moves=PRIMARY.moves[:8]),
    replace(
        PRIMARY,
        name="float32, 8 heads of 256",
        dtype=torch.float32,
        num_kv_heads=8,
        head_size=256,
        moves=PRIMARY.moves[:8],
    ),
    replace(PRIMARY, name="30 layers x 3 heads of 64", num_layers=30, num_kv_heads=3, head_size=64),
)


def move(case: Case, batch: Batch) -> None:
    num_blocks = len(batch.key_caches[0])
    moves = plan_moves(batch.block_ids, batch.distances, case.rotation, num_blocks, "cuda")
    rebase_keys(KeyCaches.of(batch.key_caches), moves, case.rotation)


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_real_sizes(case: Case) -> None:
    batch = build(case, seed=31, device="cuda")
    before = batch.buffer.clone()
    move(case, batch)
    ids = torch.tensor(batch.block_ids, device="cuda")
    others = torch.ones(batch.buffer.shape[1], dtype=torch.bool, device="cuda")
    others[ids] = False
    moves = plan_moves(batch.block_ids, batch.distances, case.rotation, len(others), "cuda")
    turns = moves.turns[moves.turn_ids.long()][:, None, None]
    num_different = num_keys = 0
    for layer, old in zip(batch.buffer, before, strict=True):
        new, old = layer.view(torch.uint8), old.view(torch.uint8)
        values = case.head_size * case.dtype.itemsize
        assert torch.equal(new[others], old[others])
        assert torch.equal(new[..., values:], old[..., values:])
        keys = old[ids][..., :values].contiguous().view(case.dtype)
        expected = rounded(rotate_back(keys, turns, case.rotation), case.dtype).float().nan_to_num(nan=7.0)
        found = new[ids][..., :values].contiguous().view(case.dtype).float().nan_to_num(nan=7.0)
        eps = torch.finfo(case.dtype).eps
        # The neighbour at the most; near 0, where pairs cancel, float32's error of the longer coordinate.
        smallest = 2.0**-9 if case.dtype == FP8 else 4e-4
        assert ((found - expected).abs() <= eps * expected.abs() + smallest).all()
        num_different += int((found != expected).sum())
        num_keys += found.numel()
    assert case.dtype == torch.float32 or num_different < 0.01 * num_keys


def test_a_block_alone_equals_the_block_in_a_full_batch() -> None:
    case = replace(PRIMARY, num_layers=4)
    full, alone = (build(case, seed=32, device="cuda") for _ in range(2))
    move(case, full)
    for index in range(0, len(full.block_ids), 173):
        one = replace(
            alone, block_ids=full.block_ids[index : index + 1], distances=full.distances[index : index + 1]
        )
        move(case, one)
        assert torch.equal(raw(one.buffer[:, one.block_ids]), raw(full.buffer[:, one.block_ids]))


def test_the_host_waits_for_nothing() -> None:
    case = replace(PRIMARY, num_layers=4)
    batch = build(case, seed=33, device="cuda")
    caches = KeyCaches.of(batch.key_caches)
    move(case, batch)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moves = plan_moves(batch.block_ids, batch.distances, case.rotation, len(batch.key_caches[0]), "cuda")
        rebase_keys(caches, moves, case.rotation)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_a_graph() -> None:
    case = replace(PRIMARY, num_layers=4)
    batch, expected = (build(case, seed=34, device="cuda") for _ in range(2))
    caches = KeyCaches.of(batch.key_caches)
    moves = plan_moves(batch.block_ids, batch.distances, case.rotation, len(batch.key_caches[0]), "cuda")
    kept = batch.buffer.clone()
    rebase_keys(caches, moves, case.rotation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rebase_keys(caches, moves, case.rotation)
    batch.buffer.copy_(kept)
    graph.replay()
    move(case, expected)
    assert torch.equal(raw(batch.buffer), raw(expected.buffer))


def test_addresses_past_two_gigabytes() -> None:
    """Blocks, and layers, beyond 2**31 elements: offsets that int32 arithmetic would wrap."""
    case = replace(PRIMARY, num_layers=2, moves=((3, 1000),))
    small = build(case, seed=35, device="cuda")
    block = small.buffer[0, 0].numel()
    num_blocks = 2**31 // block + 40
    far = torch.empty((2, num_blocks, *small.buffer.shape[2:]), dtype=case.dtype, device="cuda")
    shift = num_blocks - small.buffer.shape[1]
    far[:, shift:] = small.buffer
    keys = [layer[..., : case.head_size] for layer in far]
    move(case, replace(small, buffer=far, key_caches=keys, block_ids=[b + shift for b in small.block_ids]))
    move(case, small)
    assert torch.equal(raw(far[:, shift:]), raw(small.buffer))
