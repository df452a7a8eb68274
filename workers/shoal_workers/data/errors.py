"""What can be wrong with text data, in words for the user who set it.

DataError(ValueError)
  MissingTextError       data.paths names nothing that can be read
  EmptyCorpusError       files, but no text in them
  CorpusTooSmallError    less training text than one sample
  UndecodableTextError   not UTF-8, with data.encoding_errors "strict"
  TextChangedError       a file changed while it was read
  TokenizerError         data.tokenizer cannot be loaded
  CacheError             data.cache_dir cannot be written
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


class TextChangedError(DataError):
    code = "data_text_changed"


class TokenizerError(DataError):
    code = "data_tokenizer"


class CacheError(DataError):
    code = "data_cache"
