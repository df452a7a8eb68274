"""The errors of text data, each with a message for the user who configured the data.

Raised by all modules of this package; the command line and the tasks show the message.
"""

from __future__ import annotations


class DataError(ValueError):
    """Root of all errors about text data; `code` is stable."""

    code = "data"

    def __init_subclass__(cls, *, code: str) -> None:
        super().__init_subclass__()
        cls.code = code


class MissingTextError(DataError, code="data_missing_text"):
    """A place in the data names nothing that can be read."""


class EmptyCorpusError(DataError, code="data_empty_corpus"):
    """The files contain no text."""


class CorpusTooSmallError(DataError, code="data_corpus_too_small"):
    """Less training text than one sample."""


class UndecodableTextError(DataError, code="data_undecodable_text"):
    """Not UTF-8, with data.encoding_errors "strict"."""


class BadRowError(DataError, code="data_bad_row"):
    """A row, or every row of a file, has no text in the field."""


class TextChangedError(DataError, code="data_text_changed"):
    """A file changed while it was read."""


class DamagedShardError(DataError, code="data_damaged_shard"):
    """A shard or an index is not what its format demands, or contains what is not read."""


class TokenizerError(DataError, code="data_tokenizer"):
    """Data.tokenizer cannot be loaded."""


class CacheError(DataError, code="data_cache"):
    """Data.cache_dir cannot be written."""


class ShardSizeError(DataError, code="data_shard_size"):
    """A shard has another number of samples than the others, or than its index says."""
