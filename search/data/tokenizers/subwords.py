"""Tokenizers that are trained on the training split with the `tokenizers` library: byte pairs, WordPiece, Unigram.

The same text gives the same vocabulary, token for token, with any number of threads.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.spec import Range, added
from archlab.search.data.tokenizers.family import BYTE_VALUES, END_OF_DOCUMENT, Codec, Tokenizer
from archlab.search.data.tokenizers.model_codec import ModelCodec, model_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model

COVERAGE = 0.9995  # of the characters of the training text have a token: SentencePiece's `character_coverage`
_MOST = 10_000_000  # tokens of a vocabulary: for far more its table alone is too large for any memory
_BYTES = [f"<0x{byte:02X}>" for byte in range(BYTE_VALUES)]
_SPACE = "▁"
_UNKNOWN = "[UNK]"
_STEP = 1e-4  # what UnigramTrainer adds from one character that it had lost to the next
_DIGITS = 4  # of a piece's log-probability; threads change the eleventh


class Subwords(Tokenizer):
    """What the trained tokenizers have in common."""

    exhausted: ClassVar[str] = "the training text gives no more pieces"

    split_digits: bool = added(default=False)
    normalize: Literal["none", "nfkc"] = added(default="none")

    def size(self, path: str, base: Path | None = None) -> int:
        """What is asked for, which the training text must give."""
        return int(self.vocab)  # type: ignore[attr-defined]

    def load(self, state: str) -> Codec:
        """The codec from the JSON text of the `tokenizers` library."""
        return ModelCodec(model_of(state))

    def label(self) -> str:
        """`bpe 4096, digits, nfkc`"""
        said = [f"{self.type} {self.vocab}"]  # type: ignore[attr-defined]
        said += ["digits"] * self.split_digits + [self.normalize] * (self.normalize != "none")
        return ", ".join(said)

    def _prepared(self, model: Model, *cut: Any) -> Model:
        """Sets what happens to text before the model sees it."""
        from tokenizers import normalizers, pre_tokenizers

        if self.normalize == "nfkc":
            model.normalizer = normalizers.NFKC()
        steps = [*([pre_tokenizers.Digits(individual_digits=True)] if self.split_digits else []), *cut]
        model.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
        return model

    def _trained(self, model: Model, trainer: Any, documents: Sequence[bytes], path: str, **options: Any) -> Codec:
        """The model after training by a kind of trainer with its options, without special tokens: none of its tokens is
        matched before the text is cut.

        Raises SpecError where the text has no vocabulary of the wanted size.
        """
        wanted: int = self.vocab  # type: ignore[attr-defined]
        teacher = trainer(vocab_size=wanted - END_OF_DOCUMENT, show_progress=False, **options)
        try:
            model.train_from_iterator((document.decode() for document in documents), teacher)
        except Exception as error:  # the library raises nothing more special
            message = f"cannot be learnt from the training text: {error}"
            raise SpecError.of(f"{path}.vocab", message, self.mark("vocab")) from error
        made = json.loads(model.to_str())
        made["added_tokens"] = []
        trained = model_of(json.dumps(_settled(made)))
        reached = trained.get_vocab_size() + END_OF_DOCUMENT
        if reached < wanted:
            message = f"must be at most {reached}, found {wanted}: {self.exhausted}"
            raise SpecError.of(f"{path}.vocab", message, self.mark("vocab"))
        if reached > wanted:
            reserved = {_UNKNOWN, *_BYTES}
            needed = sum(token in reserved or len(token.removeprefix("##")) == 1 for token in trained.get_vocab())
            message = f"must be at least {needed + END_OF_DOCUMENT}, found {wanted}: every character needs a token"
            raise SpecError.of(f"{path}.vocab", message, self.mark("vocab"))
        return ModelCodec(trained)


@Tokenizer.register("bpe")
class BytePairs(Subwords):
    """Byte-pair encoding (arXiv:1508.07909), trained on the training split.

    Its alphabet is the 256 bytes, as in GPT-2; with `byte_fallback` it is the characters that make up 99.95% of the
    training text, and the others are spelt in bytes, as in Llama. `vocab` counts every token: 256 bytes, characters,
    merges, and the end of a document. `split_digits` makes every digit a token of its own, `normalize` replaces text by
    its NFKC form first.
    """

    exhausted: ClassVar[str] = "the training text has no more pairs to merge"

    vocab: Annotated[int, Range(min=BYTE_VALUES + END_OF_DOCUMENT, max=_MOST)] = 4096
    byte_fallback: bool = added(default=False)

    def train(self, documents: Sequence[bytes], path: str, base: Path | None = None) -> Codec:
        """Learns the merges; the same text gives the same ones. Raises SpecError if it has too few for `vocab`."""
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if self.byte_fallback:
            model = self._prepared(Model(models.BPE(byte_fallback=True)), _metaspace())
            letters = _alphabet(model, documents)
            options = {"special_tokens": _BYTES, "initial_alphabet": letters, "limit_alphabet": len(letters)}
        else:
            model = self._prepared(Model(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False))
            model.decoder = decoders.ByteLevel()
            options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        return self._trained(model, trainers.BpeTrainer, documents, path, **options)


@Tokenizer.register("wordpiece")
class WordPiece(Subwords):
    """WordPiece as in BERT (arXiv:1609.08144, arXiv:1810.04805), trained on the training split.

    Text is cut at white space, which is lost, and around punctuation; a word is its longest known pieces from the left,
    and one with a character outside of the most frequent 99.95% is `[UNK]`. `vocab` counts every token, the end of a
    document and `[UNK]` among them. `split_digits` makes every digit a token of its own, `normalize` replaces text by
    its NFKC form first.
    """

    vocab: Annotated[int, Range(min=3, max=_MOST)] = 4096

    def train(self, documents: Sequence[bytes], path: str, base: Path | None = None) -> Codec:
        """Learns the pieces; the same text gives the same ones. Raises SpecError if it has too few for `vocab`."""
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = self._prepared(
            Model(models.WordPiece(unk_token=_UNKNOWN, max_input_chars_per_word=100)),
            pre_tokenizers.BertPreTokenizer(),
        )
        model.decoder = decoders.WordPiece(cleanup=False)
        letters = [letter for letter in _alphabet(model, documents) if not letter.isspace()]
        special = [_UNKNOWN, *(f"##{letter}" for letter in letters)]  # else a hash orders them
        options = {"special_tokens": special, "initial_alphabet": letters, "limit_alphabet": len(letters)}
        return self._trained(model, trainers.WordPieceTrainer, documents, path, **options)


@Tokenizer.register("unigram")
class Unigram(Subwords):
    """The unigram language model (arXiv:1804.10959), trained on the training split: the likeliest pieces of a text.

    With `byte_fallback` a character that the training text lacks is spelt in bytes, else it is unknown. `vocab` counts
    every token: the pieces, among them every character of the training text, bytes, the unknown one and the end of a
    document. `split_digits` makes every digit a token of its own, `normalize` replaces text by its NFKC form first, as
    T5 does.
    """

    vocab: Annotated[int, Range(min=3, max=_MOST)] = 4096
    byte_fallback: bool = True

    def train(self, documents: Sequence[bytes], path: str, base: Path | None = None) -> Codec:
        """Learns the pieces; the same text gives the same ones. Raises SpecError if it has too few for `vocab`."""
        from tokenizers import Regex, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Model

        # A literal <0x41> in a text is not the byte: cut before its 0 it matches no token.
        apart = [pre_tokenizers.Split(Regex("<(?=0x)"), "isolated")] if self.byte_fallback else []
        model = self._prepared(Model(models.Unigram()), *apart, _metaspace())
        special = [_UNKNOWN, *(_BYTES if self.byte_fallback else [])]
        trainer = trainers.UnigramTrainer
        return self._trained(model, trainer, documents, path, special_tokens=special, unk_token=_UNKNOWN)


def _metaspace() -> Any:
    """Spaces become ▁ and begin the piece after them, as in SentencePiece; no text gets one that it lacks."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never")


