"""The drop-in: its messages in their order, what coerce mode converts, and a pool that a refusal leaves alone."""

from typing import Any

import pytest
import torch

from kv_canary import GuardReport, launch_scatter_req_token_ids_kernel
from ragged import Coercion, RaggedError, RaggedOverflowError, RaggedTypeError, RaggedValueError

SAYS = "kv-canary: scatter_req_token_ids "
INT64_HINT = "make it int64 where it is made, or pass mode='coerce'"


def _int64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _pool(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape or (4, 5), -7, dtype=dtype)


def _sound() -> dict[str, Any]:
    return {
        "flat_in": _int64([10, 11, 20]),
        "offsets": _int64([0, 2, 3]),
        "req_pool_indices": _int64([3, 1]),
        "pool_out": _pool(),
    }


# Case 26. Every argument starts out wrong in every way, and one fault after the other is mended.
MENDED_IN_ORDER = [
    (
        ValueError,
        "flat_in must be 1-D, got shape (2, 3)",
        {"argument": "flat_in", "got": (2, 3), "bound": 1},
        {"flat_in": torch.zeros(6)},
    ),
    (
        ValueError,
        "offsets must be 1-D, got shape (2, 2)",
        {"argument": "offsets", "got": (2, 2), "bound": 1},
        {"offsets": torch.zeros(4, dtype=torch.int32)},
    ),
    (
        ValueError,
        "req_pool_indices must be 1-D, got shape (1, 2)",
        {"argument": "req_pool_indices", "got": (1, 2), "bound": 1},
        {"req_pool_indices": torch.zeros(2, dtype=torch.int16)},
    ),
    (
        ValueError,
        "pool_out must be 2-D, got shape (20,)",
        {"argument": "pool_out", "got": (20,), "bound": 2},
        {"pool_out": _pool(4, 5, dtype=torch.int64)},
    ),
    (
        TypeError,
        "flat_in must be int64, got torch.float32",
        {"argument": "flat_in", "got": "torch.float32", "bound": "int64"},
        {"flat_in": _int64([0, 0, 0])},
    ),
    (
        TypeError,
        "offsets must be int64, got torch.int32",
        {"argument": "offsets", "got": "torch.int32", "bound": "int64"},
        {"offsets": _int64([0, 1, 2, 3])},
    ),
    (
        TypeError,
        "req_pool_indices must be int64, got torch.int16",
        {"argument": "req_pool_indices", "got": "torch.int16", "bound": "int64"},
        {"req_pool_indices": _int64([0, 1])},
    ),
    (
        TypeError,
        "pool_out must be int32, got torch.int64",
        {"argument": "pool_out", "got": "torch.int64", "bound": "int32"},
        {"pool_out": _pool(5, 4).t()},
    ),
    (
        ValueError,
        "offsets length 4 != bs+1 (3)",
        {"argument": "offsets", "got": 4, "bound": 3},
        {"offsets": torch.zeros(6, dtype=torch.int64)[::2]},
    ),
    (
        ValueError,
        "pool_out must have a last stride of 1 and a row stride of at least 5, got strides (1, 4)",
        {"argument": "pool_out", "got": (1, 4), "bound": (5, 1)},
        {"pool_out": _pool(), "flat_in": torch.zeros(3, dtype=torch.int64, device="meta")},
    ),
    (
        ValueError,
        "flat_in is on meta, pool_out is on cpu",
        {"argument": "flat_in", "got": "meta", "bound": "cpu"},
        {"flat_in": _int64([0, 0, 0])},
    ),
    (
        ValueError,
        "offsets must be contiguous, got strides (2,)",
        {"argument": "offsets", "got": (2,), "bound": (1,)},
        {"offsets": _int64([0, 1, 2])},
    ),
]


