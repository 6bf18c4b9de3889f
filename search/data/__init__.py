"""Data: sources of text, tokenizers, prepared data sets, and batches that depend on nothing but the seed."""

from search.data.batches import IGNORE, batch, tensors, windows
from search.data.dataset import DataError, Dataset, Documents
from search.data.prepare import prepare, require
from search.data.sources import Document, Source, Stdlib, Text
from search.data.subwords import BytePairs, Unigram, WordPiece
from search.data.tokenizer_files import Pretrained
from search.data.tokenizers import Bytes, Codec, Tokenizer

__all__ = [
    "IGNORE",
    "BytePairs",
    "Bytes",
    "Codec",
    "DataError",
    "Dataset",
    "Document",
    "Documents",
    "Pretrained",
    "Source",
    "Stdlib",
    "Text",
    "Tokenizer",
    "Unigram",
    "WordPiece",
    "batch",
    "prepare",
    "require",
    "tensors",
    "windows",
]
