"""The errors of text data, each with a message for the user who configured the data.

DataError(ValueError)
  MissingTextError       a place in the data names nothing that can be read
  EmptyCorpusError       the files contain no text
  CorpusTooSmallError    less training text than one sample
  UndecodableTextError   not UTF-8, with data.encoding_errors "strict"
  BadRowError            a row, or every row of a file, has no text in the field
  TextChangedError       a file changed while it was read
  DamagedShardError      a shard or an index is not what its format demands, or contains what is not read
  TokenizerError         data.tokenizer cannot be loaded
  CacheError             data.cache_dir cannot be written
  ShardSizeError         a shard has another number of samples than the others, or than its index says

Raised by all modules of this package; the command line and the tasks show the message.
"""

from __future__ import annotations


class DataError(ValueError):
    """Root of all errors about text data; `code` is stable."""

    code = "data"


class MissingTextError(DataError):
    code = "data_missing_text"


class EmptyCorpusError(DataError):
    code = "data_empty_corpus"


class CorpusTooSmallError(DataError):
    code = "data_corpus_too_small"


class UndecodableTextError(DataError):
    code = "data_undecodable_text"


class BadRowError(DataError):
    code = "data_bad_row"


class TextChangedError(DataError):
    code = "data_text_changed"


class DamagedShardError(DataError):
    code = "data_damaged_shard"


class TokenizerError(DataError):
    code = "data_tokenizer"


class CacheError(DataError):
    code = "data_cache"


class ShardSizeError(DataError):
    code = "data_shard_size"
