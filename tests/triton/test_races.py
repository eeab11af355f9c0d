"""Races between programs, colliding lanes, undefined lanes, planted: caught with the argument's name; twins pass."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from tests.triton.simulated import fault, passes  # noqa: E402

from kdk.backends.triton.simulate import interpret  # noqa: E402
from kdk.errors import SimulationError  # noqa: E402


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


# Switched off


def test_without_the_sanitizer_a_race_is_not_seen():
    x = torch.zeros(1)
    with interpret(sanitize=False):
        increment[(4,)](x, ATOMIC=False)
    assert x.item() == 4
