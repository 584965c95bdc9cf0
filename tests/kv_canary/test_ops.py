"""Scatter and verify under torch.compile: one graph, the same cells, the same violations, no copy of the pool."""

from typing import Any

import pytest
import torch

from kv_canary import GuardReport, TokenPool, ViolationLog, kinds, launch_scatter_req_token_ids_kernel, ops
from ragged import RaggedBatch, RaggedTypeError, RaggedValueError
from ragged.packing import Views

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(device: str, num_reqs: int = 3, num_tokens: int = 7) -> dict[str, torch.Tensor]:
    cuts = torch.arange(1, max(num_reqs, 1), dtype=torch.int64) * num_tokens // max(num_reqs, 1)
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([num_tokens])]) if num_reqs else torch.tensor([0])
    return {
        "flat_in": torch.arange(100, 100 + num_tokens, device=device),
        "offsets": ends.to(device),
        "req_pool_indices": torch.arange(num_reqs, device=device) + 1,
    }


def run(function: Any, given: dict[str, torch.Tensor], device: str, **more: Any) -> tuple[torch.Tensor, dict[str, int]]:
    """The memory around a pool that is a slice of it, and what the guards counted."""
    big = torch.full((12, 20), -7, dtype=torch.int32, device=device)
    report = GuardReport.allocate(device)
    function(**given, pool_out=big[1:11], report=report, **more)
    return big.cpu(), report.counts()


# Cases 42 and 60.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefixed", [False, True])
def test_compiled_code_writes_the_cells_that_eager_code_writes(device: str, prefixed: bool) -> None:
    given = inputs(device)
    given["req_pool_indices"][1] = 99  # contained, and reported
    more = {"prefix_lens": torch.tensor([1, 0, 2], device=device)} if prefixed else {}
    compiled = torch.compile(ops.scatter_req_token_ids, fullgraph=True, backend="aot_eager")
    eager = run(launch_scatter_req_token_ids_kernel, given, device, **more)
    result = run(compiled, given, device, **more)
    assert torch.equal(result[0], eager[0])
    assert result[1] == eager[1] == {"offsets": 0, "row": 1, "prefix": 0, "token": 0, "dropped": 0}


def test_the_operator_is_what_it_declares() -> None:
    for table in (None, GuardReport.allocate("cpu").table):
        pool = torch.full((5, 20), -7, dtype=torch.int32)
        torch.library.opcheck(torch.ops.kv_canary.scatter_req_token_ids, (*inputs("cpu").values(), None, pool, table))


def test_the_pool_is_written_in_place_under_the_compiler() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    run(torch.compile(ops.scatter_req_token_ids, fullgraph=True, backend=keep), inputs("cpu"), "cpu")
    [graph] = graphs
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert not [name for name in names if "clone" in name or "copy" in name]


# Case 61.
def test_a_second_round_of_the_same_sizes_compiles_nothing() -> None:
    compilations = 0

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(ops.scatter_req_token_ids, fullgraph=True, backend=counting, dynamic=True)
    sizes = [(3, 9), (1, 4), (1, 1), (0, 0), (2, 0), (3, 1), (7, 70)]
    for num_reqs, num_tokens in sizes:
        run(compiled, inputs("cpu", num_reqs, num_tokens), "cpu")
    first = compilations
    for num_reqs, num_tokens in sizes:
        given = inputs("cpu", num_reqs, num_tokens)
        eager = run(launch_scatter_req_token_ids_kernel, given, "cpu")
        assert torch.equal(run(compiled, given, "cpu")[0], eager[0])
    assert compilations == first


def test_the_checks_run_when_the_compiled_code_runs() -> None:
    given = inputs("cpu")
    given["offsets"] = given["offsets"].to(torch.int32)
    compiled = torch.compile(ops.scatter_req_token_ids, fullgraph=True, backend="aot_eager")
    with pytest.raises(RaggedTypeError, match=r"offsets must be int64, got torch\.int32"):
        run(compiled, given, "cpu")


REQUESTS = [(1, "a", [11, 12, 13]), (3, "b", [21, 22]), (2, "c", [])]


def pooled(device: str) -> tuple[TokenPool, dict[str, torch.Tensor]]:
    """A pool that holds REQUESTS, and the tensors that say so; they are slices, with a token behind the last offset."""
    pool = TokenPool.allocate(5, 8, device=device)
    pool.sync(REQUESTS)
    tokens = [token for _, _, seq in REQUESTS for token in seq]
    return pool, {
        "flat_in": torch.tensor([7, *tokens, 99], device=device)[1:],
        "offsets": torch.tensor([7, 0, 3, 5, 5], device=device)[1:],
        "req_pool_indices": torch.tensor([1, 3, 2], device=device),
        "prefix_lens": torch.zeros(3, dtype=torch.int64, device=device),
    }


