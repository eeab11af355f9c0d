"""Every kind of memory fault, planted: it is caught with the argument's name; the correct twin passes."""

import pickle

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kdk.backends.triton.sanitizer import KernelMemoryError  # noqa: E402
from kdk.backends.triton.simulate import interpret  # noqa: E402
from kdk.errors import SimulationError  # noqa: E402


def fault(code, launch):
    with pytest.raises(KernelMemoryError) as caught, interpret():
        launch()
    assert caught.value.code == code
    assert caught.value.argument in str(caught.value) and str(caught.value.program) in str(caught.value)
    return caught.value


def passes(launch):
    with interpret():
        launch()


@triton.jit
def copy(x, out, N, stride, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(out + at, tl.load(x + at * stride, mask=at < N), mask=at < N)
    else:
        tl.store(out + at, tl.load(x + at * stride))


# Bounds


def test_load_past_the_end():
    x, out = torch.randn(100), torch.empty(128)
    error = fault("KDK-TRITON-BOUNDS", lambda: copy[(2,)](x, out, 100, 1, BLOCK=64, MASKED=False))
    assert (error.argument, error.offset, error.program) == ("x", 100, (1, 0, 0))
    assert "100 elements" in error.extent and "28 lanes" in str(error)
    passes(lambda: copy[(2,)](x, out, 100, 1, BLOCK=64, MASKED=True))
    assert torch.equal(out[:100], x)


def test_store_past_the_end():
    error = fault("KDK-TRITON-BOUNDS", lambda: copy[(2,)](torch.randn(128), torch.empty(100), 128, 1, BLOCK=64, MASKED=False))
    assert (error.argument, error.offset) == ("out", 100)


def test_the_error_survives_pickling_as_text():
    error = fault("KDK-TRITON-BOUNDS", lambda: copy[(2,)](torch.randn(128), torch.empty(100), 128, 1, BLOCK=64, MASKED=False))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@triton.jit
def before_the_start(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x - 1 + at))


def test_load_before_the_start():
    error = fault("KDK-TRITON-BOUNDS", lambda: before_the_start[(1,)](torch.randn(16), torch.empty(16), BLOCK=16))
    assert (error.argument, error.offset) == ("x", -1)


def test_neighbours_of_a_view_are_out_of_bounds():
    """The chunk lies inside a storage that has room before and behind it."""
    whole = torch.randn(96)
    chunk = whole[32:64]
    passes(lambda: copy[(1,)](chunk, torch.empty(32), 32, 1, BLOCK=32, MASKED=True))
    assert fault("KDK-TRITON-BOUNDS", lambda: copy[(1,)](chunk, torch.empty(64), 64, 1, BLOCK=64, MASKED=True)).offset == 32
    assert fault("KDK-TRITON-BOUNDS", lambda: before_the_start[(1,)](chunk, torch.empty(16), BLOCK=16)).offset == -1


@triton.jit
def copy_rows(x, out, stride, N, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * N + at, tl.load(x + row * stride + at, mask=at < N), mask=at < N)


def test_gaps_of_a_strided_view_are_out_of_bounds():
    """k of a fused qkv: between two of its rows lie v and q."""
    _, k, _ = torch.randn(8, 3 * 16).chunk(3, dim=1)
    out = torch.empty(8, 16)
    passes(lambda: copy_rows[(8,)](k, out, k.stride(0), 16, BLOCK=16))
    assert torch.equal(out, k)
    error = fault("KDK-TRITON-BOUNDS", lambda: copy_rows[(8,)](k, torch.empty(8, 20), k.stride(0), 20, BLOCK=32))
    assert (error.argument, error.offset) == ("x", 16)


def test_transposed_expanded_and_overlapping_views_are_readable():
    x = torch.randn(8, 16)
    out = torch.empty(16)
    passes(lambda: copy[(1,)](torch.randn(1).expand(16), out, 16, 0, BLOCK=16, MASKED=True))
    passes(lambda: copy_rows[(4,)](torch.randn(10).unfold(0, 4, 2), torch.empty(4, 4), 2, 4, BLOCK=4))
    passes(lambda: copy[(1,)](x[:, 3], torch.empty(8), 8, 16, BLOCK=8, MASKED=True))


@triton.jit
def copy_transposed(x, out, row, column, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.load(x + i * row + j * column))


