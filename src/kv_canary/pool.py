"""TokenPool: the resident token table and what each row of it validly holds; only what changed is sent."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from kv_canary.changes import Requests, Sent
from kv_canary.guards import POOL, table
from kv_canary.kinds import PADDING_ROW, UNWRITTEN
from kv_canary.report import GuardReport
from kv_canary.rows import Rows, refuse
from kv_canary.scatter import scatter_checked
from kv_canary.verify import verify_batch
from kv_canary.violations import Violation, ViolationLog
from ragged import Bounds, Mode, RaggedBatch, RaggedBatchBuilder, RaggedTypeError, RaggedValueError, WideTokens
from ragged.convert import Converter, Int64Array
from ragged.errors import refuses
from ragged.integers import as_int
from ragged.rules import HasLength, apply
from ragged.staging import resolve_device

TAIL = 16
"""Known tokens of each row that ``sync`` compares by default."""


class TokenOptions(TypedDict, total=False):
    """How ``sync`` takes tokens; as in ``ragged.assembly.BatchOptions``."""

    mode: Mode | str
    vocab_size: int | None
    allow_placeholders: bool
    wide_tokens: WideTokens | str


class PoolOptions(TokenOptions, total=False):
    """The keywords that ``allocate`` and ``adopt`` share, besides TokenOptions.

    padding_row: a row that holds nothing, where CUDA-graph padding points, 0 by default; None where there is none.
    tail: how many of a row's last tokens the host keeps, for ``sync`` to compare; None for all.
    backend: ``"auto"`` (default), ``"triton"`` or ``"torch"``.
    """

    padding_row: int | None
    tail: int | None
    backend: str


class TokenPool:
    """Each request's tokens in its row of an int32 table on the device, and each row's valid length.

    >>> pool = TokenPool.allocate(4, 8, device="cpu")
    >>> chat, other = [11, 12, 13], [21]
    >>> pool.sync([(1, "chat", chat), (3, "other", other), (2, "empty", [])]).num_tokens
    4
    >>> chat.append(14)
    >>> pool.sync([(1, "chat", chat), (3, "other", other)]).num_tokens
    1
    >>> pool.tokens[1].tolist(), pool.valid_lens.tolist()
    ([11, 12, 13, 14, -2, -2, -2, -2], [0, 4, 0, 1])
    >>> pool.verify([(1, "chat", chat), (3, "other", other)]).drain()
    []

    What lies at or beyond a row's valid length is never read or compared. A call that refuses its
    input changes nothing, neither here nor on the device. Nothing waits for the device; what a call does there runs in
    order on the current stream of its device, and all calls on one pool must use one stream.

    Attributes:
        tokens: int32 ``[max_reqs, max_context_len]``.
        valid_lens: int64 ``[max_reqs]``, on the device.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        *,
        padding_row: int | None = PADDING_ROW,
        tail: int | None = TAIL,
        backend: str = "auto",
        **options: Unpack[TokenOptions],
    ) -> None:
        shape = (int(tokens.shape[0]), int(tokens.shape[1]))
        device = tokens.device
        self._backend = backend
        self._bounds = Bounds(shape, padding_row=padding_row)
        self._builder = RaggedBatchBuilder(device=device, pool_shape=shape, padding_row=padding_row, **options)
        self._lenient = RaggedBatchBuilder(
            device=device, pool_shape=shape, padding_row=padding_row, allow_placeholders=True, wide_tokens="opaque"
        )
        self._rows = Rows(self._bounds, None if tail is None else as_int(tail, "tail", least=1))
        self.tokens = tokens
        with torch.inference_mode(False):
            self.valid_lens = torch.zeros(shape[0], dtype=torch.int64, device=device)

    @classmethod
    @refuses
    def allocate(
        cls, max_reqs: int, max_context_len: int, *, device: torch.device | str, **options: Unpack[PoolOptions]
    ) -> TokenPool:
        """A pool of its own memory, filled with ``kinds.UNWRITTEN``. Keywords: PoolOptions."""
        shape = (as_int(max_reqs, "max_reqs", least=0), as_int(max_context_len, "max_context_len", least=0))
        with torch.inference_mode(False):
            tokens = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=resolve_device(device))
        return cls(tokens, **options)

    @classmethod
    @refuses
    def adopt(cls, tokens: torch.Tensor, **options: Unpack[PoolOptions]) -> TokenPool:
        """A pool over an engine's own table, which is neither copied nor filled; every row starts empty.

        Args:
            tokens: int32 ``[max_reqs, max_context_len]``, last stride 1, any row stride.
            options: PoolOptions.

        Raises: RaggedTypeError, RaggedValueError: ``tokens`` is no such table.
        """
        if not isinstance(tokens, torch.Tensor):
            got = type(tokens).__name__
            raise RaggedTypeError(f"{POOL}tokens must be a tensor, got {got}", argument="tokens", got=got)
        apply(table("tokens"), {"tokens": tokens}, where=POOL)
        return cls(tokens, **options)

    @staticmethod
    def allocation_bytes(max_reqs: int, max_context_len: int) -> int:
        """Device memory of an allocated pool."""
        return 4 * max_reqs * max_context_len + 8 * max_reqs

    @property
    def host_valid_lens(self) -> Int64Array:
        """int64 ``[max_reqs]``: what ``valid_lens`` is once the device is done. A read-only view."""
        view = self._rows.lens.view()
        view.setflags(write=False)
        return view

    @refuses
    def write(self, batch: RaggedBatch, *, report: GuardReport | None = None) -> None:
        """Each request's row becomes exactly its tokens, whatever it held.

        Args:
            batch: on the pool's device, every prefix 0.
            report: counts what the device guards find, as for ``scatter``.

        Raises: RaggedTypeError, RaggedValueError: no such batch, or one that does not fit the pool.
        """
        self._put(batch, report, fresh=True)

    @refuses
    def append(self, batch: RaggedBatch, *, report: GuardReport | None = None) -> None:
        """Each request's tokens are put behind what its row holds.

        Args:
            batch: on the pool's device, every prefix the valid length of its row.
            report: counts what the device guards find, as for ``scatter``.

        Raises: RaggedTypeError, RaggedValueError: no such batch; one that does not fit the pool; a ``prefix_len`` that
            is not its row's valid length, with both numbers.
        """
        self._put(batch, report, fresh=False)

    @refuses
    def sync(self, requests: Any, *, report: GuardReport | None = None) -> Sent:
        """Make the rows hold the requests' tokens, and send only what they do not hold yet. Once a scheduler step.

        Args:
            requests: ``(row, req_id, token sequence)`` of every running request. Sequences are the caller's own and may
                grow or change between calls; lists are fastest, in the same tuples as a step ago. The pool holds on to
                them until the next call. An id says whose a row is, so that a row that another request has taken over
                is sent whole.
            report: counts what the device guards find, as for ``scatter``.

        A sequence that became shorter is truncated. One whose known part was rewritten is found by comparing the last
        ``tail`` tokens that its row held, and sent whole; so is one that is cut deeper than that, for nothing is left
        to compare. **What this cannot see**: a change further back that leaves the tail as it was. The row then keeps
        the old tokens, until ``verify`` names them; ``tail=None`` compares everything, at its price. After ``truncate``
        and ``fork`` the host knows so many last tokens less, until the next ``sync``.

        Rows that are not named keep what they hold; ``release`` frees them.

        Raises: RaggedTypeError, RaggedValueError, RaggedOverflowError: names the request by position and id.
        """
        asked, rows = self._rows.asked(requests)
        if not asked.rows:
            return Sent()
        lens = asked.lens()
        known = self._rows.known(asked, rows, lens)
        sent = Sent()
        if known.changed or known.held.tobytes() != lens.tobytes():
            batch = _build(self._builder, rows, asked.behind(known.kept, lens, known.last), known.kept, asked.req_ids)
            self._launch(batch, report)
            whole: Any = (known.kept == 0) & (known.held > 0) & (lens > 0) if known.changed else ()
            sent = Sent(batch.num_tokens, batch.packed.nbytes, int(np.count_nonzero(whole)))
        self._rows.hold(asked, rows, known, lens)
        return sent

    @refuses
    def truncate(self, rows: Any, lens: Any) -> None:
        """Each row keeps only its first tokens: a speculation that was rejected, a retraction.

        Args:
            rows: int64 ``[n]`` on the host, each once.
            lens: int64 ``[n]``, at most what the row holds.
        """
        rows = self._rows.checked(rows)
        lens = Converter(Mode.STRICT).host(lens, "lens")
        apply([HasLength("lens", "number of rows", lambda _: len(rows))], {"lens": lens}, where=POOL)
        held = self._rows.lens[rows]
        wrong = (lens < 0) | (lens > held)
        if wrong.any():
            i = int(wrong.argmax())
            raise refuse("lens", f"must be in [0, {held[i]}], the valid_len of row {rows[i]}", lens[i], held[i], i)
        self._end_at(rows, lens)
        self._rows.cut(rows, lens)

    @refuses
    def release(self, rows: Any) -> None:
        """Each row, int64 ``[n]`` on the host, each once, is free: nothing of it is ever read or compared again."""
        rows = self._rows.checked(rows)
        self._end_at(rows, np.zeros_like(rows))
        self._rows.free(rows)

    @refuses
    def fork(self, src_row: int, dst_row: int, length: int) -> None:
        """A row becomes the first ``length`` tokens of another, copied on the device: a shared prompt, a beam."""
        src_row, dst_row = as_int(src_row, "src_row", least=0), as_int(dst_row, "dst_row", least=0)
        length = as_int(length, "length", least=0)
        if src_row == dst_row:
            says = f"dst_row must not be src_row {src_row}"
            raise RaggedValueError(says, argument="dst_row", got=dst_row, bound=src_row)
        for row in (src_row, dst_row):
            self._bounds.check(0, row, length, 0)
        if length > (held := int(self._rows.lens[src_row])):
            raise RaggedValueError(
                f"length must be at most valid_len {held} of src_row {src_row}, got {length}",
                argument="length",
                got=length,
                bound=held,
            )
        with torch.inference_mode():
            self.tokens[dst_row, :length].copy_(self.tokens[src_row, :length])
            self.valid_lens[dst_row].fill_(length)
        self._rows.fork(src_row, dst_row, length)

    @refuses
    def verify(
        self, batch: RaggedBatch | Any, *, report: ViolationLog[Violation] | None = None
    ) -> ViolationLog[Violation]:
        """Compare the pool with the scheduler's own tokens and lengths, on the device, in one pass.

        Args:
            batch: a RaggedBatch, or requests as ``sync`` takes them. A request must end where its row does; columns
                before its prefix are not compared. A token of -1 or beyond int32, and a cell of -1, are skipped.
            report: a log to add to.

        Returns: the log, a new one where none was given: ``poll``, ``drain`` or ``raise_if_any`` it. What is beyond a
            row's valid length is never equal to anything: it is ``"stale"``.
        """
        if not isinstance(batch, RaggedBatch):
            asked = Requests(batch)
            batch = _build(
                self._lenient, self._rows.checked(asked.rows, asked.req_ids), asked.seqs, None, asked.req_ids
            )
        return verify_batch(batch, self.tokens, self.valid_lens, exact=True, report=report, backend=self._backend)

    def _put(self, batch: RaggedBatch, report: GuardReport | None, *, fresh: bool) -> None:
        """Scatter a batch whose requests start at 0 (``fresh``) or where their rows end."""
        if not isinstance(batch, RaggedBatch):
            got = type(batch).__name__
            raise RaggedTypeError(f"{POOL}batch must be a RaggedBatch, got {got}", argument="batch", got=got)
        self._rows.check_starts(batch.layout, fresh=fresh)
        self._launch(batch, report)
        self._rows.hold_unseen(batch.layout, self.tokens.shape[1])

    def _end_at(self, rows: Int64Array, lens: Int64Array) -> None:
        """Valid lengths on the device: a batch that writes no token, and ends each row where it starts."""
        self._launch(_build(self._builder, rows, [[]] * len(rows), lens, None), None)

    def _launch(self, batch: RaggedBatch, report: GuardReport | None) -> None:
        scatter_checked(batch, self.tokens, report=report, backend=self._backend, valid_lens=self.valid_lens)


def _build(
    builder: RaggedBatchBuilder, rows: Int64Array, tokens: Any, prefix_lens: Int64Array | None, req_ids: Any
) -> RaggedBatch:
    """A batch of its own from a builder that is empty before and after, also where it refuses."""
    try:
        builder.extend(rows, tokens, prefix_lens=prefix_lens, req_ids=req_ids)
        return builder.build()
    finally:
        builder.clear()
