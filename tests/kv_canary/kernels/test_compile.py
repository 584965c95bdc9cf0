"""Every kernel is compiled for a GPU, without one, and what was made of its integers is read in its IR."""

import math
import os
import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled under the interpreter", allow_module_level=True)
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
    pytest.skip("compiling without a GPU goes another way before triton 3.4", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import MockTensor, create_function_from_signature  # noqa: E402

from kv_canary.kernels import check_stamps as check_kernels  # noqa: E402
from kv_canary.kernels import scatter as kernels  # noqa: E402
from kv_canary.kernels import stamps as stamp_kernels  # noqa: E402
from kv_canary.kernels import verify as verify_kernels  # noqa: E402

VERIFY = {"LISTED": False, "EXACT": True, "REQUESTS": 16, "COLUMNS": 16, "WINDOW": 256}
STAMPS = {
    "LISTED": False,
    "PARTS": False,
    "SEEDED": True,
    "HAS_KV": True,
    "EXPECTED": True,
    "REQUESTS": 16,
    "COLUMNS": 16,
}
CHECKS = {"HAS_POOL": True, "HAS_KV": True, "EVERY": True, "BLOCK": 256, "TURNS": 4, "WINDOW": 256}
HOPPER = GPUTarget("cuda", 90, 32)
INT32_MAX = 2**31 - 1
VARIANTS = {
    "flat": (kernels.scatter_flat, {"HAS_PREFIX": True, "REPORT": False, "BLOCK": 512, "WINDOW": 512}),
    "flat-report": (kernels.scatter_flat, {"HAS_PREFIX": True, "REPORT": True, "BLOCK": 512, "WINDOW": 512}),
    "flat-no-prefix": (kernels.scatter_flat, {"HAS_PREFIX": False, "REPORT": True, "BLOCK": 128, "WINDOW": 128}),
    "tiles": (kernels.scatter_tiles, {"LISTED": False, "REPORT": True, "VALID": True, "REQUESTS": 16, "COLUMNS": 16}),
    "tiles-no-report": (
        kernels.scatter_tiles,
        {"LISTED": False, "REPORT": False, "VALID": False, "REQUESTS": 1, "COLUMNS": 1024},
    ),
    "listed": (kernels.scatter_tiles, {"LISTED": True, "REPORT": True, "VALID": False, "REQUESTS": 1, "COLUMNS": 1024}),
    "verify": (verify_kernels.verify_tiles, VERIFY),
    "verify-listed": (verify_kernels.verify_tiles, VERIFY | {"LISTED": True, "EXACT": False, "REQUESTS": 1}),
    "stamps": (stamp_kernels.write_stamps, STAMPS),
    "stamps-parts": (
        stamp_kernels.write_stamps,
        STAMPS | {"LISTED": True, "PARTS": True, "SEEDED": False, "HAS_KV": False, "EXPECTED": False, "REQUESTS": 1},
    ),
    "stamps-sums": (stamp_kernels.sum_tiles, {"LISTED": False, "REQUESTS": 1, "COLUMNS": 1024}),
    "hash-kv": (stamp_kernels.hash_kv, {"PAGE_SIZE": 48, "ROTATES": True, "TOKENS": 16, "TURNS": 4}),
    "plan": (check_kernels.plan_checks, {"BLOCK": 1024}),
    "gather": (check_kernels.gather_slots, {"BLOCK": 256, "WINDOW": 256}),
    "check": (check_kernels.check_requests, CHECKS),
    "check-plain": (check_kernels.check_requests, CHECKS | {"HAS_POOL": False, "HAS_KV": False, "EVERY": False}),
    "sweep": (check_kernels.check_triples, {"HAS_KV": True, "BLOCK": 256}),
    "valid-lens": (verify_kernels.set_valid_lens, {"BLOCK": 256}),
}


def specialised(kernel: Any, constants: dict[str, Any], size: int) -> dict[str, Any]:
    """What a JIT launch with every size equal to ``size`` selects a compiled kernel by: argument -> type."""
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(HOPPER))
    given = []
    for name in kernel.arg_names:
        pointee = torch.int32 if name == "pool_ptr" else torch.int64
        given.append(MockTensor(pointee) if name.endswith("_ptr") else constants.get(name, size))
    return dict(zip(kernel.arg_names, (kind[0] for kind in bind(*given)[1]), strict=True))


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...] = ()) -> Any:
    at = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature,
        {at[name]: value for name, value in constants.items()},
        {at[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=HOPPER)


class Values:
    """The SSA values of a TTIR text, read from the top (regions reuse names), and how large 32-bit ones can become."""

    def __init__(self, ttir: str) -> None:
        self.lines = [re.sub(r" loc\(.*", "", line).strip() for line in ttir.splitlines()]
        self.overflowing: list[str] = []
        """Lines that widen a 32-bit number, or step a pointer by one, that may have wrapped before."""
        self._bounds: dict[str, int] = {}
        self._truths: dict[str, int] = {}  # 0 or 1 for each of so many elements
        for line in self.lines:
            self._read(line)

    def _read(self, line: str) -> None:
        assigned = re.match(r"(%[^\s:,]+)(?::\d+)? = (\S+?)[ (](.*)", line)
        if assigned is None:
            return
        name, operation, rest = assigned.groups()
        operands = re.findall(r"%[^\s,():]+", rest)
        narrow = (
            re.search(r"i32\W* to ", rest)
            if operation == "arith.extsi"
            else operation == "tt.addptr" and re.search(r"i32>?$", rest)
        )
        if narrow and self._bounds.get(operands[-1], INT32_MAX) > INT32_MAX:
            self.overflowing.append(line)
        self._bounds[name] = self._bound(operation, rest, operands)
        if operation == "arith.extui" and re.search(r"xi1\W* to ", rest):
            self._truths[name] = math.prod(map(int, re.findall(r"(\d+)x", rest.rpartition(" to ")[2])))
        else:
            self._truths.pop(name, None)

    def _bound(self, operation: str, rest: str, operands: list[str]) -> int:
        """No larger in absolute value. What is loaded, given, or the program's id may be any int32."""
        of = [self._bounds.get(operand, INT32_MAX) for operand in operands]
        if operation == "arith.constant":
            number = re.match(r"(?:dense<)?(-?\d+)", rest)
            return abs(int(number[1])) if number else INT32_MAX
        if operation == "tt.make_range":
            return max(map(int, re.findall(r"end = (\d+)", rest)))
        if operation == '"tt.reduce"':
            return self._truths.get(operands[0], INT32_MAX)
        if operation in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            return of[0]
        if operation in ("arith.addi", "arith.subi"):
            return of[0] + of[1]
        if operation == "arith.muli":
            return of[0] * of[1]
        return INT32_MAX


# Cases 3, 4, 35, 50, 56: one widening of the index is enough, and none is too late.
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_32_bit_product_or_sum_reaches_an_address(variant: str) -> None:
    kernel, constants = VARIANTS[variant]
    values = Values(compiled(kernel, specialised(kernel, constants, 5), constants).asm["ttir"])
    steps = [line for line in values.lines if "tt.addptr" in line]
    assert len(steps) >= 4
    assert values.overflowing == []
    # A cell of the pool is found by 64 bits in every place.
    into_pool = [line for line in steps if re.search(r": (?:tensor<\S*)?!tt\.ptr<i32>", line)]
    has_pool = "pool_ptr" in kernel.arg_names and constants.get("HAS_POOL", True)
    assert bool(into_pool) == has_pool and all(re.search(r"i64>?$", line) for line in into_pool)


@triton.jit
def _narrow_product(pool_ptr, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(pool_ptr + row * stride + tl.arange(0, BLOCK), 1)


@triton.jit
def _late_widening(pool_ptr, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start = (tl.program_id(0) * stride).to(tl.int64)
    tl.store(pool_ptr + start + tl.arange(0, BLOCK), 1)


@triton.jit
def _late_widening_of_a_sum(pool_ptr, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = (stride + tl.arange(0, BLOCK)).to(tl.int64)
    tl.store(pool_ptr + column, 1)


@triton.jit
def _widened_once(pool_ptr, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    tl.store(pool_ptr + row * stride + tl.arange(0, BLOCK), 1)


# Case 4: the check above fails where the cast is missing, and tells `pid * stride` from the widened form.
@pytest.mark.parametrize(
    ("kernel", "overflows"),
    [(_narrow_product, True), (_late_widening, True), (_late_widening_of_a_sum, True), (_widened_once, False)],
    ids=["narrow_product", "late_widening", "late_widening_of_a_sum", "widened_once"],
)
def test_the_reading_of_the_ir_sees_a_missing_cast(kernel: Any, overflows: bool) -> None:
    signature = {"pool_ptr": "*i32", "stride": "i32", "BLOCK": "constexpr"}
    values = Values(compiled(kernel, signature, {"BLOCK": 128}).asm["ttir"])
    assert bool(values.overflowing) == overflows


# Cases 14, 35, 56, 58: sizes are 64 bits and select no variant, 1 among them: it would become a constant.
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_size_selects_a_variant_and_1_compiles(variant: str) -> None:
    kernel, constants = VARIANTS[variant]
    sizes = [name for name in kernel.arg_names if not name.endswith("_ptr") and name not in constants]
    known = (kernels, verify_kernels, stamp_kernels, check_kernels)
    assert set(sizes) <= {"column_tiles", *stamp_kernels.KV_SIZES}.union(*(module.SIZES for module in known))
    seen = [specialised(kernel, constants, size) for size in (0, 1, 2, 3, 16, 17, 512, 2**20 + 1, 2**31, 2**40)]
    assert all(kinds == seen[0] for kinds in seen)
    assert {seen[0][name] for name in sizes} == {"i64"}
    assert compiled(kernel, specialised(kernel, constants, 1), constants).asm["ptx"]


# Case 58: `tl.arange` ends at 2^20, so no constant may follow the batch.
def test_no_constant_follows_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_canary import launching, triton_backend

    seen: set[tuple[Any, ...]] = set()

    def note(kernel: Any, *arguments: Any, **more: Any) -> None:
        seen.add(next(a for a in reversed(arguments) if isinstance(a, tuple)))

    monkeypatch.setattr(launching, "launch", note)
    few = None
    for num_reqs in (1, 2, 3, 16, 17, 511, 512, 513, 5000, 2**20, 2**20 + 1):
        zeros = torch.zeros(num_reqs + 1, dtype=torch.int64, device="cpu")
        pool = torch.zeros((2, 2), dtype=torch.int32, device="cpu")
        triton_backend.scatter(zeros[:num_reqs], zeros, zeros[:num_reqs], None, pool, None, 0)
        few = few or set(seen)
    assert len(seen) <= 3
    for constants in seen:
        assert all(value <= 4096 for value in constants)
