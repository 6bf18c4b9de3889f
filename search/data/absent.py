"""Data that have to be downloaded before anything can be trained on them, as far as a plan knows them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from archlab.search.data.dataset import Dataset
from archlab.search.data.documents.notation import plain
from archlab.search.data.sources.family import Source
from archlab.search.data.tokenizers.family import Tokenizer


@dataclass(frozen=True)
class Absent(Dataset):
    """A data set without its text: a number of tokens to build models for, and an identity that no trial will have."""

    absent: ClassVar[bool] = True

    @classmethod
    def of(cls, source: Source, tokenizer: Tokenizer, path: str, base: Path | None) -> Absent:
        """That of a source and a tokenizer. Raises SpecError for a tokenizer that cannot be read."""
        asked = json.dumps([plain(source), plain(tokenizer)], sort_keys=True)
        identity = f"absent-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
        labels = {"source": source.label(), "tokenizer": tokenizer.label()}
        return cls(Path(identity), {"vocab": tokenizer.size(path, base), "labels": labels, "splits": {}})

    @property
    def lossy(self) -> None:
        """Not known."""

    def bytes_per_token(self, split: str = "train") -> None:
        """Not known."""

    def record(self) -> dict[str, Any]:
        """Its source, its tokenizer, and that it is not there."""
        return {"identity": self.identity, **self.header["labels"], "absent": True}