def verified(function: Any, pool: TokenPool, given: dict[str, torch.Tensor], **more: Any) -> list[tuple[Any, ...]]:
    """Kind, request, row, column, expected and found of each violation."""
    log = ViolationLog.allocate(pool.tokens.device)
    function(**given, pool=pool, log=log, **more)
    return sorted((v.kind, v.request, v.row, v.column, v.expected, v.found) for v in log.drain())


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_finds_what_eager_code_finds(device: str) -> None:
    compiled = torch.compile(ops.verify_req_token_ids, fullgraph=True, backend="aot_eager")
    pool, given = pooled(device)
    assert verified(compiled, pool, given) == []
    pool.tokens[1, 1], pool.tokens[3, 0] = 77, -1  # another token; a placeholder, which is not compared
    pool.valid_lens[3], pool.valid_lens[2] = 1, 4
    found = [("length", 2, 2, 0, 0, 4), ("stale", 1, 3, 1, 22, 22), ("token", 0, 1, 1, 12, 77)]
    assert verified(compiled, pool, given) == found
    batch = RaggedBatch.from_sequences(
        [seq for _, _, seq in REQUESTS], req_pool_indices=[row for row, _, _ in REQUESTS], device=device
    )
    assert verified(lambda pool, log: pool.verify(batch, report=log), pool, {}) == found
    assert verified(compiled, pool, given, exact=False) == found[1:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "index", "value", "culprits"),
    [
        ("req_pool_indices", 0, 5, {0}),
        ("req_pool_indices", 1, -1, {1}),
        ("prefix_lens", 0, 9, {0}),
        ("prefix_lens", 1, -(2**62), {1}),
        ("offsets", 1, 2**40, {0, 1}),
        ("offsets", 0, -3, {0}),
        ("offsets", 2, 1, {1, 2}),
        ("prefix_lens", 0, 6, {0}),
    ],
)
def test_a_request_that_leads_outside_is_named_and_not_followed(
    device: str, name: str, index: int, value: int, culprits: set[int]
) -> None:
    pool, given = pooled(device)
    given[name][index] = value
    found = verified(ops.verify_req_token_ids, pool, given, exact=False)
    assert {request for kind, request, *_ in found if kind == "request"} == culprits - ({2} if value == 1 else set())


def test_verify_is_what_it_declares() -> None:
    pool, given = pooled("cpu")
    log = ViolationLog.allocate("cpu")
    operator = torch.ops.kv_canary.verify_req_token_ids
    torch.library.opcheck(operator, (*given.values(), pool.tokens, pool.valid_lens, log.table, True))


def test_what_verify_takes_is_checked_when_the_compiled_code_runs() -> None:
    compiled = torch.compile(ops.verify_req_token_ids, fullgraph=True, backend="aot_eager")
    pool, given = pooled("cpu")
    with pytest.raises(RaggedTypeError, match=r"^kv-canary: prefix_lens must be int64, got torch\.int32"):
        verified(compiled, pool, given | {"prefix_lens": torch.zeros(3, dtype=torch.int32)})
    with pytest.raises(RaggedValueError, match=r"^kv-canary: offsets length 3 != bs\+1 \(4\)"):
        verified(compiled, pool, given | {"offsets": given["offsets"][:3]})
    pool.valid_lens = pool.valid_lens[:-1]
    with pytest.raises(RaggedValueError, match=r"^kv-canary: valid_lens length 4 != max_reqs \(5\)"):
        verified(compiled, pool, given)


def test_what_is_no_log_is_refused_by_the_operator() -> None:
    pool, given = pooled("cpu")
    columns, verify = tuple(given.values()), torch.ops.kv_canary.verify_req_token_ids
    for rows, says in ((0, "log must have 2 rows at least, got 0"), (1, "log must have 2 rows at least, got 1")):
        with pytest.raises(RaggedValueError, match=f"^kv-canary: {says}"):
            verify(*columns, pool.tokens, pool.valid_lens, torch.zeros(rows, 8, dtype=torch.int64), True)
    with pytest.raises(RaggedValueError, match=r"^kv-canary: log must have 8 columns, got 7"):
        verify(*columns, pool.tokens, pool.valid_lens, torch.zeros(4, 7, dtype=torch.int64), True)
    memory = torch.zeros(40, dtype=torch.int64)
    for name in given:
        aliased = memory[8 : 8 + len(given[name])].copy_(given[name])
        with pytest.raises(RaggedValueError, match=f"^kv-canary: log shares memory with {name}"):
            verify(*(given | {name: aliased}).values(), pool.tokens, pool.valid_lens, memory.view(5, 8), True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_longer_than_a_row_is_a_violation_and_its_neighbours_are_compared(device: str) -> None:
    pool, given = pooled(device)
    long = [11, 12, 13, *range(2000)]
    given["flat_in"] = torch.tensor([*long, 21, 23], device=device)
    given["offsets"] = torch.tensor([0, len(long), len(long) + 2, len(long) + 2], device=device)
    found = [("request", 0, 1, 0, 0, len(long)), ("token", 1, 3, 1, 23, 22)]
    assert verified(ops.verify_req_token_ids, pool, given) == found


@pytest.mark.interpreter
@pytest.mark.parametrize("values", [[2, 0], [2, 2**40], [-1, 1], [5, 0], [2, 7]])
def test_the_kernel_finds_in_plain_tensors_what_torch_finds(values: list[int]) -> None:
    from kv_canary import torch_backend, triton_backend

    pool, given = pooled("cpu")
    pool.tokens[1, 2] = 77
    given["req_pool_indices"][2], given["prefix_lens"][1] = values[0], values[1]
    columns = (given["offsets"], given["req_pool_indices"], given["prefix_lens"])
    views, found = Views(*columns, torch.empty(0, 2, dtype=torch.int64), given["flat_in"]), []
    for backend in (torch_backend, triton_backend):
        log = ViolationLog.allocate("cpu")
        backend.verify_views(views, pool.tokens, pool.valid_lens, log.table, 0, True)
        found.append((int(log.table[0, kinds.NOT_COMPARED]), sorted(map(str, log.drain()))))
    assert found[0] == found[1]
    assert found[0][1]
