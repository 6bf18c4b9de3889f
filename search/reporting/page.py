"""What a report says, before it looks like anything: tables of formatted cells, and the lines below them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from archlab.search.comparison.training_cost import cost_sentence
from archlab.search.formatting.tables import Block, Page, printable
from archlab.search.reporting.findings import findings

if TYPE_CHECKING:
    from archlab.search.results.comparison import Comparison

DIGITS = 12  # of a hash


def page_of(comparison: Comparison, blocks: list[Block]) -> Page:
    """Tables with all that is said below them."""
    return Page(
        study=printable(comparison.study),
        question=printable(comparison.question),
        blocks=blocks,
        lines=_lines(comparison),
        notes=[printable(note) for note in comparison.notes],
        provenance=printable(_provenance(comparison)),
        identities=[
            (printable(name), ", ".join(f"{of} {digest[:DIGITS]}" for of, digest in found.items()))
            for name, found in comparison.provenance["identities"].items()
        ],
        findings=[printable(sentence) for _, sentence in findings(comparison)],
    )


def _lines(comparison: Comparison) -> list[str]:
    """How the intervals were made, and what the table could have resolved."""
    noise = comparison.noise
    method = noise["method"]
    lines = [method[0].upper() + method[1:] + "."]
    if noise["resolvable"] is not None:
        percent = noise["resolvable_percent"]
        also = "" if percent is None else f" ({percent:.2g}% of perplexity)"
        lines.append(
            f"Smallest difference this table could have resolved: {noise['resolvable']:.4f} {noise['unit']}{also}."
        )
    parts = {"one trial's seed": noise["seed_sd"], "a difference's documents": noise["document_sd"]}
    known = [f"{value:.2g} from {name}" for name, value in parts.items() if value is not None]
    if known:
        lines.append(f"Noise (standard deviation, {noise['unit']}): {', '.join(known)}.")
    cost = cost_sentence(comparison.cost)
    return [*lines, cost] if cost else lines


def _provenance(comparison: Comparison) -> str:
    found = comparison.provenance
    data = found["data"]
    sizes = [f"{data[k]:,} {k.removesuffix('_tokens')}" for k in data if k.endswith("_tokens")]
    versions = [f"{name} {'/'.join(map(_short_commit, values))}" for name, values in found["versions"].items()]
    seeds = f", seeds {' '.join(str(s) for s in found['seeds'])}" if found["seeds"] else ""
    return (
        f"{_study(found)}data {data['identity'][:DIGITS]} ({data['source']}, {data['tokenizer']}; "
        f"{' / '.join(sizes)} tokens); "
        f"{' / '.join(f'{n:,}' for n in found['tokens'])} tokens per trial, "
        f"context {' / '.join(str(n) for n in found['context'])}{seeds}; "
        f"{', '.join(versions) or 'no finished trial'}"
    )


def _study(found: dict[str, Any]) -> str:
    """The study, what was set for it, how its trials computed, and when."""
    named = f"study {found['study']}" + (f" at scale {found['scale']}" if "scale" in found else "")
    given = [f"{path}={json.dumps(value)}" for path, value in found.get("overrides", {}).items() if path != "scale"]
    recipes = [f"{name} {' / '.join(found[name])}" for name in ("precision", "compile") if name in found]
    days = list(dict.fromkeys(found["trained"].values()))
    told = [named + (f" with {', '.join(given)}" if given else ""), ", ".join(recipes)]
    told += [f"trained {' to '.join(days)} (UTC)"] if days else []
    return "".join(f"{each}; " for each in told if each)


def _short_commit(text: str) -> str:
    """A version; a git commit by its first digits."""
    head, mark, rest = text.partition("+changes")
    return f"{head[:DIGITS]}{mark}{rest}" if len(head) == 40 else text
