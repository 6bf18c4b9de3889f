"""Data: sources of text, tokenizers, prepared data sets, and batches that depend on nothing but the seed."""

from search.data.batches import IGNORE, batch, windows
from search.data.cleaning import Cleaner, CleaningStage
from search.data.dataset import DataError, Dataset, Documents
from search.data.document import Document
from search.data.duplicates import MinHash, Paragraphs, Spans
from search.data.given_tokens import TokenFiles
from search.data.hub import Hub
from search.data.mixing import rows
from search.data.mixture import Domain, Mixture
from search.data.needle_text import Needles
from search.data.pii import Mask
from search.data.prepare import prepare, require
from search.data.probes import Probe
from search.data.quality import C4, Gopher
from search.data.records import Jsonl, Parquet
from search.data.sources import Source, Stdlib, Text
from search.data.subwords import BytePairs, Unigram, WordPiece
from search.data.tokenizer_files import Pretrained
from search.data.tokenizers import Bytes, Codec, Tokenizer

__all__ = [
    "C4",
    "IGNORE",
    "BytePairs",
    "Bytes",
    "Cleaner",
    "CleaningStage",
    "Codec",
    "DataError",
    "Dataset",
    "Document",
    "Documents",
    "Domain",
    "Gopher",
    "Hub",
    "Jsonl",
    "Mask",
    "MinHash",
    "Mixture",
    "Needles",
    "Paragraphs",
    "Parquet",
    "Pretrained",
    "Probe",
    "Source",
    "Spans",
    "Stdlib",
    "Text",
    "TokenFiles",
    "Tokenizer",
    "Unigram",
    "WordPiece",
    "batch",
    "prepare",
    "require",
    "rows",
    "windows",
]
