"""The CUDA backend's metadata and forward in Triton's interpreter (for a GPU: bench/windowed_engine_gpu)."""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.vllm.sink_window.layout import gap_blocks
from kernels.sink_window.reference import sink_window_attention_reference

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="interpreted kernels would stay so for the GPU's tests"
    ),
]

HEADS, KV_HEADS, SIZE, BLOCK, W, MAX_ROWS = 4, 2, 64, 16, 40, 8
ROWS = {"a": (0, 21, 5), "b": (150, 33, 17), "c": (90, 1, 16)}  # name -> tokens done, new tokens, S


@pytest.fixture(scope="module")
def cuda() -> Any:
    import triton.language as tl
    from triton_interpreter import interpret  # pyright: ignore[reportMissingImports]

    interpret(tl, tl.standard, importlib.import_module("kernels.sink_window.kernel"))
    return importlib.import_module("engine.vllm.sink_window.cuda")


def new_builder(cuda: Any, monkeypatch: pytest.MonkeyPatch, spec_class: str = "SinkWindowSpec") -> Any:
    monkeypatch.setattr(cuda, "get_num_attention_heads_from_layers", lambda *_: HEADS)
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    values: dict[str, Any] = dict(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16
    )
    if spec_class == "SinkWindowSpec":
        own = dict(window_tokens=W, max_sink_tokens=32, in_flight_tokens=64, max_session_tokens=1000)
        spec: Any = cuda.SinkWindowSpec(**values, **own)
    else:
        spec = FullAttentionSpec(**values)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS),
    )
    return cuda.SinkWindowCUDABuilder(spec, ["layer"], config, torch.device("cpu"))


def new_impl(cuda: Any, **changes: Any) -> Any:
    arguments = dict(
        num_heads=HEADS,
        head_size=SIZE,
        scale=SIZE**-0.5,
        num_kv_heads=KV_HEADS,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
    )
    return cuda.SinkWindowCUDAImpl(**(arguments | changes))


