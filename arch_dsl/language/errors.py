"""What is wrong with a spec, said where it stands: file, line, column, found, allowed, meant."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

_WIDEST = 160  # characters of a quoted source line
# What others call it: names of papers, PyTorch, transformers and other trainers, each with ours; of several the first
# that may stand at the place.
SYNONYMS = {
    "rotary": "rope",
    "nope": "none",
    "swish": "silu",
    "gqa": "kv_heads",
    "mqa": "kv_heads",
    "n_kv_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
    "num_key_value_heads": "kv_heads",
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "n_head": "heads",
    "n_heads": "heads",
    "rms_norm": "rmsnorm",
    "layer_norm": "layernorm",
    "prenorm": "pre",
    "postnorm": "post",
    "hidden_size": "d_model",
    "dim": "d_model",
    "n_embd": "d_model",
    "depth": "n_layers",
    "layers": "n_layers",
    "n_layer": "n_layers",
    "num_layers": "n_layers",
    "num_hidden_layers": "n_layers",
    "d_ff": "width",
    "hidden_dim": "width",
    "intermediate_size": "width",
    "vocab_size": "vocab",
    "mlp": "ffn",
    "feed_forward": "ffn",
    "swiglu": "glu",
    "sliding_window": "window mask",
    "swa": "window",
    "learning_rate": "lr",
    "batch_size": "batch",
    "tie_word_embeddings": "tied unembedding",
    "tie_embeddings": "tied unembedding",
    "rope_theta": "theta positional",
    "partial_rotary_factor": "fraction positional",
    "max_position_embeddings": "max_positions",
    "n_positions": "max_positions",
    "rms_norm_eps": "eps norm",
    "layer_norm_eps": "eps norm",
    "layer_norm_epsilon": "eps norm",
    "norm_eps": "eps norm",
    "hidden_act": "activation ffn",
    "hidden_activation": "activation ffn",
    "activation_function": "activation ffn",
    "attention_bias": "bias",
    "qkv_bias": "bias",
    "mlp_bias": "bias",
    "initializer_range": "std init",
    "final_logit_softcapping": "logits",
    "attn_logit_softcapping": "scores",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "width",
    "kv_lora_rank": "kv_latent",
    "q_lora_rank": "query_latent",
    "qk_rope_head_dim": "rotary_dim",
    "qk_nope_head_dim": "head_dim",
    "v_head_dim": "value_dim",
    "seq_len": "context",
    "sequence_length": "context",
    "block_size": "context",
    "max_steps": "tokens",
    "steps": "tokens",
    "grad_clip": "clip",
    "max_grad_norm": "clip",
    "gradient_accumulation_steps": "accumulate",
    "dtype": "precision",
    "warmup_steps": "schedule",
    "weight_decay": "optimizer",
    "g1": "sdpa",  # the gate positions of arXiv:2505.06708, table 1
    "g2": "value",
    "g3": "key",
    "g4": "query",
    "g5": "dense",
}
_LISTED = re.compile(r" (\([^()\n]{120,}\))")  # many names
_FILL = textwrap.TextWrapper(118, initial_indent="    ", subsequent_indent="     ", break_on_hyphens=False)


@dataclass(frozen=True)
class Mark:
    """A place in a source file. `line` and `column` count from 1 (0: in no line of it); `text` is the whole line."""

    file: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One mistake: the path in the spec, what is wrong, and where it was written (None for specs made in Python)."""

    path: str
    message: str
    mark: Mark | None = None

    def __str__(self) -> str:
        said = self.mark is not None and not self.mark.line and self.mark.file.endswith(f" {self.path}>")
        where = f"{self.mark}: " if self.mark and not said else ""  # not twice: `--set train.lr`, and train.lr
        head = in_lines(f"{where}{self.path}: {self.message}" if self.path else f"{where}{self.message}")
        if self.mark is None or not self.mark.text.strip() or self.mark.column > _WIDEST:
            return head
        number = f"{self.mark.line:5d} | "
        caret = " " * (len(number) - 2) + "| " + " " * (self.mark.column - 1) + "^"
        return f"{head}\n{number}{self.mark.text[:_WIDEST].rstrip()}\n{caret}"


def in_lines(message: str) -> str:
    """A message in which many names are on lines of their own."""
    return _LISTED.sub(lambda found: "\n" + _FILL.fill(found[1]), message)


def _line(problem: Problem) -> tuple[bool, str, int]:
    """What was set for one command, then from the top of a file to its end; what has no place comes last."""
    if problem.mark is None:
        return True, "", 0
    return False, problem.mark.file if problem.mark.line else "", problem.mark.line


class SpecError(ValueError):
    """A spec or study that cannot mean anything. Holds every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_line))
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def of(cls, path: str, message: str, mark: Mark | None = None) -> SpecError:
        """A SpecError with a single problem."""
        return cls([Problem(path, message, mark)])


def nearest(found: str, allowed: Iterable[str], alike: float = 0.5) -> str | None:
    """The allowed name that is meant by `found` elsewhere, or is most like it; None if nothing is so much `alike`."""
    names = list(allowed)
    for ours in SYNONYMS.get(found.lower(), "").split():
        if ours in names:
            return ours
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(found.lower(), lowered, n=3, cutoff=alike)
    close = sorted(close, key=lambda name: (-_likeness(name, found), name[:1] != found.lower()[:1]))[:1]
    if close and close[0][:1] != found.lower()[:1] and sorted(close[0]) != sorted(found.lower()):
        # `train` is not meant for `streams`, `rl` for `lr` is
        close = difflib.get_close_matches(found.lower(), close, cutoff=max(alike, 0.6))
    longer = [name for name in lowered if len(found) > 1 and name.startswith(found.lower())]
    return next((lowered[name] for name in (*close, *longer)), None)


def _likeness(name: str, found: str) -> float:
    return difflib.SequenceMatcher(None, name, found.lower()).ratio()


def shorten(found: object, most: int = 60) -> str:
    """A value as an error quotes it, cut when it is long."""
    text = str(found)
    return text if len(text) <= most else f"{text[:most]}…"


def unknown(found: object, what: str, allowed: Iterable[str], hint: str = "") -> str:
    """`'sdp' is not a gate position; did you mean 'sdpa'? (query, key, value, sdpa, dense)`; or another hint."""
    names = list(allowed)
    meant = nearest(str(found), names)
    hint = hint or (f"; did you mean '{meant}'?" if meant else "")
    article = "an" if what[:1] in "aeio" else "a"
    return f"'{shorten(found)}' is not {article} {what}{hint} ({', '.join(names) or 'there is none'})"
