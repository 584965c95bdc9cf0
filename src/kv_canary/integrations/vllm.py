"""A vLLM scheduler's step as a batch: the per-request lists of its ``SchedulerOutput``.

Use: ``batch = vllm.build(builder, scheduler_output, rows=req_id_to_index, tokens_of=tokens_by_req_id.__getitem__)``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragged import RaggedBatch, RaggedBatchBuilder, RaggedError, RaggedTypeError, RaggedValueError

MODULE = "vllm.v1.core.sched.output"
FIELDS = {
    "SchedulerOutput": ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
    "NewRequestData": ("req_id", "prompt_token_ids", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "num_computed_tokens"),
}
"""What is read of each, by vLLM's own names."""


def build(
    builder: RaggedBatchBuilder,
    output: Any,
    *,
    rows: Mapping[str, int],
    tokens_of: Callable[[str], Sequence[int]],
) -> RaggedBatch:
    """The tokens that a step computes: of each request ``num_scheduled_tokens`` from ``num_computed_tokens`` on.

    New requests come first, then cached ones, each in vLLM's order; their ids are the batch's ``layout.req_ids``.

    Args:
        builder: an empty builder.
        output: a ``vllm.v1.core.sched.output.SchedulerOutput``.
        rows: each request's pool row, such as an input batch's ``req_id_to_index``.
        tokens_of: all tokens of a request that the worker knows, prompt and output; asked for cached requests, for vLLM
            does not send again what its worker has, and for new ones that were computed beyond their prompt.

    Raises: RaggedError where vLLM is not installed or its classes lack a field; RaggedTypeError for another output;
        RaggedValueError where a request has no row, or fewer tokens than are scheduled. The builder is left empty.
    """
    _check(output)
    scheduled: dict[str, int] = output.num_scheduled_tokens
    ids: list[str] = []
    prefix_lens: list[int] = []
    sequences: list[Sequence[int]] = []

    def take(req_id: str, start: int, tokens: Sequence[int]) -> None:
        request, end = len(ids), start + scheduled[req_id]
        if req_id not in rows:
            raise RaggedValueError(
                f"kv-canary: rows must have request {request} (id {req_id!r})",
                argument="rows",
                request=request,
                req_id=req_id,
            )
        if len(tokens) < end:
            raise RaggedValueError(
                f"kv-canary: tokens of request {request} (id {req_id!r}) must reach to {end}, got {len(tokens)}",
                argument="tokens_of",
                request=request,
                req_id=req_id,
                got=len(tokens),
                bound=end,
            )
        ids.append(req_id)
        prefix_lens.append(start)
        sequences.append(tokens[start:end])

    for new in output.scheduled_new_reqs:
        tokens, end = new.prompt_token_ids or [], new.num_computed_tokens + scheduled[new.req_id]
        take(new.req_id, new.num_computed_tokens, tokens if len(tokens) >= end else tokens_of(new.req_id))
    cached = output.scheduled_cached_reqs
    for req_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        take(req_id, start, tokens_of(req_id))
    builder.extend([rows[req_id] for req_id in ids], sequences, prefix_lens=prefix_lens, req_ids=ids)
    return builder.build()


def _check(output: Any) -> None:
    """That vLLM is here, is a version that is known, and made this output."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise RaggedError(
            f"kv-canary: vLLM's {MODULE} was not found: {error}", argument="vllm", hint="install vllm 0.10 or newer"
        ) from None
    for name, fields in FIELDS.items():
        known = getattr(module, name, None)
        missing = [field for field in fields if field not in getattr(known, "__dataclass_fields__", {})]
        if missing:
            raise RaggedError(
                f"kv-canary: {MODULE} is not a version that is known: {name} lacks {', '.join(missing)}",
                argument="vllm",
                got=name,
                bound=fields,
            )
    if not isinstance(output, module.SchedulerOutput):
        got = type(output).__name__
        raise RaggedTypeError(
            f"kv-canary: output must be vLLM's SchedulerOutput, got {got}", argument="output", got=got
        )
