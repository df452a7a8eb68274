"""Errors of text data, with messages for the user who configured it.

DataError(ValueError)
  MissingTextError       an entry of data.paths names no readable file
  EmptyCorpusError       the files contain no text
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