def _alphabet(model: Model, documents: Iterable[bytes]) -> list[str]:
    """The characters that make up 99.95% of a text, the most frequent first."""
    counts: Counter[str] = Counter()
    for document in documents:
        text = document.decode()
        counts.update(model.normalizer.normalize_str(text) if model.normalizer else text)
    if " " in counts:
        counts[_SPACE] += counts.pop(" ")
    enough = math.ceil(COVERAGE * counts.total())
    letters, covered = [], 0
    for letter, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= enough:
            break
        letters.append(letter)
        covered += count
    return letters


def _settled(made: dict[str, Any]) -> dict[str, Any]:
    """A trained model without what depends on threads and hash seeds, which is so in Unigram alone.

    UnigramTrainer gives the characters that training has lost the scores s, s + 0.0001, …, s being the lowest one, in
    the order of a hash: here all get s. The other scores differ in their last digits, and are rounded.
    """
    model = made["model"]
    if model["type"] != "Unigram":
        return made
    special = {_UNKNOWN, *_BYTES}
    scores = {piece: score for piece, score in model["vocab"] if piece not in special}
    floor = min(scores.values())
    single = sum(len(piece) == 1 for piece in scores)
    for piece, score in scores.items():
        steps = (score - floor) / _STEP
        lost = len(piece) == 1 and steps < single and abs(steps - round(steps)) < 1e-4
        scores[piece] = round(floor if lost else score, _DIGITS)
    ordered = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    fallback = any(piece == _BYTES[0] for piece, _ in model["vocab"])
    reserved = [(_UNKNOWN, 0.0), *((byte, 0.0) for byte in _BYTES if fallback)]
    made["model"] = {**model, "vocab": [*reserved, *ordered], "unk_id": 0, "byte_fallback": fallback}
    return made
