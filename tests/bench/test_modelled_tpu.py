"""The TPU model: what is counted in a program's text, what the estimate does not see of a kernel, and a compiler that aborts."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from kdk.cases import Case
from kdk.registry import OPERATORS, require
from kdk_bench.modelled import scans, torchtpu
from kdk_bench.modelled.hlo import cost
from kdk_bench.modelled.tpu_chips import CHIPS

require(["rms_norm"])
if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is the compiler", allow_module_level=True)
from kdk.backends.pallas.launch import prepare  # noqa: E402

prepare()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from kdk_bench.modelled import tpu  # noqa: E402
from kdk_bench.modelled.pallas_program import unseen  # noqa: E402
from kdk_bench.modelled.profiler import Profiler, Program  # noqa: E402

# ---- a program's text --------------------------------------------------------------------------------------------------


def estimated(cycles: int) -> str:
    return f', backend_config={{"window_config":{{"estimated_cycles":"99999"}},"bundle_analysis_data":{{"estimated_cycles":"{cycles}"}}}}'


PROGRAM = f"""HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[256])) -> (s32[], f32[256]) {{
  %p = (s32[]{{:T(128)}}, f32[256]{{0:T(256)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %v = f32[256]{{0:T(256)}} get-tuple-element(%p), index=1
  %fusion.7 = f32[256]{{0:T(256)}} fusion(%v), kind=kLoop, calls=%c{estimated(10)}
  ROOT %t = (s32[]{{:T(128)}}, f32[256]{{0:T(256)}}) tuple(%i, %fusion.7)
}}

%condition (q: (s32[], f32[256])) -> pred[] {{
  %q = (s32[]{{:T(128)}}, f32[256]{{0:T(256)}}) parameter(0)
  %n = s32[]{{:T(128)}} constant(7)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%j, %n), direction=LT
}}

ENTRY %main (x: bf16[64,128], w: f32[256]) -> bf16[64,128] {{
  %x = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = f32[256]{{0:T(256)}} parameter(1)
  %copy-start = (bf16[64,128]{{1,0:T(8,128)(2,1)S(1)}}, bf16[64,128]{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) copy-start(%x)
  %copy-done = bf16[64,128]{{1,0:T(8,128)(2,1)S(1)}} copy-done(%copy-start)
  %fusion.1 = bf16[64,128]{{1,0:T(8,128)(2,1)S(1)}} fusion(%copy-done), kind=kLoop, calls=%c{estimated(100)}
  %fusion.2 = bf16[64,128]{{1,0:T(8,128)(2,1)S(1)}} fusion(%fusion.1), kind=kLoop, calls=%c
  %slice-start = ((bf16[64,128]{{1,0:T(8,128)(2,1)}}), bf16[8,128]{{1,0:T(8,128)(2,1)S(1)}}, s32[]{{:S(2)}}) slice-start(%x)
  %slice-done = bf16[8,128]{{1,0:T(8,128)(2,1)S(1)}} slice-done(%slice-start)
  %tuple = (s32[]{{:T(128)}}, f32[256]{{0:T(256)}}) tuple(%w, %w)
  %while = (s32[]{{:T(128)}}, f32[256]{{0:T(256)}}) while(%tuple), condition=%condition, body=%body
  ROOT %out = bf16[64,128]{{1,0:T(8,128)(2,1)}} fusion(%fusion.2, %slice-done), kind=kLoop, calls=%c{estimated(1000)}
}}
"""
X = 64 * 128 * 2


def test_cycles_and_bytes_by_instruction() -> None:
    found = cost(PROGRAM, {"fusion.2": 100})  # fusion.2 equals fusion.1: the profiler wrote one file
    assert found.cycles == 100 + 100 + 7 * 10 + 1000
    # x into VMEM, a slice of x of 8 rows, seven times the loop's vector read and written, the result
    assert found.hbm_bytes == X + 8 * 128 * 2 + 7 * 2 * 256 * 4 + X
    assert found.caveats == ["while: counted 7 times, the limit of its condition"]


def test_a_loop_of_unknown_length_is_said() -> None:
    found = cost(PROGRAM.replace("constant(7)", "parameter(1)"))
    assert found.cycles == 100 + 10 + 1000
    assert found.caveats == ["while: a loop of unknown length, its body counted once"]
    said = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert cost(said).cycles == 100 + 5 * 10 + 1000 and not cost(said).caveats


INSIDE = """HloModule jit_f, is_scheduled=true

%c (a: f32[64,128], b: f32[64,128], k: f32[8,128]) -> (f32[64,128], f32[8,128]) {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %b = f32[64,128]{1,0:T(8,128)} parameter(1)
  %flat = f32[8192]{0:T(1024)} bitcast(%b)
  %few = f32[1024]{0:T(1024)} slice(%flat), slice={[0:1024]}
  %k = f32[8,128]{1,0:T(8,128)S(1)} parameter(2)
  %rows = f32[8,128]{1,0:T(8,128)} bitcast(%few)
  %sum = f32[8,128]{1,0:T(8,128)} add(%rows, %k)
  %zero = s32[] constant(0)
  %put = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%a, %sum, %zero, %zero)
  ROOT %both = (f32[64,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) tuple(%put, %sum)
}

ENTRY %main (x: f32[64,128], w: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0:T(8,128)} parameter(0)
  %w = f32[64,128]{1,0:T(8,128)} parameter(1)
  %v = f32[8,128]{1,0:T(8,128)S(1)} constant({...})
  %fusion = (f32[64,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}) fusion(%x, %w, %v), kind=kLoop, calls=%c
}
"""
EIGHT_ROWS = 8 * 128 * 4


def test_a_fusion_that_takes_a_part_and_puts_a_part_in_moves_those() -> None:
    assert cost(INSIDE).hbm_bytes == 2 * EIGHT_ROWS  # of w, and into x in place; the sum stays in VMEM
    whole = INSIDE.replace("add(%rows, %k)", "add(%rows, %k, %b)")
    assert cost(whole).hbm_bytes == (8 + 1) * EIGHT_ROWS, "all of w is read"
    made = INSIDE.replace("%a = f32[64,128]{1,0:T(8,128)} parameter(0)", "%a = f32[64,128]{1,0:T(8,128)} broadcast(%k)")
    assert cost(made).hbm_bytes == (1 + 8) * EIGHT_ROWS, "what is put in lies in what the fusion makes: all of it is written"


def test_a_fusion_inside_a_fusion() -> None:
    inner = "%d (p: f32[8192]) -> f32[1024] {\n  %p = f32[8192]{0:T(1024)} parameter(0)\n"
    inner += "  ROOT %s = f32[1024]{0:T(1024)} slice(%p), slice={[0:1024]}\n}\n\n%c ("
    nested = INSIDE.replace("slice(%flat), slice={[0:1024]}", "fusion(%flat), kind=kLoop, calls=%d").replace("%c (", inner, 1)
    assert cost(nested).hbm_bytes == cost(INSIDE).hbm_bytes


def test_parts_outside_of_a_fusion() -> None:
    text = INSIDE.replace("fusion(%x, %w, %v), kind=kLoop, calls=%c", "dynamic-update-slice(%x, %few, %v)")
    few = "  %few = f32[8,128]{1,0:T(8,128)} dynamic-slice(%w, %v), dynamic_slice_sizes={8,128}\n  %fusion"
    text = text.replace("%fusion = (f32[64,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)})", f"{few[2:]} = f32[64,128]{{1,0:T(8,128)}}")
    assert cost(text).hbm_bytes == 4 * EIGHT_ROWS  # eight rows read and written, read and put in


def test_without_estimates_the_bytes_remain() -> None:
    found = cost(PROGRAM.replace("bundle_analysis_data", "nothing"))
    assert found.cycles is None and found.hbm_bytes > 2 * X


# ---- what the estimate does not see of a kernel ------------------------------------------------------------------------


def kernel_of(body: Any, grid: tuple[int, ...] = (4,), index: Any = lambda i: (i, 0), rows: int = 32, **how: Any) -> Any:
    """The jaxpr of a kernel over x (rows, 128), blocks of 8 rows."""
    spec = pl.BlockSpec((8, 128), index)
    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((rows, 128), jnp.float32), grid=grid, in_specs=[spec], out_specs=spec, **how)
    return jax.make_jaxpr(call)(jax.ShapeDtypeStruct((rows, 128), jnp.float32))


def copy(x: Any, y: Any) -> None:
    y[...] = x[...]


def test_blocks_that_are_fetched_again() -> None:
    array = 32 * 128 * 4
    assert unseen(kernel_of(copy)) == unseen(kernel_of(copy, grid=(4, 3), index=lambda i, j: (i, 0)))
    assert unseen(kernel_of(copy)).reread_bytes == 0
    # x and y, each three times, of which one is counted anyway
    assert unseen(kernel_of(copy, grid=(3, 4), index=lambda j, i: (i, 0))).reread_bytes == 2 * 2 * array
    # the last block of 30 rows has 6
    assert unseen(kernel_of(copy, grid=(3, 4), index=lambda j, i: (i, 0), rows=30)).reread_bytes == 2 * 2 * 30 * 128 * 4


def nested(x: Any, y: Any) -> None:
    def outer(i: Any, total: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda j, t: t * 2.0 + x[...], total)

    y[...] = jax.lax.fori_loop(0, 30, outer, x[...])


def single(x: Any, y: Any) -> None:
    y[...] = jax.lax.fori_loop(0, 30, lambda i, t: t * 2.0, x[...])


def until(x: Any, y: Any) -> None:
    y[...] = jax.lax.while_loop(lambda t: t.max() < 5.0, lambda t: t * 2.0, x[...])


def branching(x: Any, y: Any) -> None:
    y[...] = jax.lax.cond(x[0, 0] > 0.0, lambda v: v * 2.0, lambda v: v, x[...])


def by_step(x: Any, y: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        y[...] = x[...]


@pytest.mark.parametrize(
    "body, said",
    [(copy, ""), (single, ""), (by_step, ""), (nested, "a loop in a loop"), (until, "a while loop"), (branching, "a branch on data")],
)
def test_control_flow_that_the_estimate_gets_wrong_is_said(body: Any, said: str) -> None:
    caveats = unseen(kernel_of(body)).caveats
    assert len(caveats) == bool(said) and all(c.startswith(said) for c in caveats)


def test_blocks_chosen_by_data_are_said() -> None:
    spec = pl.BlockSpec((8, 128), lambda i, order: (order[i], 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(4,), in_specs=[spec], out_specs=spec)
    call = pl.pallas_call(lambda order, x, y: copy(x, y), out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32), grid_spec=grid)
    found = unseen(jax.make_jaxpr(call)(jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((32, 128), jnp.float32)))
    assert found.reread_bytes == 0 and len(found.caveats) == 2
    assert all("prefetched scalars" in c for c in found.caveats)


# ---- through the compiler ----------------------------------------------------------------------------------------------


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def plain(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    f = x.astype(jnp.float32)
    return (f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + eps) * (weight + offset)).astype(x.dtype)


def test_a_kernel_and_a_jax_function() -> None:
    from kdk_kernels.rms_norm.pallas import forward

    op, case = OPERATORS["rms_norm"].op, Case("small", {"N": 1024, "H": 1024})
    floor = tpu.roofline(op, "forward", case, "bfloat16", "v6e")
    assert floor.bytes == 2 * 1024 * 1024 * 2 + 1024 * 2  # rstd, kept for a backward, is not the algorithm's
    assert floor.us == pytest.approx(floor.bytes / CHIPS["v6e"].bandwidth * 1e6)
    args = (meta(1024, 1024), meta(1024), 1e-5, 0.0)
    with Profiler() as profiler:
        kernel, xla = tpu.of_jax(profiler, forward, args, "v6e"), tpu.of_jax(profiler, plain, args, "v6e")
        refused = tpu.of_jax(profiler, forward, (meta(1024, 1024, dtype=torch.float16), meta(1024, dtype=torch.float16), 1e-5, 0.0), "v6e")
    for found in (kernel, xla):
        assert not found.why_not and found.cycles and found.hbm_bytes and found.us is not None and not found.stand_in
        chip = CHIPS["v6e"]
        assert found.us == pytest.approx(max(found.cycles / chip.clock, found.hbm_bytes / chip.bandwidth) * 1e6)
    assert kernel.hbm_bytes == pytest.approx(floor.bytes, rel=0.01) and kernel.caveats == ()
    assert kernel.us is not None and floor.us <= kernel.us * 1.001
    assert xla.hbm_bytes and xla.hbm_bytes > 1.4 * floor.bytes, "XLA reads x twice"
    assert refused.us is None and "Mosaic" in refused.why_not


def test_a_profiler_that_aborts_or_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    parked = Program(profile={"fusion.1": 70}, why_not="it cannot", aborted=True, but=("gather",))
    with Profiler() as profiler:
        profiler._parking.ask = lambda *_: parked  # type: ignore[method-assign]
        profiler._plain.ask = lambda *_: Program(PROGRAM.replace("bundle_analysis_data", "nothing"))  # type: ignore[method-assign]
        found = tpu.of_stablehlo(profiler, "", "v6e")
    assert found.at_least and found.cycles == 70
    assert found.caveats[-1] == "at least: the cycles lack those of gather, on which the profiler aborts: it cannot"
    with Profiler() as profiler:
        profiler._parking.ask = lambda *_: Program(aborted=True)  # type: ignore[method-assign]
        profiler._profiling.ask = lambda *_: Program(why_not="it aborted")  # type: ignore[method-assign]
        profiler._plain.ask = lambda *_: Program(PROGRAM.replace("bundle_analysis_data", "nothing"))  # type: ignore[method-assign]
        found = tpu.of_stablehlo(profiler, "", "v6e")
    assert found.cycles is None and found.bound == "" and found.us == pytest.approx(found.hbm_bytes / CHIPS["v6e"].bandwidth * 1e6)
    assert found.at_least and "HBM side alone, it takes at least that: the profiler gives no cycles: it aborted" in found.caveats
    with Profiler() as profiler:
        profiler._parking.ask = lambda *_: Program(aborted=True)  # type: ignore[method-assign]
        profiler._profiling.ask = lambda *_: Program(profile={"fusion.1": 100}, why_not="it aborted")  # type: ignore[method-assign]
        profiler._plain.ask = lambda *_: Program(PROGRAM.replace("bundle_analysis_data", "nothing"))  # type: ignore[method-assign]
        found = tpu.of_stablehlo(profiler, "", "v6e")
    assert found.at_least and found.cycles == 100 and "of what the profiler had done before it aborted" in found.caveats[-1]
    assert found.of_hbm.cycles is None and found.of_hbm.us == pytest.approx(found.hbm_bytes / CHIPS["v6e"].bandwidth * 1e6)
    with Profiler(limit=0.0) as profiler:
        assert "no end after 0 s" in tpu.of_stablehlo(profiler, "", "v6e").why_not
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for first in (False, True):  # it ends before it is asked, or whenever
        with Profiler() as profiler:
            if first:
                profiler._parking._start().wait()
                profiler._profiling._start().wait()
                profiler._plain._start().wait()
            found = tpu.of_stablehlo(profiler, "", "v6e")
        assert found.us is None and "the compiler's process ended with 1" in found.why_not


def on_the_cpu(text: str, x: jax.Array) -> list[jax.Array]:
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jaxlib.mlir import ir

    device = jax.local_devices(backend="cpu")[0]
    with mlir.make_ir_context():
        options = compiler.get_compile_options(1, 1)
        program = device.client.compile_and_load(ir.Module.parse(text), _jax.DeviceList((device,)), options)
    return [jnp.asarray(parts[0]) for parts in program.execute_sharded([x]).disassemble_into_single_device_arrays()]


def test_a_running_sum_is_expanded_and_other_scans_are_not() -> None:
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    def scan(combine: str, start: str, reverse: str) -> str:
        return f"""
          %start{reverse} = stablehlo.constant dense<{start}> : tensor<3xf32>
          %{reverse}:2 = chlo.scan(%x) inits (%start{reverse}) dimension=1 attributes
              {{is_associative = true, is_reverse = {reverse}, scan_dim_size = 5 : i64}} {{
            ^bb0(%input: tensor<3xf32>, %carry: tensor<3xf32>):
              %both = stablehlo.{combine} %input, %carry : tensor<3xf32>
              stablehlo.return %both, %both : tensor<3xf32>, tensor<3xf32>
          }} : (tensor<3x5xf32>, tensor<3xf32>) -> (tensor<3x5xf32>, tensor<3xf32>)"""

    results = "tensor<3x5xf32>, tensor<3xf32>"
    for combine, start, known in (("add", "0.0", True), ("multiply", "1.0", True), ("add", "1.0", False), ("maximum", "0.0", False)):
        text = f"""func.func public @main(%x: tensor<3x5xf32>) -> ({results}, {results}) {{
          {scan(combine, start, "true")} {scan(combine, start, "false")}
          return %true#0, %true#1, %false#0, %false#1 : {results}, {results}
        }}"""
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            scans.expand(module)
            assert module.operation.verify()
            expanded = str(module)
        assert ("chlo.scan" in expanded) is not known and bool(scans.said(expanded)) is known
        if known:
            x = jnp.arange(1.0, 16.0).reshape(3, 5)
            got = on_the_cpu(expanded, x)
            along = jnp.cumsum if combine == "add" else jnp.cumprod
            back = along(x[:, ::-1], 1)[:, ::-1]
            for found, wanted in zip(got, (back, back[:, 0], along(x, 1), along(x, 1)[:, -1]), strict=True):
                assert jnp.allclose(found, wanted)


def test_a_stand_in_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtpu, "where", lambda: None)
    monkeypatch.setattr(tpu, "of_jax", lambda *_: tpu.Estimate("v6e", 1.0, 1, 1))
    with Profiler() as profiler:
        alone = tpu.of_torch(profiler, OPERATORS["rms_norm"].op.reference, (), "v6e")
        found = tpu.of_torch(profiler, OPERATORS["rms_norm"].op.reference, (), "v6e", stand_in=plain)
    assert alone.us is None and "torch_tpu is not installed" in alone.why_not
    assert found.stand_in and "a stand-in in jax" in found.caveats[0] and "a stand-in" in tpu.say(found)


@pytest.mark.slow
@pytest.mark.skipif(torchtpu.missing() is not None, reason="torch_tpu is not here: make test-tpu installs it beside the environment")
def test_a_torch_function_through_torchtpu() -> None:
    op = OPERATORS["rms_norm"].op
    with Profiler() as profiler:
        found = tpu.of_torch(profiler, op.reference, (meta(1024, 1024), meta(1024), 1e-5, 0.0), "v6e")
    assert not found.why_not and found.cycles and found.hbm_bytes and not found.stand_in
    assert found.hbm_bytes > 1.4 * tpu.roofline(op, "forward", Case("small", {"N": 1024, "H": 1024}), "bfloat16", "v6e").bytes
