"""Tokenizers that others have trained: a tokenizer.json, its folder, or its name on the Hugging Face hub."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archlab.arch_dsl.language.errors import SpecError, nearest
from archlab.search.data.tokenizers.family import Codec, Tokenizer
from archlab.search.data.tokenizers.model_codec import ModelCodec, model_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model

_FILE = "tokenizer.json"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[SEP]", "<|eot_id|>")


@Tokenizer.register("pretrained")
class Pretrained(Tokenizer):
    """A tokenizer that was trained elsewhere, in the format of the `tokenizers` library.

    `name` is a tokenizer.json, a folder that holds one, or a model of the Hugging Face hub at a `revision`, which is
    downloaded once. A path is searched in the current directory, then in the study's folder. `eod` is the token that
    ends a document; without it the one that the tokenizer is known to have for that. What decides the data's identity
    is the content of the tokenizer, not its name.
    """

    name: str
    revision: str = "main"
    eod: str | None = None

    def find(self, base: Path | None, path: str) -> list[Path]:
        """The file, if it is one of this machine."""
        for folder in (Path.cwd(), base):
            place = folder / Path(self.name).expanduser() if folder else None
            if place and place.is_dir() and (place / _FILE).is_file():
                return [place / _FILE]
            if place and place.is_file():
                return [place]
        if self.name.endswith(".json") or self.name.startswith((".", "/", "~")):
            raise SpecError.of(
                f"{path}.name", f"'{self.name}' is no file, and no folder with a {_FILE}", self.mark("name")
            )
        return []

    def facts(self, base: Path | None, path: str) -> dict[str, Any]:
        """The hash of its text and the token that ends a document."""
        text = self._text(base, path)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"type": self.type, "version": self.version, "sha256": digest, "eod": self.load(text, path).eod}

    def train(self, documents: Sequence[bytes], path: str, base: Path | None = None) -> Codec:
        """The codec, which is the same for every text."""
        return self.load(self._text(base, path), path)

    def load(self, state: str, path: str = "tokenizer") -> Codec:
        """The codec from its JSON text."""
        model = model_of(state)
        return ModelCodec(model, self._end(model, path))

    def _text(self, base: Path | None, path: str) -> str:
        files = self.find(base, path)
        return _read(files[0], path, self) if files else _download(self.name, self.revision, path, self)

    def label(self) -> str:
        """`pretrained gpt2`"""
        return f"pretrained {self.name}"

    def _end(self, model: Model, path: str) -> int:
        special = {item.content: token for token, item in model.get_added_tokens_decoder().items() if item.special}
        if self.eod is not None:
            token = model.token_to_id(self.eod)
            if token is None:
                meant = nearest(self.eod, special)
                hint = f"; did you mean '{meant}'?" if meant else ""
                message = f"'{self.eod}' is not a token of it{hint} (special: {', '.join(special) or 'none'})"
                raise SpecError.of(f"{path}.eod", message, self.mark("eod"))
            return int(token)
        for end in _ENDS:
            if end in special:
                return special[end]
        message = f"is missing: no special token is known to end a document ({', '.join(special) or 'it has none'})"
        raise SpecError.of(f"{path}.eod", message, self.mark())


@lru_cache(maxsize=2)
def _text_of(name: str, revision: str) -> str:
    from tokenizers import Tokenizer as Model

    return Model.from_pretrained(name, revision=revision).to_str()


def _download(name: str, revision: str, path: str, spec: Pretrained) -> str:
    """The tokenizer of a model of the hub, as its JSON text."""
    try:
        return _text_of(name, revision)
    except Exception as error:  # the library raises nothing more special
        message = f"'{name}' is no file here, and could not be read from the Hugging Face hub: {error}"
        raise SpecError.of(f"{path}.name", message, spec.mark("name")) from error


def _read(file: Path, path: str, spec: Pretrained) -> str:
    """The JSON text of a file, as the library writes it. Raises SpecError."""
    try:
        return model_of(file.read_text("utf-8")).to_str()
    except Exception as error:
        message = f"{file} is not a tokenizer of the `tokenizers` library: {error}"
        raise SpecError.of(f"{path}.name", message, spec.mark("name")) from error
