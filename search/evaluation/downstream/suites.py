"""The tasks of papers' tables, by the names that lm-evaluation-harness has for them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """Tasks, and the accuracies over which the table averages: {task: metric}."""

    tasks: tuple[str, ...]
    averaged: dict[str, str] = field(default_factory=dict)


_FOX_ACCURACIES = {
    "lambada_openai": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
}
_FOX_MORE = {"copa": "acc", "openbookqa": "acc_norm", "sciq": "acc", "boolq": "acc"}
_LONGBENCH = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p"),
)
_LONG = tuple(f"longbench_{name}" for name in _LONGBENCH)

SUITES = {
    # arXiv:2503.02130: tables 1 and 8; table 7; tables 2 and 9
    "fox_short": Suite(("wikitext", *_FOX_ACCURACIES, *_FOX_MORE), {**_FOX_ACCURACIES, **_FOX_MORE}),
    "fox_slimpajama": Suite(("wikitext", *_FOX_ACCURACIES), _FOX_ACCURACIES),
    "fox_long": Suite(_LONG),
    # arXiv:2505.06708: tables 1 and 2; HumanEval's answers are programs
    "gated_attention": Suite(("hellaswag", "mmlu", "gsm8k", "ceval-valid", "cmmlu")),
    "gated_attention_code": Suite(("humaneval",)),
}