def test_the_messages_come_in_their_order_and_nothing_is_written() -> None:
    arguments = {
        "flat_in": torch.zeros(2, 3),
        "offsets": torch.zeros(2, 2, dtype=torch.int32),
        "req_pool_indices": torch.zeros(1, 2, dtype=torch.int16),
        "pool_out": _pool(20),
    }
    for kind, text, parts, mended in MENDED_IN_ORDER:
        with pytest.raises(kind) as caught:
            launch_scatter_req_token_ids_kernel(**arguments)
        error = caught.value
        assert isinstance(error, RaggedError)
        assert str(error) == SAYS + text
        assert {name: getattr(error, name) for name in parts} == parts
        assert (error.request, error.req_id) == (None, None)
        assert bool((arguments["pool_out"] == -7).all())
        arguments |= mended
    launch_scatter_req_token_ids_kernel(**arguments)


# What coerce mode cannot convert it refuses in the same order with the same words.
def test_coerce_mode_refuses_in_the_same_order() -> None:
    arguments = {
        "flat_in": torch.zeros(2, 3),
        "offsets": torch.zeros(2, 2, dtype=torch.bool),
        "req_pool_indices": torch.zeros(1, 2, dtype=torch.complex64),
        "pool_out": _pool(20),
    }
    steps = [
        ("flat_in must be 1-D, got shape (2, 3)", {"flat_in": torch.zeros(3)}),
        ("offsets must be 1-D, got shape (2, 2)", {"offsets": torch.zeros(4, dtype=torch.bool)}),
        (
            "req_pool_indices must be 1-D, got shape (1, 2)",
            {"req_pool_indices": torch.zeros(2, dtype=torch.complex64)},
        ),
        ("pool_out must be 2-D, got shape (20,)", {"pool_out": _pool(4, 5, dtype=torch.int64)}),
        ("flat_in must be int64, got torch.float32", {"flat_in": torch.zeros(3, dtype=torch.int32)}),
        ("offsets must be int64, got torch.bool", {"offsets": torch.zeros(4, dtype=torch.int32)}),
        ("req_pool_indices must be int64, got torch.complex64", {"req_pool_indices": torch.ones(2, dtype=torch.int32)}),
        ("pool_out must be int32, got torch.int64", {"pool_out": _pool()}),
        ("offsets length 4 != bs+1 (3)", {"offsets": torch.zeros(3, dtype=torch.int32)}),
    ]
    for text, mended in steps:
        report = GuardReport.allocate("cpu")
        with pytest.raises((RaggedValueError, RaggedTypeError)) as caught:
            launch_scatter_req_token_ids_kernel(**arguments, mode="coerce", report=report)
        assert str(caught.value) == SAYS + text
        assert bool((arguments["pool_out"] == -7).all())
        assert report.coercions == []  # a refused call leaves no trace
        arguments |= mended
    launch_scatter_req_token_ids_kernel(**arguments, mode="coerce")


# Case 26: a wrong dtype and, at once, a wrong dimension; for each of the four, alone.
@pytest.mark.parametrize("name", ["flat_in", "offsets", "req_pool_indices", "pool_out"])
def test_the_dimension_error_comes_before_the_dtype_error(refused: Any, name: str) -> None:
    arguments = _sound()
    ndim = arguments[name].ndim
    wrong = arguments[name].unsqueeze(0).to(torch.float32)
    shape = tuple(wrong.shape)
    with refused(
        RaggedValueError, f"{SAYS}{name} must be {ndim}-D, got shape {shape}", argument=name, got=shape, bound=ndim
    ):
        launch_scatter_req_token_ids_kernel(**arguments | {name: wrong})
    wanted = "int32" if name == "pool_out" else "int64"
    note = None if name == "pool_out" else INT64_HINT
    text = f"{SAYS}{name} must be {wanted}, got torch.float32"
    with refused(RaggedTypeError, text, argument=name, got="torch.float32", bound=wanted, note=note):
        launch_scatter_req_token_ids_kernel(**arguments | {name: arguments[name].to(torch.float32)})


def test_the_message_that_operators_search_for(refused: Any) -> None:
    with refused(
        RaggedTypeError,
        "kv-canary: scatter_req_token_ids offsets must be int64, got torch.int32",
        argument="offsets",
        got="torch.int32",
        bound="int64",
        note=INT64_HINT,
    ):
        launch_scatter_req_token_ids_kernel(**_sound() | {"offsets": _int64([0, 2, 3]).to(torch.int32)})


