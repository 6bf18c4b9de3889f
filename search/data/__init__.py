"""Data: sources of text, tokenizers, prepared data sets, and batches that depend on nothing but the seed."""

from search.data.batches import IGNORE, batch, tensors, windows
from search.data.dataset import DataError, Dataset, Documents
from search.data.prepare import prepare, require
from search.data.sources import Document, Source, Stdlib, Text
from search.data.tokenizers import BytePairs, Bytes, Codec, Tokenizer

__all__ = [
    "IGNORE",
    "BytePairs",
    "Bytes",
    "Codec",
    "DataError",
    "Dataset",
    "Document",
    "Documents",
    "Source",
    "Stdlib",
    "Text",
    "Tokenizer",
    "batch",
    "prepare",
    "require",
    "tensors",
    "windows",
]
