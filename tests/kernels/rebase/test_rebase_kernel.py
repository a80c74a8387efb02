"""The Triton kernel against the formula: interpreted on a CPU, compiled where there is a CUDA device.

`build` leaves NaN in every block that must not be touched and in slots behind a session's last token;
`check_moved` compares bits there.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rebase_checks import check_moved, raw

from kernels.rebase import KeyCaches, plan_moves, rebase_keys, rebase_keys_reference
from kernels.rebase.cases import CORRECTNESS, Batch, Case, build
from kernels.rebase.launcher import Config
from kernels.rebase.reference import FP8


def run(case: Case, batch: Batch, config: Config | None = None) -> None:
    caches = KeyCaches.of(batch.key_caches)
    num_blocks, device = batch.key_caches[0].shape[0], batch.buffer.device
    moves = plan_moves(batch.block_ids, batch.distances, case.rotation, num_blocks, device)
    rebase_keys(caches, moves, case.rotation, config)


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_kernel_is_the_formula_and_the_reference(case: Case, device: str) -> None:
    batch, other = build(case, seed=2, device=device), build(case, seed=2, device=device)
    before = batch.buffer.clone()
    run(case, batch)
    check_moved(case, batch, before)
    rebase_keys_reference(other.key_caches, other.block_ids, other.distances, case.rotation)
    for ours, theirs in zip(batch.key_caches, other.key_caches, strict=True):
        a, b = ours.float().nan_to_num(nan=7.0), theirs.float().nan_to_num(nan=7.0)
        # A product kept exact inside a fused multiply-add may round to the neighbour.
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2 * float(torch.finfo(case.dtype).eps))
        assert float((a != b).float().mean()) < 0.01 or case.dtype == torch.float32


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_size = draw(st.sampled_from((32, 64, 80)))
    return Case(
        "drawn",
        tuple(
            draw(st.lists(st.tuples(st.integers(0, 2), st.integers(-1000, 10**6)), min_size=1, max_size=4))
        ),
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 5)),
        head_size=head_size,
        block_size=draw(st.sampled_from((16, 32, 48))),
        rotary_dim=draw(st.one_of(st.none(), st.integers(1, head_size // 2).map(lambda half: 2 * half))),
        is_neox=draw(st.booleans()),
        layout=draw(st.sampled_from(("NHD", "HND"))),
        theta=draw(st.sampled_from((10_000.0, 1e6))),
        factor=draw(st.sampled_from((1.0, 4.0))),
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32, FP8))),
    )


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(case=cases(), seed=st.integers(0, 2**16), rows=st.sampled_from((16, 32, 128)))
def test_kernel_is_the_formula_on_drawn_cases(case: Case, seed: int, rows: int, device: str) -> None:
    if not sum(count for count, _ in case.moves):
        case = replace(case, moves=((1, 5),))
    batch = build(case, seed, device)
    before = batch.buffer.clone()
    run(case, batch, Config(rows=rows))
    check_moved(case, batch, before)


def test_a_block_alone_equals_the_block_in_a_full_batch(device: str) -> None:
    case = CORRECTNESS[0]
    full = build(case, seed=4, device=device)
    run(case, full)
    for index, (block, distance) in enumerate(zip(full.block_ids, full.distances, strict=True)):
        alone = build(case, seed=4, device=device)
        alone = replace(alone, block_ids=[block], distances=[distance])
        run(case, alone)
        assert torch.equal(raw(alone.buffer[:, block]), raw(full.buffer[:, block])), index


def test_the_guard_of_the_guards(device: str) -> None:
    """With one block left out, or one turned by another distance, the comparison fails."""
    case = CORRECTNESS[0]
    for wrong in ("left out", "too far"):
        batch = build(case, seed=5, device=device)
        before, told = batch.buffer.clone(), batch
        if wrong == "left out":
            told = replace(batch, block_ids=batch.block_ids[1:], distances=batch.distances[1:])
        else:
            told = replace(batch, distances=[batch.distances[0] + 1, *batch.distances[1:]])
        run(case, told)
        with pytest.raises(AssertionError):
            check_moved(case, batch, before)


def test_layers_of_separate_allocations(device: str) -> None:
    """Offsets between layers may be anything, negative too."""
    case = Case("apart", ((2, 77),), num_layers=3)
    batch, expected = build(case, seed=6, device=device), build(case, seed=6, device=device)
    run(case, expected)
    apart = [layer.clone() for layer in reversed(batch.buffer)]
    keys = [layer[..., : case.head_size] for layer in reversed(apart)]
    run(case, replace(batch, key_caches=keys))
    for ours, theirs in zip(keys, expected.key_caches, strict=True):
        assert torch.equal(raw(ours), raw(theirs))


def test_no_number_of_blocks_needs_another_compilation() -> None:
    rotation = CORRECTNESS[0].rotation
    offsets = set()
    for count in range(1, 9):
        moves = plan_moves(range(count), range(count), rotation, 16, "cpu")
        base = moves.block_ids.data_ptr()
        offsets |= {(part.data_ptr() - base) % 16 for part in (moves.turn_ids, moves.turns)}
    assert offsets == {0}


def test_nothing_to_move(device: str) -> None:
    batch = build(CORRECTNESS[0], seed=7, device=device)
    before = batch.buffer.clone()
    run(CORRECTNESS[0], replace(batch, block_ids=[], distances=[]))
    assert torch.equal(raw(batch.buffer), raw(before))


def test_wrong_arguments() -> None:
    case = Case("small", ((2, 5),))
    batch, rotation = build(case), case.rotation
    keys, num_blocks = batch.key_caches, len(batch.key_caches[0])
    caches = KeyCaches.of(keys)
    with pytest.raises(ValueError, match="no layers"):
        KeyCaches.of([])
    with pytest.raises(ValueError, match="differ in shape"):
        KeyCaches.of([keys[0], keys[1].contiguous()])
    with pytest.raises(ValueError, match="contiguous in the last"):
        KeyCaches.of([keys[0].mT])
    with pytest.raises(ValueError, match="must be one of"):
        KeyCaches.of([keys[0].double()])
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        KeyCaches.of(
            [
                keys[0],
                torch.empty(batch.buffer[0].numel() + 1, dtype=case.dtype)[1:].as_strided(
                    keys[0].shape, keys[0].stride()
                ),
            ]
        )
    with pytest.raises(ValueError, match="do not match"):
        plan_moves([1, 2], [3], rotation, num_blocks, "cpu")
    with pytest.raises(ValueError, match="block ids must be"):
        plan_moves([num_blocks], [3], rotation, num_blocks, "cpu")
    with pytest.raises(ValueError, match="block ids must be"):
        plan_moves([-1], [3], rotation, num_blocks, "cpu")
    with pytest.raises(ValueError, match="twice"):
        plan_moves([1, 1], [3, 4], rotation, num_blocks, "cpu")
    moves = plan_moves([1], [3], rotation, num_blocks, "cpu")
    other = replace(case, rotary_dim=32).rotation
    with pytest.raises(ValueError, match="planned for"):
        rebase_keys(caches, moves, other)
    wide = replace(case, head_size=128).rotation
    with pytest.raises(ValueError, match="do not fit"):
        rebase_keys(caches, plan_moves([1], [3], wide, num_blocks, "cpu"), wide)
