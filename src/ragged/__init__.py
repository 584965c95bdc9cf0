"""Ragged batches that cannot be wrong: host truth and device tensors for one scheduler step."""

from ragged.batch import RaggedBatch
from ragged.bounds import Bounds, Capacity, Overflow
from ragged.builder import RaggedBatchBuilder
from ragged.convert import Coercion, Mode
from ragged.errors import RaggedError, RaggedOverflowError, RaggedTypeError, RaggedValueError
from ragged.layout import RaggedLayout
from ragged.staging import StagingRing
from ragged.tokens import WideTokens

__all__ = [
    "Bounds",
    "Capacity",
    "Coercion",
    "Mode",
    "Overflow",
    "RaggedBatch",
    "RaggedBatchBuilder",
    "RaggedError",
    "RaggedLayout",
    "RaggedOverflowError",
    "RaggedTypeError",
    "RaggedValueError",
    "StagingRing",
    "WideTokens",
]
