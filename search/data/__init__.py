"""Data: sources of text, tokenizers, prepared data sets, and batches that depend on nothing but the seed."""

# Members are listed in the order of these imports.
# isort: off
from archlab.search.data.batches import IGNORE, batch, windows
from archlab.search.data.cleaning.stages import Cleaner, CleaningStage
from archlab.search.data.checksums import DamagedData, DataError
from archlab.search.data.dataset import Dataset, Documents
from archlab.search.data.documents.document import Document
from archlab.search.data.cleaning.duplicates import MinHash, Paragraphs, Spans
from archlab.search.data.sources.given_tokens import TokenFiles
from archlab.search.data.sources.hub import Hub
from archlab.search.data.mixing import rows
from archlab.search.data.sources.mixture import Domain, Mixture
from archlab.search.data.sources.needles import Needles
from archlab.search.data.cleaning.pii import Mask
from archlab.search.data.prepare import prepare, require
from archlab.search.data.sources.probes import Probe
from archlab.search.data.cleaning.quality import C4, Gopher
from archlab.search.data.sources.records import Jsonl, Parquet
from archlab.search.data.sources.family import Source, Stdlib, Text
from archlab.search.data.tokenizers.subwords import BytePairs, Unigram, WordPiece
from archlab.search.data.tokenizers.pretrained import Pretrained
from archlab.search.data.tokenizers.family import Bytes, Codec, Tokenizer
# isort: on

__all__ = [
    "C4",
    "IGNORE",
    "BytePairs",
    "Bytes",
    "Cleaner",
    "CleaningStage",
    "Codec",
    "DamagedData",
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
