"""What an editor offers at a place of a study's text: `|` is the cursor."""

import subprocess
import sys

import pytest

from archlab.search.study.completion import complete
from archlab.search.study.files import TEMPLATE

MODEL = "study: x\nmodel:\n  d_model: 64\n  block:\n"


def offered(text):
    """(what is being typed, the words that are offered)."""
    place = text.index("|")
    start, found = complete(text[:place] + text[place + 1 :], place)
    return text[start:place], [each.word for each in found]


@pytest.mark.parametrize(
    ("text", "typed", "words"),
    [
        ("stu|", "stu", ["study"]),
        (f"{MODEL}    norm: |", "", ["rmsnorm", "layernorm"]),
        (f"{MODEL}    norm: {{type: rmsnorm, pl|", "pl", ["placement"]),
        (f"{MODEL}    norm: {{type: rmsnorm, placement: |}}", "", ["pre", "post", "sandwich"]),
        (f"{MODEL}    attention:\n      kv|", "kv", ["kv_heads"]),
        (f"{MODEL}    ffn:\n      type: glu\n      act|", "act", ["activation"]),
        ("model:\n  zoo: gpt_|", "gpt_", ["gpt_j", "gpt_neo", "gpt_neox"]),
        ("model:\n  zoo: llama\ntrain:\n  optimizer: {type: adamw, be|", "be", ["betas"]),
        ("train:\n  data:\n    type: std|", "std", ["stdlib"]),
        ("variants:\n  gated: {block.attention.ga|", "block.attention.ga", ["block.attention.gate"]),
        ("variants:\n  gated: {block.attention.gate: {posi|", "posi", ["position"]),
        ("variants:\n  fast:\n    train.opt|", "train.opt", ["train.optimizer"]),
        ("grid:\n  block.norm.placement: [pre, |", "", ["pre", "post", "sandwich"]),
        ("evaluate:\n  - bits|", "bits", ["bits_per_byte"]),
        ("evaluate: [accuracy, bits|", "bits", ["bits_per_byte"]),
        ("seeds: {mi|", "mi", ["min"]),
        ("tune: {|", "", ["lr"]),
        ("tune: |", "", ["{lr"]),
        ("variants:\n  a: {block.attention.gate: |", "", ["query", "key", "value", "sdpa", "dense", "none"]),
        ("report: ba|", "ba", ["{baseline"]),
        ("components:\n  gate: {}\n  # no\n  shift: {}\nvariants:\n  a: {}\n  b: [|", "", ["gate", "shift"]),
        ("components:\n  gate: {}\nvariants:\n  b:\n    - ga|\n", "ga", ["gate"]),
        ("report: {baseline: |}\nvariants:\n  base: {}\n  gated: {}\n", "", ["base", "gated"]),
        ("variants:\n  base: {}\nmatch: {parameters: ba|", "ba", ["base"]),
    ],
)
def test_what_may_stand_there_is_offered_the_nearest_first(text, typed, words):
    found, given = offered(text)
    assert found == typed and given[: len(words)] == words


def test_keys_that_are_there_already_and_other_places_offer_nothing_of_it():
    assert "study" not in offered("study: x\n|")[1] and "model" in offered("study: x\n|")[1]
    assert "d_model" not in offered("study: x\nmodel: {zoo: gpt2}\n|")[1], "the mapping above has ended"
    assert offered("# stu|")[1] == [] and offered('question: "stu|')[1] == []
    assert offered("study: |")[1] == [], "a name is free"


def test_every_place_of_the_template_can_be_asked():
    """Whatever is half written, an answer comes."""
    text = TEMPLATE.read_text()
    for place in range(0, len(text), 7):
        start, found = complete(text[:place], place)
        assert start <= place and all(each.word for each in found)


def test_it_says_what_a_word_means_and_needs_no_torch():
    _, found = complete("model:\n  block:\n    attention:\n      kv_h", 50)
    assert "arXiv:2305.13245" in found[0].doc and found[0].then == ": "
    code = """
import sys
from archlab.search.study.completion import complete
complete("s", 1)
print("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
