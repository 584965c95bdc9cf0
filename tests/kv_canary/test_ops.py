"""The scatter under torch.compile: one graph, the same cells, no copy of the pool."""

from typing import Any

import pytest
import torch

from kv_canary import GuardReport, launch_scatter_req_token_ids_kernel, ops
from ragged import RaggedTypeError

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
