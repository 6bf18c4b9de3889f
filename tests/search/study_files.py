"""What the tests of studies share: a small study, section by section, on a corpus that is made in a moment."""

from __future__ import annotations

from pathlib import Path

SECTIONS = {
    "study": "study: gates",
    "question": "question: Does a gate help?",
    "model": """\
model:
  d_model: 64
  n_layers: 1
  block:
    norm: rmsnorm
    attention: {heads: 4, positional: rope}
    ffn: {type: glu, activation: silu}""",
    "components": """\
components:
  gate: {block.attention.gate: {position: sdpa}}""",
    "variants": """\
variants:
  baseline: {}
  gated: [gate]""",
    "train": """\
train:
  data: {text: corpus.txt}
  tokens: 1k
  context: 32
  batch: 4
  lr: 1e-3""",
    "seeds": "seeds: 2",
}

TINY_MODEL = """\
model:
  d_model: 16
  n_layers: 1
  block:
    norm: rmsnorm
    attention: {heads: 2, positional: rope}
    ffn: {type: glu, activation: silu}"""


def study_text(**sections: str | None) -> str:
    """The study with these sections replaced, left out (None) or added at the end."""
    return "\n".join(text for text in {**SECTIONS, **sections}.values() if text is not None) + "\n"


def write_study(folder: Path, name: str = "study.yaml", **sections: str | None) -> Path:
    """Writes the study and its corpus, about 20 kB in 60 documents, into a folder."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        words = ("stream", "gate", "norm", "query", "key", "value", "token", "layer", "head", "loss")
        texts = [
            f"document {number}\n" + " ".join(words[(number * step + step) % 10] for step in range(50)) + "\n"
            for number in range(60)
        ]
        corpus.write_text("\n".join(texts))
    path = folder / name
    path.write_text(study_text(**sections))
    return path