# Case 27.
@pytest.mark.parametrize("num_offsets", [0, 1, 2, 4])
def test_offsets_of_the_wrong_length_are_refused_with_both_numbers(refused: Any, num_offsets: int) -> None:
    arguments = _sound() | {"offsets": torch.zeros(num_offsets, dtype=torch.int64)}
    text = f"{SAYS}offsets length {num_offsets} != bs+1 (3)"
    with refused(RaggedValueError, text, argument="offsets", got=num_offsets, bound=3):
        launch_scatter_req_token_ids_kernel(**arguments)
    assert bool((arguments["pool_out"] == -7).all())


@pytest.mark.parametrize(
    ("prefix_lens", "kind", "text", "parts"),
    [
        pytest.param(
            torch.zeros(1, 2, dtype=torch.int64),
            RaggedValueError,
            "prefix_lens must be 1-D, got shape (1, 2)",
            {"got": (1, 2), "bound": 1},
            id="dimension",
        ),
        pytest.param(
            torch.zeros(2, dtype=torch.int32),
            RaggedTypeError,
            "prefix_lens must be int64, got torch.int32",
            {"got": "torch.int32", "bound": "int64"},
            id="dtype",
        ),
        pytest.param(
            torch.zeros(1, dtype=torch.int64),
            RaggedValueError,
            "prefix_lens length 1 != bs (2)",
            {"got": 1, "bound": 2},
            id="one_short",
        ),
        pytest.param(
            torch.zeros(4, dtype=torch.int64)[::2],
            RaggedValueError,
            "prefix_lens must be contiguous, got strides (2,)",
            {"got": (2,), "bound": (1,)},
            id="strided",
        ),
        pytest.param(
            torch.zeros(2, dtype=torch.int64, device="meta"),
            RaggedValueError,
            "prefix_lens is on meta, pool_out is on cpu",
            {"got": "meta", "bound": "cpu"},
            id="device",
        ),
    ],
)
def test_prefix_lens_are_held_to_the_same_rules(
    refused: Any, prefix_lens: torch.Tensor, kind: type[RaggedError], text: str, parts: dict[str, Any]
) -> None:
    arguments = _sound()
    with refused(kind, SAYS + text, argument="prefix_lens", **parts):
        launch_scatter_req_token_ids_kernel(**arguments, prefix_lens=prefix_lens)
    assert bool((arguments["pool_out"] == -7).all())


# Case 24: with nothing to do the checks still run.
def test_empty_inputs_are_checked_like_any_other(refused: Any) -> None:
    nothing = {"flat_in": _int64([]), "offsets": _int64([0]), "req_pool_indices": _int64([]), "pool_out": _pool()}
    launch_scatter_req_token_ids_kernel(**nothing)
    with refused(
        RaggedTypeError,
        SAYS + "offsets must be int64, got torch.int32",
        argument="offsets",
        got="torch.int32",
        bound="int64",
    ):
        launch_scatter_req_token_ids_kernel(**nothing | {"offsets": torch.zeros(1, dtype=torch.int32)})
    with refused(RaggedValueError, SAYS + "offsets length 0 != bs+1 (1)", argument="offsets", got=0, bound=1):
        launch_scatter_req_token_ids_kernel(**nothing | {"offsets": _int64([])})
    with refused(
        RaggedTypeError,
        SAYS + "report must be a GuardReport, got dict",
        argument="report",
        got="dict",
    ):
        launch_scatter_req_token_ids_kernel(**nothing, report={})
    with refused(
        RaggedValueError, "backend must be one of auto, triton, torch, got 'cuda'", argument="backend", got="cuda"
    ):
        launch_scatter_req_token_ids_kernel(**nothing, backend="cuda")


@pytest.mark.parametrize("name", ["flat_in", "offsets", "req_pool_indices", "pool_out", "prefix_lens"])
@pytest.mark.parametrize("mode", ["strict", "coerce"])
def test_what_is_no_tensor_is_refused_by_name(refused: Any, name: str, mode: str) -> None:
    with refused(RaggedTypeError, f"{SAYS}{name} must be a tensor, got list", argument=name, got="list"):
        launch_scatter_req_token_ids_kernel(**_sound() | {name: [0, 1]}, mode=mode)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("mode", ["strict", "coerce"])