def batch_of(names: list[str], num_padding_rows: int = 0) -> tuple[Any, torch.Tensor]:
    """vLLM's metadata of these rows and a layer's cache [blocks, heads, slots, 2 * size]."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    generator = torch.Generator().manual_seed(3)
    table = torch.full((len(names) + num_padding_rows, 14), 2**31 - 1, dtype=torch.int32)
    cache = torch.full((60, KV_HEADS, BLOCK, 2 * SIZE), float("nan"), dtype=torch.bfloat16)
    ids = iter((torch.randperm(59, generator=generator) + 1).tolist())
    for index, name in enumerate(names):
        done, new, sinks = ROWS[name]
        first, last = gap_blocks(sinks, done, W, BLOCK)
        for block in range(-(-(done + new) // BLOCK)):
            if not first <= block < last:
                table[index, block] = next(ids)
                fill = min(BLOCK, done + new - block * BLOCK)
                data = torch.randn((KV_HEADS, fill, 2 * SIZE), generator=generator)
                cache[table[index, block], :, :fill] = data.to(torch.bfloat16)
    starts = [0, *itertools.accumulate(ROWS[name][1] for name in names)]
    starts += [starts[-1]] * num_padding_rows
    cu = torch.tensor(starts, dtype=torch.int32)
    lengths = [sum(ROWS[name][:2]) for name in names] + [0] * num_padding_rows
    common = CommonAttentionMetadata(
        query_start_loc=cu,
        query_start_loc_cpu=cu,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=starts[-1] + num_padding_rows,
        max_query_len=max(ROWS[name][1] for name in names),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        req_idx=np.arange(len(names)),
    )
    return common, cache


@pytest.mark.parametrize("names,padding", [(["b", "c", "a"], 0), (["c", "c"], 2), (["a"], 0)])
def test_a_batch_through_builder_and_layer_equals_the_reference(cuda, monkeypatch, names, padding):
    builder = new_builder(cuda, monkeypatch)
    builder.sinks_of_rows = lambda batch: (ROWS[names[row]][2] for row in batch.req_idx)
    common, cache = batch_of(names, padding)
    metadata = builder.build(0, common)
    table, starts, lengths, sinks = metadata.step.rows
    assert sinks.tolist() == [ROWS[name][2] for name in names] + [0] * padding
    num_tokens = common.num_actual_tokens
    query = torch.randn((num_tokens + 3, HEADS, SIZE), generator=torch.Generator().manual_seed(1))
    query = query.to(torch.bfloat16)
    out = torch.full_like(query, float("nan"))
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    impl = new_impl(cuda)
    impl.forward(layer, query, query[:, :KV_HEADS], query[:, :KV_HEADS], cache, metadata, out)
    keys, values = cache.transpose(1, 2).split(SIZE, dim=-1)
    expected = sink_window_attention_reference(
        query[:num_tokens],
        keys,
        values,
        starts,
        lengths,
        table,
        sinks,
        W,
        SIZE**-0.5,
    )
    real = int(common.query_start_loc[-1])
    torch.testing.assert_close(out[:real].double(), expected[:real], atol=2e-2, rtol=2e-2)
    assert out[real:].isnan().all()  # rows that pad the batch stay as they were


def test_the_sinks_keep_their_address_and_follow_the_batch(cuda, monkeypatch):
    builder = new_builder(cuda, monkeypatch)
    common, _ = batch_of(["b", "c", "a"])
    addresses = set()
    for rows in ([7, 8, 9], [1, 2, 3], [1, 2, 3], [0, 2, 5]):
        builder.sinks_of_rows = lambda batch, rows=rows: iter(rows)
        sinks = builder.build(0, common).step.rows[3]
        assert sinks.tolist() == rows
        addresses.add(sinks.data_ptr())
    assert len(addresses) == 1


def test_the_dry_runs_before_the_worker_is_there_see_no_sinks(cuda, monkeypatch):
    common, _ = batch_of(["b", "c"])
    metadata = new_builder(cuda, monkeypatch).build_for_cudagraph_capture(common)
    assert metadata.step.rows[3].tolist() == [0, 0]
    out = torch.ones(3, HEADS, SIZE)
    assert not new_impl(cuda).forward(None, out, out, out, out, None, out).any()


def test_a_layer_follows_its_memory(cuda, monkeypatch):
    """vLLM measures with a small cache first, then hands over the real one."""
    builder = new_builder(cuda, monkeypatch)
    common, cache = batch_of(["c"])
    metadata = builder.build(0, common)
    query = torch.randn((1, HEADS, SIZE), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    impl, other = new_impl(cuda), new_impl(cuda)
    outs = [torch.empty_like(query) for _ in range(3)]
    impl.forward(layer, query, query, query, cache, metadata, outs[0])
    impl.forward(layer, query, query, query, 2 * cache, metadata, outs[1])
    other.forward(layer, query, query, query, 2 * cache, metadata, outs[2])
    assert torch.equal(outs[1], outs[2]) and not torch.equal(outs[0], outs[1])


@pytest.fixture
def graphs(monkeypatch) -> Any:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    from engine.vllm.settings import graph_sizes
    from engine.vllm.sink_window.graphs import StepGraphs

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(
        cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)
    )
    sizes = graph_sizes(1024)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=100),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
    )
    found = StepGraphs(config, torch.device("cpu"), CUDAGraphMode.FULL, 1)
    found._graphs_captured = True
    return found


@pytest.mark.parametrize(
    "num_rows,num_tokens,longest,expected",
    [
        (1, 1, 1, (1, 1, 1)),
        (90, 90, 1, (96, 96, 1)),
        (98, 98, 1, (104, 100, None)),  # beyond the last size of decodes: any batch's
        (90, 91, 2, (96, 96, None)),
        (1, 90, 90, (96, 96, None)),
        (100, 1000, 50, (1024, 100, None)),
    ],
)
def test_a_step_takes_the_smallest_graph_that_fits_and_decodes_have_their_own(
    graphs, num_rows, num_tokens, longest, expected
):
    uniform = longest if num_rows * longest == num_tokens else None
    graph = graphs.dispatch(num_rows, num_tokens, uniform, 0, longest)
    assert (graph.num_tokens, graph.num_reqs, graph.uniform_token_count) == expected
    assert graph in graphs._capture_descs[graph.cg_mode]


def test_larger_steps_run_without_a_graph(graphs):
    assert not graphs.dispatch(100, 1025, None, 0, 50).cg_mode


def test_what_the_kernel_cannot_do_fails_at_start_and_says_what_to_change(cuda, monkeypatch):
    from engine.engine import EngineError

    with pytest.raises(EngineError, match=r"layer.*FullAttentionSpec; choose another model, or keep every"):
        new_builder(cuda, monkeypatch, "FullAttentionSpec")
    with pytest.raises(EngineError, match="uses ALiBi, which our kernel lacks: choose another model"):
        new_impl(cuda, alibi_slopes=[0.5] * HEADS)
    with pytest.raises(EngineError, match="capped logits"):
        new_impl(cuda, logits_soft_cap=30.0)


@pytest.mark.parametrize(
    "changes,reason",
    [
        (dict(head_size=72), "head_size not supported"),
        (dict(block_size=24), "block_size not supported"),
        (dict(dtype=torch.float32), "dtype not supported"),
        (dict(kv_cache_dtype="int8_per_token_head"), "kv_cache_dtype not supported"),
        (dict(has_sink=True), "attention sinks not supported"),
        (dict(has_sliding_window=True), "sliding window not supported"),
        (dict(attn_type="encoder_only"), "attention type encoder_only not supported"),
        (dict(), None),
        (dict(kv_cache_dtype="fp8", dtype=torch.float16, head_size=256), None),
    ],
)
def test_vllm_asks_the_backend_what_it_supports(cuda, changes, reason):
    from vllm.platforms.interface import DeviceCapability

    usual = dict(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=DeviceCapability(9, 0),
        attn_type="decoder",
    )
    found = cuda.SinkWindowCUDABackend.validate_configuration(**(usual | changes))
    assert found == ([] if reason is None else [reason])