def test_a_transposed_and_stepped_view():
    x = torch.randn(8, 16).t()[:, ::2]
    out = torch.empty(16, 4)
    passes(lambda: copy_transposed[(1,)](x, out, x.stride(0), x.stride(1), M=16, N=4))
    assert torch.equal(out, x)
    wrong = lambda: copy_transposed[(1,)](x, out, x.stride(0), x.stride(1) // 2, M=16, N=4)  # noqa: E731
    assert fault("KDK-TRITON-BOUNDS", wrong).offset == 16


@triton.jit
def either(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(tl.where(at % 2 == 0, x + at, y + at)))


def test_pointers_chosen_lane_by_lane():
    x, y, out = torch.randn(16), torch.randn(16), torch.empty(16)
    passes(lambda: either[(1,)](x, y, out, BLOCK=16))
    assert torch.equal(out, torch.where(torch.arange(16) % 2 == 0, x, y))
    with pytest.raises(KernelMemoryError, match="in no argument"), interpret():
        either[(1,)](x, torch.randn(9), torch.empty(16), BLOCK=16)


@triton.jit
def through_addresses(addresses, x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    source = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0) * BLOCK + at, tl.load(source + at))


def test_addresses_read_from_memory_must_lie_in_an_argument():
    x, stranger, out = torch.randn(2, 16), torch.randn(16), torch.empty(2, 16)
    addresses = torch.tensor([x[1].data_ptr(), x[0].data_ptr()])
    passes(lambda: through_addresses[(2,)](addresses, x, out, BLOCK=16))
    assert torch.equal(out, x.flip(0))
    with pytest.raises(KernelMemoryError, match="in no argument"), interpret():
        through_addresses[(1,)](torch.tensor([stranger.data_ptr()]), x, out, BLOCK=16)


def test_a_pointer_keeps_its_argument_across_another_tensor():
    """An offset that happens to reach a different argument is still outside its own."""
    storage = torch.randn(64)
    x, out = storage[:32], storage[32:]
    error = fault("KDK-TRITON-BOUNDS", lambda: copy[(1,)](x, out, 33, 1, BLOCK=64, MASKED=True))
    assert (error.argument, error.offset) == ("x", 32)


@triton.jit
def sum_pair(pointers, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(pointers[0] + at) + tl.load(pointers[1] + at))


def test_members_of_a_tuple_are_named():
    error = fault("KDK-TRITON-BOUNDS", lambda: sum_pair[(1,)]((torch.randn(16), torch.randn(15)), torch.empty(16), BLOCK=16))
    assert error.argument == "pointers[1]"


def test_an_empty_argument_has_no_elements():
    error = fault("KDK-TRITON-BOUNDS", lambda: copy[(1,)](torch.empty(0), torch.empty(16), 16, 1, BLOCK=16, MASKED=True))
    assert error.argument == "x"


# Races between programs


@triton.jit
def increment(x, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(x, 1.0)
    else:
        tl.store(x, tl.load(x) + 1)


def test_read_and_write_of_one_element():
    error = fault("KDK-TRITON-RACE", lambda: increment[(4,)](torch.zeros(1), ATOMIC=False))
    assert (error.argument, error.offset, error.program) == ("x", 0, (1, 0, 0)) and "program (0, 0, 0)" in str(error)
    x = torch.zeros(1)
    passes(lambda: increment[(4,)](x, ATOMIC=True))
    assert x.item() == 4
    passes(lambda: increment[(1,)](torch.zeros(1), ATOMIC=False))


@triton.jit
def write_blocks(out, STEP: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0) * STEP + tl.arange(0, BLOCK), tl.program_id(0) + tl.zeros([BLOCK], tl.int32))


def test_two_programs_write_one_element():
    out = torch.empty(64, dtype=torch.int32)
    error = fault("KDK-TRITON-RACE", lambda: write_blocks[(4,)](out, STEP=15, BLOCK=16))
    assert "write-write" in str(error) and (error.argument, error.offset) == ("out", 15)
    passes(lambda: write_blocks[(4,)](out, STEP=16, BLOCK=16))


@triton.jit
def shift_in_place(x, BACK: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at - BACK, mask=at >= BACK, other=0.0)
    tl.store(x + at, value)


def test_read_after_another_program_wrote():
    x = torch.randn(64)
    assert "read-write" in str(fault("KDK-TRITON-RACE", lambda: shift_in_place[(4,)](x, BACK=1, BLOCK=16)))
    passes(lambda: shift_in_place[(4,)](x, BACK=0, BLOCK=16))