@pytest.mark.parametrize(
    ("name", "make", "layout"),
    [
        pytest.param("flat_in", lambda: _int64([1, 2]).to_sparse(), "torch.sparse_coo", id="coo"),
        pytest.param("flat_in", lambda: _int64([1]).to_sparse(), "torch.sparse_coo", id="coo_of_one"),
        pytest.param("pool_out", lambda: _pool().to_sparse(), "torch.sparse_coo", id="coo_pool"),
        pytest.param("pool_out", lambda: _pool().to_sparse_csr(), "torch.sparse_csr", id="csr_pool"),
        pytest.param("flat_in", lambda: torch.nested.nested_tensor([[1.0, 2.0]]), "torch.nested", id="nested"),
        pytest.param(
            "pool_out",
            lambda: torch.nested.nested_tensor([[1.0]], layout=torch.jagged),
            "torch.jagged",
            id="jagged_pool",
        ),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_by_name(
    refused: Any, name: str, make: Any, layout: str, mode: str
) -> None:
    text = f"{SAYS}{name} must be a dense tensor, got layout {layout}"
    with refused(RaggedTypeError, text, argument=name, got=layout, bound="torch.strided"):
        launch_scatter_req_token_ids_kernel(**_sound() | {name: make()}, mode=mode)


# Case 37: a copy would swallow the write, so coerce mode does not help.
@pytest.mark.parametrize("mode", ["strict", "coerce"])
@pytest.mark.parametrize(
    ("pool", "strides"),
    [
        pytest.param(_pool(5, 4).t(), (1, 4), id="transposed"),
        pytest.param(_pool(1, 5).expand(4, 5), (0, 1), id="expanded_rows"),
        pytest.param(_pool(4, 1).expand(4, 5), (1, 0), id="expanded_columns"),
        pytest.param(_pool(4, 10)[:, ::2], (10, 2), id="every_second_column"),
        pytest.param(_pool(40).as_strided((4, 5), (3, 1)), (3, 1), id="overlapping_rows"),
    ],
)
def test_a_pool_whose_cells_are_not_its_own_is_refused_in_both_modes(
    refused: Any, pool: torch.Tensor, strides: tuple[int, int], mode: str
) -> None:
    with refused(
        RaggedValueError,
        f"{SAYS}pool_out must have a last stride of 1 and a row stride of at least 5, got strides {strides}",
        argument="pool_out",
        got=strides,
        bound=(5, 1),
        note="pass the table itself: a copy of pool_out would swallow the write",
    ):
        launch_scatter_req_token_ids_kernel(**_sound() | {"pool_out": pool}, mode=mode)
    assert bool((pool == -7).all())


# Case 37: one row or one column has no stride to be wrong.
def test_a_pool_of_one_row_or_one_column_may_have_any_stride_there() -> None:
    one_row = _pool(1, 5).expand(1, 5)
    arguments = {"flat_in": _int64([8]), "offsets": _int64([0, 1])}
    launch_scatter_req_token_ids_kernel(**arguments, req_pool_indices=_int64([0]), pool_out=one_row)
    assert one_row.tolist() == [[8, -7, -7, -7, -7]]
    whole = _pool(3, 4)
    launch_scatter_req_token_ids_kernel(**arguments, req_pool_indices=_int64([2]), pool_out=whole[:, 1::3])
    assert whole.tolist() == [[-7] * 4, [-7] * 4, [-7, 8, -7, -7]]


# Case 37: inputs that are columns of a table.
def test_coerce_mode_copies_strided_inputs_and_records_it() -> None:
    table = _int64([[10, 0, 1, 0], [11, 1, 0, 0], [12, 3, 9, 9]])
    flat, offsets, rows = table[:, 0], table[:, 1], table[:2, 2]
    prefix_lens = _int64([[0, 1], [0, 1]])[:, 0]
    pool, report = _pool(2, 4), GuardReport.allocate("cpu")
    arguments = {"flat_in": flat, "offsets": offsets, "req_pool_indices": rows, "prefix_lens": prefix_lens}
    with pytest.raises(RaggedValueError, match=r"flat_in must be contiguous, got strides \(4,\)"):
        launch_scatter_req_token_ids_kernel(**arguments, pool_out=pool)
    launch_scatter_req_token_ids_kernel(**arguments, pool_out=pool, mode="coerce", report=report)
    assert pool.tolist() == [[11, 12, -7, -7], [10, -7, -7, -7]]
    assert report.coercions == [
        Coercion("flat_in", "strided", "contiguous", 24),
        Coercion("offsets", "strided", "contiguous", 24),
        Coercion("req_pool_indices", "strided", "contiguous", 16),
        Coercion("prefix_lens", "strided", "contiguous", 16),
    ]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_coerce_mode_widens_every_integer_and_records_it(dtype: str) -> None:
    kind = getattr(torch, dtype)
    arguments = _sound()
    narrow = {name: arguments[name].to(kind) for name in ("flat_in", "offsets", "req_pool_indices")}
    report = GuardReport.allocate("cpu")
    launch_scatter_req_token_ids_kernel(**arguments | narrow, mode="coerce", report=report)
    assert arguments["pool_out"].tolist() == [[-7] * 5, [20, -7, -7, -7, -7], [-7] * 5, [10, 11, -7, -7, -7]]
    assert report.coercions == [
        Coercion("flat_in", dtype, "int64", 24),
        Coercion("offsets", dtype, "int64", 24),
        Coercion("req_pool_indices", dtype, "int64", 16),
    ]


def test_coerce_mode_converts_nothing_that_is_right_already() -> None:
    report = GuardReport.allocate("cpu")
    launch_scatter_req_token_ids_kernel(**_sound(), mode="coerce", report=report)
    assert report.coercions == []


@pytest.mark.parametrize(
    ("flat_in", "kind", "text", "parts"),
    [
        pytest.param(
            torch.tensor([1, 2**64 - 1, 3], dtype=torch.uint64),
            RaggedOverflowError,
            "flat_in must fit int64, got 18446744073709551615 at position 1",
            {"got": 2**64 - 1, "bound": 2**63 - 1},
            id="uint64_too_large",
        ),
        pytest.param(
            torch.zeros(3, dtype=torch.int64, device="meta"),
            RaggedValueError,
            "flat_in is on meta, which holds no data",
            {"got": "meta"},
            id="meta",
        ),
        pytest.param(
            torch.zeros(3, dtype=torch.bool),
            RaggedTypeError,
            "flat_in must be int64, got torch.bool",
            {"got": "torch.bool", "bound": "int64"},
            id="bool",
        ),
        pytest.param(
            torch.zeros(3, dtype=torch.float64),
            RaggedTypeError,
            "flat_in must be int64, got torch.float64",
            {"got": "torch.float64", "bound": "int64"},
            id="float",
        ),
    ],
)
def test_what_coerce_mode_refuses_starts_with_the_words_that_logs_are_searched_for(
    refused: Any, flat_in: torch.Tensor, kind: type[RaggedError], text: str, parts: dict[str, Any]
) -> None:
    arguments, report = _sound(), GuardReport.allocate("cpu")
    with refused(kind, SAYS + text, argument="flat_in", **parts):
        launch_scatter_req_token_ids_kernel(**arguments | {"flat_in": flat_in}, mode="coerce", report=report)
    assert bool((arguments["pool_out"] == -7).all())
    assert report.coercions == []


def test_a_call_refused_late_records_no_coercion() -> None:
    report = GuardReport.allocate("cpu")
    arguments = _sound() | {"flat_in": torch.ones(3, dtype=torch.int32)}
    with pytest.raises(RaggedValueError):
        launch_scatter_req_token_ids_kernel(**arguments, mode="coerce", report=report, backend="cuda")
    assert report.coercions == []


@pytest.mark.parametrize("name", ["flat_in", "offsets", "req_pool_indices", "prefix_lens"])
@pytest.mark.parametrize("mode", ["strict", "coerce"])
def test_an_input_inside_the_pool_is_refused(name: str, mode: str) -> None:
    pool = _pool(4, 6)
    inside = pool.flatten().view(torch.int64)[3:6]
    arguments = _sound() | {"pool_out": pool, "prefix_lens": _int64([0, 0])}
    length = arguments[name].shape[0]
    with pytest.raises(RaggedValueError) as caught:
        launch_scatter_req_token_ids_kernel(**arguments | {name: inside[:length]}, mode=mode)
    assert str(caught.value) == f"{SAYS}{name} shares memory with pool_out"
    assert caught.value.argument == name
    assert bool((pool == -7).all())


def test_an_input_beside_the_pool_in_the_same_memory_is_taken() -> None:
    memory = torch.full((13,), -7, dtype=torch.int64)
    memory[10:] = _int64([10, 11, 20])
    pool = memory[:10].view(torch.int32).view(4, 5)
    pool.fill_(-7)
    launch_scatter_req_token_ids_kernel(**_sound() | {"pool_out": pool, "flat_in": memory[10:]})
    assert pool[3].tolist() == [10, 11, -7, -7, -7]


@pytest.mark.parametrize("mode", ["lenient", None, 1])
def test_an_unknown_mode_is_refused(refused: Any, mode: Any) -> None:
    text = f"mode must be one of 'strict', 'coerce', got {mode!r}"
    with refused(RaggedValueError, text, argument="mode", got=mode, bound="'strict', 'coerce'"):
        launch_scatter_req_token_ids_kernel(**_sound(), mode=mode)


def test_arguments_go_by_name_only() -> None:
    with pytest.raises(TypeError):
        launch_scatter_req_token_ids_kernel(*_sound().values())  # type: ignore[call-arg, misc]


# Case 54: an error that is still held keeps nobody's memory.
def test_a_held_error_holds_no_tensor_of_the_callers() -> None:
    with pytest.raises(RaggedTypeError) as caught:
        launch_scatter_req_token_ids_kernel(**_sound() | {"flat_in": torch.zeros(3)})
    frame = caught.value.__traceback__
    names = []
    while frame is not None:
        names.append(frame.tb_frame.f_code.co_name)
        frame = frame.tb_next
    assert "check_scatter" not in names


# Case 68.
def test_two_spellings_of_one_device_are_one() -> None:
    arguments = _sound()
    report = GuardReport.allocate(torch.device("cpu", 0))
    moved = {name: tensor.to("cpu:0") for name, tensor in arguments.items()}
    launch_scatter_req_token_ids_kernel(**moved, report=report, mode="coerce")
    assert report.coercions == []
    assert report.device == torch.device("cpu")


def test_a_report_on_another_device_is_refused(refused: Any) -> None:
    report = GuardReport(torch.zeros(5, 5, dtype=torch.int64, device="meta"))
    arguments = _sound()
    text = f"{SAYS}report is on meta, pool_out is on cpu"
    with refused(RaggedValueError, text, argument="report", got="meta", bound="cpu"):
        launch_scatter_req_token_ids_kernel(**arguments, report=report)
    assert bool((arguments["pool_out"] == -7).all())


# Case 13.
@pytest.mark.gpu
def test_a_cpu_pool_with_tokens_on_the_device_is_refused_and_coerce_moves_them(refused: Any) -> None:
    arguments = _sound()
    device = torch.device("cuda", torch.cuda.current_device())
    for name in ("flat_in", "offsets", "req_pool_indices"):
        arguments[name] = arguments[name].to(device)
    text = f"{SAYS}flat_in is on {device}, pool_out is on cpu"
    with refused(RaggedValueError, text, argument="flat_in", got=str(device), bound="cpu"):
        launch_scatter_req_token_ids_kernel(**arguments)
    assert bool((arguments["pool_out"] == -7).all())
    report = GuardReport.allocate("cpu")
    launch_scatter_req_token_ids_kernel(**arguments, mode="coerce", report=report)
    assert arguments["pool_out"][1].tolist() == [20, -7, -7, -7, -7]
    assert report.coercions[0] == Coercion("flat_in", str(device), "cpu", 24)
    back = _sound() | {"pool_out": _pool().to(device)}
    launch_scatter_req_token_ids_kernel(**back, mode="coerce")
    assert back["pool_out"][3].tolist() == [10, 11, -7, -7, -7]
