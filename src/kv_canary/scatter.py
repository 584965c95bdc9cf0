"""The guarded scatter: check, pick a backend, launch."""

from __future__ import annotations

from types import ModuleType

import torch

from kv_canary import backends
from kv_canary.guards import SCATTER, check_pool, check_scatter
from kv_canary.report import GuardReport
from kv_canary.snapshot import lasting_ids
from ragged import Mode, RaggedBatch, RaggedTypeError, RaggedValueError
from ragged.errors import refuses
from ragged.packing import static_tokens
from ragged.staging import current_stream


@refuses
def scatter(
    batch: RaggedBatch, pool: torch.Tensor, *, report: GuardReport | None = None, backend: str = "auto"
) -> None:
    """Write each request's tokens into its pool row, from column ``prefix_len`` on. Nothing else changes.

    For request r, with ``n = min(length, max_context_len - prefix_len)``:
    ``pool[row_r, prefix_len_r : prefix_len_r + n] = token_ids[offsets[r] : offsets[r] + n]`` as int32. A token that
    does not fit int32 is stored as -1 and counted.

    Args:
        batch: a RaggedBatch on the pool's device.
        pool: int32 ``[max_reqs, max_context_len]``, last stride 1, any row stride.
        report: counts what the device guards find; None contains without counting.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises: RaggedTypeError, RaggedValueError: the pool is not such a table or on another device; a row or a segment of
        the batch does not fit it (under the batch's overflow policy). Checked on the host, without a sync.
    """
    if not isinstance(batch, RaggedBatch):
        raise RaggedTypeError(f"{SCATTER}batch must be a RaggedBatch, got {type(batch).__name__}", argument="batch")
    if not isinstance(pool, torch.Tensor):
        _check_tensors({"pool_out": pool})
    scatter_checked(batch, pool, report=report, backend=backend)


def scatter_checked(
    batch: RaggedBatch,
    pool: torch.Tensor,
    *,
    report: GuardReport | None,
    backend: str,
    valid_lens: torch.Tensor | None = None,
) -> None:
    """``scatter`` of what is known to be a batch and a tensor.

    ``valid_lens``, int64 ``[max_reqs]`` on the pool's device, gets ``prefix_len + length``, at most
    ``max_context_len``, for each request's row, by the same launch.
    """
    check_pool(batch.packed, batch.device_tokens, pool)
    layout = batch.layout
    layout.check_pool(pool.shape)
    _check_report(report, pool)
    run = backends.resolve(backend, pool.device)
    asked = report is not None or valid_lens is not None  # of empty requests too
    if layout.bounds.capacity is not None and layout.num_reqs:
        _scatter_static(batch, pool, run, *_begin(report, pool, layout.num_tokens, layout.req_ids), valid_lens)
    elif layout.num_reqs and (asked or (layout.num_tokens and pool.numel())):
        run.scatter_batch(batch, pool, *_begin(report, pool, layout.num_tokens, layout.req_ids), valid_lens)
        if pool.is_cuda:
            keep_until_read(batch)


def _scatter_static(
    batch: RaggedBatch,
    pool: torch.Tensor,
    run: ModuleType,
    table: torch.Tensor | None,
    number: int,
    valid_lens: torch.Tensor | None,
) -> None:
    """A batch in buffers of fixed sizes: what is launched is the same whatever it holds, so that a CUDA graph of it can
    be replayed with the next one; how many requests and tokens there are is read on the device.
    """
    flat_in = static_tokens(batch.packed, batch.layout)
    columns = (batch.offsets, batch.req_pool_indices, batch.prefix_lens)
    run.scatter(flat_in, *columns, pool, table, number)
    if valid_lens is not None:
        run.set_valid_lens(batch, pool.shape[1], valid_lens)


@refuses
def launch_scatter_req_token_ids_kernel(
    *,
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    pool_out: torch.Tensor,
    prefix_lens: torch.Tensor | None = None,
    mode: Mode | str = Mode.STRICT,
    report: GuardReport | None = None,
    backend: str = "auto",
) -> None:
    """Drop-in for SGLang's launcher of this name: same keywords, checks, messages and silent truncation; no cap.

    Args:
        flat_in: int64 ``[num_tokens]``.
        offsets: int64 ``[bs + 1]``, CSR. Tokens beyond the last offset belong to nobody.
        req_pool_indices: int64 ``[bs]``. Where two requests share a row, which one a cell holds is not specified.
        pool_out: int32 ``[max_reqs, max_context_len]``, last stride 1, any row stride.
        prefix_lens: int64 ``[bs]``, the column at which each request starts; 0 where not given.
        mode: ``"coerce"`` converts inputs of another integer dtype, device or stride, and records it in the report.
        report: counts what the device guards find; without one they contain silently.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Values are the device guards' to check, and cost no sync: a request with a wrong row, prefix or offsets writes
    nothing, its neighbours are written exactly; a token that does not fit int32 is stored as -1.

    Raises: RaggedValueError, RaggedTypeError, from metadata alone.
    """
    given = {"flat_in": flat_in, "offsets": offsets, "req_pool_indices": req_pool_indices, "pool_out": pool_out}
    if prefix_lens is not None:
        given["prefix_lens"] = prefix_lens
    _check_tensors(given)
    arrays, coercions = check_scatter(given, Mode(mode))
    _check_report(report, pool_out)
    run = backends.resolve(backend, pool_out.device)
    if report is not None:
        report.coercions += coercions
    flat, rows = arrays["flat_in"], arrays["req_pool_indices"]
    # Nothing to write, nothing launched; but a report has requests without tokens checked too.
    if rows.shape[0] and (report is not None or (flat.shape[0] and pool_out.numel())):
        table, number = _begin(report, pool_out, flat.shape[0], None)
        run.scatter(flat, arrays["offsets"], rows, arrays.get("prefix_lens"), pool_out, table, number)


def keep_until_read(batch: RaggedBatch) -> None:
    """A batch that is dropped now frees no memory that this stream has still to read, whatever stream it was made on.

    Where the two are one, torch sees it and records nothing.
    """
    stream = current_stream(batch.packed.device)
    batch.packed.record_stream(stream)
    if batch.device_tokens is not None:
        batch.device_tokens.record_stream(stream)


def _check_tensors(arrays: dict[str, torch.Tensor]) -> None:
    for name, tensor in arrays.items():
        if not isinstance(tensor, torch.Tensor):
            raise RaggedTypeError(
                f"{SCATTER}{name} must be a tensor, got {type(tensor).__name__}",
                argument=name,
                got=type(tensor).__name__,
            )


def _check_report(report: GuardReport | None, pool: torch.Tensor) -> None:
    if report is None:
        return
    if not isinstance(report, GuardReport):
        raise RaggedTypeError(
            f"{SCATTER}report must be a GuardReport, got {type(report).__name__}",
            argument="report",
            got=type(report).__name__,
        )
    if report.device != pool.device:
        raise RaggedValueError(
            f"{SCATTER}report is on {report.device}, pool_out is on {pool.device}",
            argument="report",
            got=str(report.device),
            bound=str(pool.device),
        )


def _begin(
    report: GuardReport | None, pool: torch.Tensor, num_tokens: int, req_ids: tuple[object, ...] | None
) -> tuple[torch.Tensor | None, int]:
    """The report's table and the number of this launch in it."""
    if report is None:
        return None, 0
    return report.table, report.begin(lasting_ids(req_ids, pool.device), num_tokens, pool.shape)
