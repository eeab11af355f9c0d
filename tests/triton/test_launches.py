"""What kernels are made of, and what a launch refuses."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter as stock  # noqa: E402

from kdk.backends.triton.simulate import interpret, unique_bytes  # noqa: E402
from kdk.errors import SimulationError  # noqa: E402


@triton.jit
def square(x):
    return x * x


@triton.jit
def scaled_square(x, out, N, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = square(tl.load(x + at, mask=at < N, other=0.0))
    tl.store(out + at, value * scale, mask=at < N)


@triton.jit
def where_am_i(out, BLOCK: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + row * BLOCK + tl.arange(0, BLOCK), x * 100 + y * 10 + z + tl.zeros([BLOCK], tl.int32))


def test_grids_of_three_dimensions():
    out = torch.empty(2, 3, 4, 4, dtype=torch.int32)
    with interpret():
        where_am_i[(2, 3, 4)](out, BLOCK=4)
    x, y, z = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    assert torch.equal(out, (x * 100 + y * 10 + z).int()[..., None].expand(2, 3, 4, 4))


def test_a_callable_grid_sees_the_arguments():
    x, seen = torch.ones(40), {}

    def grid(meta):
        seen.update(meta)
        return (triton.cdiv(meta["x"].numel(), meta["BLOCK"]),)

    out = torch.empty_like(x)
    with interpret():
        scaled_square[grid](x, out, 40, 3.0, BLOCK=16)
    assert torch.equal(out, x * 3) and seen["N"] == 40 and seen["x"] is x


def test_a_grid_of_no_programs_does_nothing():
    out = torch.full((4,), 7, dtype=torch.int32)
    with interpret():
        where_am_i[(0,)](out, BLOCK=4)
        where_am_i[(3, 0)](out, BLOCK=4)
    assert out.tolist() == [7] * 4


@pytest.mark.parametrize("grid", [(1, 70000), (-1,), (), (1, 1, 1, 1), (1.5,)])
def test_grids_that_no_device_takes(grid):
    with interpret(), pytest.raises(SimulationError, match="KDK-TRITON-GRID"):
        where_am_i[grid](torch.empty(4, dtype=torch.int32), BLOCK=4)


def test_options_of_a_launch():
    x, out = torch.ones(16), torch.empty(16)
    with interpret():
        scaled_square[(1,)](x, out, 16, 1.0, BLOCK=16, num_warps=8, num_stages=2)
        with pytest.raises(KeyError, match="num_wraps"):
            scaled_square[(1,)](x, out, 16, 1.0, BLOCK=16, num_wraps=8)
        assert scaled_square.warmup(x, out, 16, 1.0, BLOCK=16, grid=(1,)) is None


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["N"])})
@triton.jit
def heuristic(x, out, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N) + 1, mask=at < N)


def test_heuristics():
    out = torch.empty(20)
    with interpret():
        heuristic[(1,)](torch.zeros(20), out, 20)
    assert torch.equal(out, torch.ones(20))


RUNS: list[int] = []


@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64}, num_warps=8)],
    key=["N"],
    pre_hook=lambda args, reset_only=False: None if reset_only else RUNS.append(args["BLOCK"]),
)
@triton.jit
def tuned(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N) + 1, mask=at < N)


def test_autotuning_runs_every_configuration_and_remembers_nothing():
    RUNS.clear()
    out = torch.empty(100)
    with interpret():
        tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](torch.zeros(100), out, 100)
    assert torch.equal(out, torch.ones(100))
    assert RUNS == [16, 64]
    assert not tuned.cache and "do_bench" not in vars(tuned)
    assert tuned.best_config.kwargs == {"BLOCK": 16}


@triton.jit
def uses_a_tuple(pointers, sizes, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(2):
        total += tl.load(pointers[i] + at, mask=at < sizes[i], other=0.0)
    tl.store(out + at, total)


def test_tuple_arguments():
    a, b, out = torch.randn(10), torch.randn(16), torch.empty(16)
    with interpret():
        uses_a_tuple[(1,)]((a, b), (10, 16), out, BLOCK=16)
    torch.testing.assert_close(out, torch.cat([a, torch.zeros(6)]) + b)


@triton.jit
def scalars(out, f, i, b, nothing, KIND: tl.constexpr):
    value = f.to(tl.float32) * 3.0
    if nothing is None:
        value += 1
    if b:
        value += i
    if KIND == "half":
        value = value / 2
    tl.store(out, value)


def test_python_numbers_are_32_bit_scalars():
    out = torch.empty(1)
    with interpret():
        scalars[(1,)](out, 0.1, 2, True, None, KIND="half")
    assert out.item() == (np.float32(0.1) * np.float32(3) + np.float32(3)) / np.float32(2)


@triton.jit
def control_flow(x, out, N):
    total = 0.0
    for i in range(N):
        value = tl.load(x + i)
        if value > 0:
            total += value
    n = 0
    while n < 3:
        n += 1
    tl.store(out, total + n)


def test_loops_and_branches_on_values():
    x, out = torch.tensor([1.0, -2.0, 3.0]), torch.empty(1)
    with interpret():
        control_flow[(1,)](x, out, 3)
    assert out.item() == 7.0


def test_kernels_that_close_over_names_of_a_function():
    FACTOR = tl.constexpr(5)

    @triton.jit
    def helper(x):
        return x * FACTOR

    @triton.jit
    def kernel(x, out):
        tl.store(out, helper(tl.load(x)))

    out = torch.empty(1)
    with interpret():
        kernel[(1,)](torch.ones(1), out)
    assert out.item() == 5.0


@triton.jit
def logic(x, out, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    both = (v > 1) and (v < 4)
    either = (v < 1) or (v > 4)
    neither = not either
    if LIMIT is not None and LIMIT > 3 and not (tl.program_id(0) > 0):
        neither = neither & (v < LIMIT)
    tl.store(out + at, both.to(tl.int32) + 2 * either.to(tl.int32) + 4 * neither.to(tl.int32))


def test_and_or_not_on_blocks():
    x, out = torch.arange(8), torch.empty(8, dtype=torch.int32)
    with interpret():
        logic[(1,)](x, out, LIMIT=None, BLOCK=8)
    both, either = (x > 1) & (x < 4), (x < 1) | (x > 4)
    assert torch.equal(out, (both.int() + 2 * either.int() + 4 * (~either).int()))
    with interpret():
        logic[(1,)](x, out, LIMIT=4, BLOCK=8)
    assert torch.equal(out, (both.int() + 2 * either.int() + 4 * (~either & (x < 4)).int()))


@triton.jit
def branch_on_a_block(x, BLOCK: tl.constexpr):
    if tl.load(x + tl.arange(0, BLOCK)) > 0:
        tl.store(x, 0.0)


def test_a_branch_on_a_block_is_refused():
    with interpret(), pytest.raises(SimulationError, match="KDK-TRITON-BRANCH"):
        branch_on_a_block[(1,)](torch.ones(4), BLOCK=4)


@triton.jit
def chained(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.where(2 <= at < 5, 1, 0))


def test_chained_comparisons_are_right_or_refused():
    out = torch.empty(8, dtype=torch.int32)
    with interpret():
        if hasattr(stock, "_InterpreterComparison"):
            chained[(1,)](out, out, BLOCK=8)
            assert out.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
        else:
            with pytest.raises(SimulationError, match="KDK-TRITON-SYNTAX"):
                chained[(1,)](out, out, BLOCK=8)


@triton.jit
def negate(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, not tl.load(x + at))


def test_bool_tensors():
    x = torch.tensor([True, False, True, True])
    out = torch.empty_like(x)
    with interpret():
        negate[(1,)](x, out, BLOCK=4)
    assert torch.equal(out, ~x)


@triton.jit
def widen(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(tl.float32))


def test_reinterpreted_tensors():
    x = torch.randn(16).to(torch.float8_e5m2)
    out = torch.empty(16)
    with interpret():
        widen[(1,)](triton.reinterpret(x.view(torch.uint8), tl.float8e5), out, BLOCK=16)
    assert torch.equal(out, x.float())


@triton.jit
def assembly(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x + at)], tl.int32, True, 1))


def test_inline_assembly_is_refused():
    with interpret(), pytest.raises(SimulationError, match="KDK-TRITON-ASM"):
        assembly[(1,)](torch.zeros(4, dtype=torch.int32), BLOCK=4)


@triton.jit
def through_descriptor(x, out, M, N: tl.constexpr, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, N])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK, N])
    row = tl.program_id(0) * BLOCK
    target.store([row, 0], source.load([row, 0]) * 2)


def test_tensor_descriptors():
    x, out = torch.randn(10, 16), torch.empty(10, 16)
    with interpret():
        through_descriptor[(2,)](x, out, 10, N=16, BLOCK=8)
    torch.testing.assert_close(out, x * 2)


@triton.jit
def host_descriptor(source, out, BLOCK: tl.constexpr):
    value = source.load([0, 0])
    at = tl.arange(0, BLOCK)
    tl.store(out + at[:, None] * BLOCK + at[None, :], value)


def test_descriptors_made_on_the_host():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = torch.randn(6, 16), torch.empty(16, 16)
    with interpret():
        host_descriptor[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), out, BLOCK=16)
    torch.testing.assert_close(out, torch.cat([x, torch.zeros(10, 16)]))


def test_errors_in_a_kernel_name_the_program_and_keep_their_type():
    @triton.jit
    def wrong(x):
        if tl.program_id(0) == 1:
            tl.arange(0, 3)

    with interpret(), pytest.raises(ValueError) as caught:
        wrong[(2,)](torch.empty(1))
    assert any("program (1, 0, 0) of wrong" in note for note in caught.value.__notes__)
    assert any(str(entry.path) == __file__ and entry.name == "_kdk_kernel" for entry in caught.traceback)


@triton.jit
def every_second_twice(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + 2 * at, mask=at < N, other=0.0) + tl.load(x + 2 * at, mask=at < N, other=0.0)
    tl.store(out + at, total, mask=at < N)


def test_unique_bytes_are_counted_by_address() -> None:
    """Half of an array, read twice, counts as half; of two launches each counts."""
    x, out = torch.ones(200), torch.empty(100)

    def launches(number: int) -> int:
        def run() -> None:
            for _ in range(number):
                every_second_twice[(4,)](x, out, 100, BLOCK=32)

        return unique_bytes(run, (), "sm_90")

    assert launches(1) == 2 * 100 * 4 and launches(2) == 4 * 100 * 4
