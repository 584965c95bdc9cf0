"""Which token ids are allowed: vocabulary, placeholders, wide ids. One vectorised pass, with counts."""

from __future__ import annotations

import attrs
import numpy as np

from ragged.convert import Choice, Int64Array
from ragged.errors import RaggedTypeError, RaggedValueError, request_name
from ragged.integers import as_int
from ragged.rules import INT32_MAX

PLACEHOLDER = -1
"""The token id that is not known yet; stored as -1, counted, never compared."""


class WideTokens(Choice):
    """What happens to an id above 2^31-1, such as SGLang's 62-bit multimodal sentinels."""

    REFUSE = "refuse"
    OPAQUE = "opaque"


@attrs.frozen
class TokenCounts:
    """How many placeholders and wide ids there are."""

    placeholders: int = 0
    wide: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.placeholders + other.placeholders, self.wide + other.wide)


NO_COUNTS = TokenCounts()


@attrs.frozen
class TokenRules:
    """The caller's word on token ids.

    Args:
        vocab_size: ids must be below it; None for no such bound.
        allow_placeholders: take -1.
        wide_tokens: take ids above 2^31-1 and keep them whole (``"opaque"``), or refuse them.
    """

    vocab_size: int | None = None
    allow_placeholders: bool = False
    wide_tokens: WideTokens = attrs.field(default=WideTokens.REFUSE, converter=WideTokens)
    largest: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.vocab_size is not None:
            object.__setattr__(self, "vocab_size", as_int(self.vocab_size, "vocab_size", least=1))
        allow = self.allow_placeholders
        if not isinstance(allow, bool | np.bool_):  # "false" out of a file of options would allow them
            says, name = "allow_placeholders must be a bool", type(allow).__name__
            raise RaggedTypeError(f"{says}, got {name} {allow!r}", argument="allow_placeholders", got=allow)
        bound = INT32_MAX if self.vocab_size is None else min(INT32_MAX, self.vocab_size - 1)
        object.__setattr__(self, "largest", bound)

    def check(
        self,
        token_ids: Int64Array,
        offsets: Int64Array,
        *,
        first_request: int = 0,
        req_ids: tuple[object, ...] | None = None,
    ) -> TokenCounts:
        """Count what is allowed; raise RaggedValueError for what is not. Needed where any id is outside
        ``[0, largest]`` only.

        ``token_ids`` are int64 ``[num_tokens]`` and ``offsets`` int64 ``[num_reqs + 1]``; requests are numbered
        from ``first_request``.
        """
        placeholder = token_ids == PLACEHOLDER
        wide = token_ids > INT32_MAX
        refused = (token_ids < 0) | (token_ids > self.largest)
        if self.allow_placeholders:
            refused &= ~placeholder
        if self.wide_tokens is WideTokens.OPAQUE:
            refused &= ~wide
        if refused.any():
            index = int(refused.argmax())
            request = int(np.searchsorted(offsets, index, side="right")) - 1
            req_id = None if req_ids is None else req_ids[request]
            self._refuse(int(token_ids[index]), first_request + request, req_id, index - int(offsets[request]))
        return TokenCounts(int(np.count_nonzero(placeholder)), int(np.count_nonzero(wide)))

    def _refuse(self, token_id: int, request: int, req_id: object, position: int) -> None:
        hint = None
        if token_id < 0:
            reason, bound = "must not be negative", 0
            if token_id == PLACEHOLDER:
                hint = "pass allow_placeholders=True where -1 means 'not known yet'"
        elif self.vocab_size is not None and token_id <= INT32_MAX:
            reason, bound = f"must be below vocab_size {self.vocab_size}", self.vocab_size
        else:
            reason, bound = f"must be at most {INT32_MAX}", INT32_MAX
            hint = "pass wide_tokens='opaque' where wider ids are meant"
        raise RaggedValueError(
            f"token_ids {reason}, got {token_id} at {request_name(request, req_id)}, position {position}",
            argument="token_ids",
            request=request,
            req_id=req_id,
            got=token_id,
            bound=bound,
            hint=hint,
        )