@triton.jit
def read_next(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + 1, mask=at + 1 < N, other=0.0), mask=at < N)


def test_two_arguments_that_share_memory():
    """In place, a program overwrites what another one read before: seen although the pointers have different names."""
    x = torch.randn(64)
    error = fault("KDK-TRITON-RACE", lambda: read_next[(4,)](x, x, 64, BLOCK=16))
    assert (error.argument, error.offset) == ("out", 16) and "read" in str(error)
    passes(lambda: read_next[(4,)](x, torch.empty(64), 64, BLOCK=16))


@triton.jit
def total_then_read(x, total, out, BLOCK: tl.constexpr, READ: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if READ:
        tl.store(out + pid, tl.load(total))
    tl.atomic_add(total, tl.sum(tl.load(x + pid * BLOCK + at)))


def test_plain_read_of_an_atomic_sum():
    args = torch.ones(64), torch.zeros(1), torch.empty(4)
    error = fault("KDK-TRITON-RACE", lambda: total_then_read[(4,)](*args, BLOCK=16, READ=True))
    assert "atomic-plain" in str(error) and error.argument == "total"
    total = torch.zeros(1)
    passes(lambda: total_then_read[(4,)](args[0], total, args[2], BLOCK=16, READ=False))
    assert total.item() == 64


@triton.jit
def initialise_then_add(out, INITIALISE: tl.constexpr):
    if INITIALISE and tl.program_id(0) == 0:
        tl.store(out, 0.0)
    tl.atomic_add(out, 1.0)


def test_initialising_an_atomic_sum_in_the_kernel():
    assert "atomic-plain" in str(fault("KDK-TRITON-RACE", lambda: initialise_then_add[(2,)](torch.zeros(1), INITIALISE=True)))
    passes(lambda: initialise_then_add[(2,)](torch.zeros(1), INITIALISE=False))


@triton.jit
def last_one_sums(x, partial, counter, out, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    pid, n = tl.program_id(0), tl.num_programs(0)
    tl.store(partial + pid, tl.sum(tl.load(x + pid * BLOCK + tl.arange(0, BLOCK))))
    done = tl.atomic_add(counter, 1, sem=COUNT) if COUNT else pid
    if done == n - 1:
        tl.store(out, tl.sum(tl.load(partial + tl.arange(0, 4))))


def test_a_counter_orders_programs():
    """The last program to count reads the partial sums of the others: ordered by the counter, a race without it."""

    def launch(count):
        out = torch.empty(1)
        last_one_sums[(4,)](torch.ones(64), torch.empty(4), torch.zeros(1, dtype=torch.int32), out, BLOCK=16, COUNT=count)
        assert out.item() == 64

    passes(lambda: launch("acq_rel"))
    assert fault("KDK-TRITON-RACE", lambda: launch(None)).argument == "partial"
    assert fault("KDK-TRITON-RACE", lambda: launch("relaxed")).argument == "partial"


@triton.jit
def add_under_a_lock(x, lock, LOCKED: tl.constexpr):
    if LOCKED:
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
    tl.store(x, tl.load(x) + 1)
    if LOCKED:
        tl.atomic_xchg(lock, 0)


def test_a_lock_orders_programs():
    x, lock = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    passes(lambda: add_under_a_lock[(4,)](x, lock, LOCKED=True))
    assert x.item() == 4
    fault("KDK-TRITON-RACE", lambda: add_under_a_lock[(4,)](x, lock, LOCKED=False))


@triton.jit
def wait_for_the_last(flag, x):
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.atomic_xchg(flag, 1)
    while tl.atomic_cas(flag, 1, 1) == 0:
        pass


def test_waiting_for_a_later_program_is_reported():
    with pytest.raises(SimulationError, match="KDK-TRITON-DEADLOCK"), interpret():
        wait_for_the_last[(2,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    passes(lambda: wait_for_the_last[(1,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1)))


# Lanes


@triton.jit
def scatter(x, index, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.load(index + at), tl.load(x + at))


def test_lanes_of_one_store_collide():
    index = torch.tensor([0, 3, 2, 1, 3, 5, 6, 7])
    error = fault("KDK-TRITON-COLLISION", lambda: scatter[(1,)](torch.randn(8), index, torch.empty(8), BLOCK=8))
    assert (error.argument, error.offset) == ("out", 3)
    passes(lambda: scatter[(1,)](torch.randn(8), torch.randperm(8), torch.empty(8), BLOCK=8))


@triton.jit
def masked_sum(x, out, N, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if OTHER:
        tl.store(out, tl.sum(tl.load(x + at, mask=at < N, other=0)))
    else:
        tl.store(out, tl.sum(tl.load(x + at, mask=at < N)))


@pytest.mark.parametrize(
    "dtype, target",
    [
        (torch.float32, "sm_90"),
        (torch.bfloat16, "sm_90"),
        (torch.float16, "sm_90"),
        (torch.int32, "sm_90"),
        (torch.int64, "sm_90"),
    ],
)
def test_masked_lanes_without_other_are_undefined(dtype, target):
    x, out = torch.ones(10).to(dtype), torch.zeros(1, dtype=dtype)
    passes(lambda: masked_sum[(1,)](x, out, 10, OTHER=False, BLOCK=16))
    assert out.isnan().item() if dtype.is_floating_point else out.item() != 10
    passes(lambda: masked_sum[(1,)](x, out, 10, OTHER=True, BLOCK=16))
    assert out.item() == 10
    with interpret(sanitize=False):
        masked_sum[(1,)](x, out, 10, OTHER=False, BLOCK=16)
    assert out.item() == 10


# Index arithmetic


@triton.jit
def far_rows(x, out, stride, N, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * N + at, tl.load(x + row * stride + at, mask=at < N), mask=at < N)


def test_int32_offsets_that_wrap():
    """Three rows whose stride is 2^30: the third starts at 2^31, which an int32 does not hold."""
    x = torch.empty(2**31 + 8, dtype=torch.int8).as_strided((3, 8), (2**30, 1))
    x[:] = torch.arange(24, dtype=torch.int8).view(3, 8)
    out = torch.empty(3, 8, dtype=torch.int8)
    error = fault("KDK-TRITON-OVERFLOW", lambda: far_rows[(3,)](x, out, x.stride(0), 8, WIDE=False, BLOCK=8))
    assert (error.argument, error.program) == ("x", (2, 0, 0))
    passes(lambda: far_rows[(3,)](x, out, x.stride(0), 8, WIDE=True, BLOCK=8))
    assert torch.equal(out, x)


@triton.jit
def wraps_in_a_dead_lane(x, out, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    offset = at * (2**29)
    tl.store(out + at, tl.load(x + offset, mask=at < N, other=0.0), mask=at < N)


@triton.jit
def hash_index(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + ((at * 1103515245 + 12345) & 15)))


def test_wrapping_is_no_fault_where_no_access_uses_it():
    passes(lambda: wraps_in_a_dead_lane[(1,)](torch.randn(1), torch.empty(8), 1, BLOCK=8))
    passes(lambda: hash_index[(1,)](torch.randn(16), torch.empty(64), BLOCK=64))


# A kernel as people write them


@triton.jit
def matmul(
    a, b, c, M, N, K, a_row, b_row, c_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    i, j = tl.swizzle2d(tl.program_id(0) // columns, tl.program_id(0) % columns, rows, columns, GROUP)
    m, n, k = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    left, right = a + m[:, None] * a_row + k[None, :], b + k[:, None] * b_row + n[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inside = k < K - start if MASK_K else k < BK
        x = tl.load(left, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc)
        left += BK
        right += BK * b_row
    tl.store(c + m[:, None] * c_row + n[None, :], acc.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_tiled_matmul_and_its_missing_mask(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((50, 40), (40, 70)))
    c = torch.empty(50, 70, dtype=dtype)

    def launch(mask_k):
        sizes = {"BM": 16, "BN": 32, "BK": 16, "GROUP": 2, "MASK_K": mask_k}
        matmul[(4 * 3,)](a, b, c, 50, 70, 40, a.stride(0), b.stride(0), c.stride(0), **sizes)

    passes(lambda: launch(True))
    torch.testing.assert_close(c, (a.double() @ b.double()).to(dtype))
    assert fault("KDK-TRITON-BOUNDS", lambda: launch(False)).argument in ("a", "b")


# Switched off


def test_without_the_sanitizer_a_race_is_not_seen():
    x = torch.zeros(1)
    with interpret(sanitize=False):
        increment[(4,)](x, ATOMIC=False)
    assert x.item() == 4
