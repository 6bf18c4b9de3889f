"""Downstream tasks: what the harness is told is what the model says, and answers are counted as papers count them."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import random
import threading
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

from archlab.arch_dsl.compiler.generation import Sampling
from archlab.arch_dsl.language.errors import SpecError
from archlab.arch_dsl.language.parse import parse
from archlab.arch_dsl.language.source import read, read_text
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data.dataset import Dataset
from archlab.search.data.sources.family import Source
from archlab.search.data.tokenizers.family import Tokenizer
from archlab.search.evaluation.downstream import harness, sandbox
from archlab.search.evaluation.downstream.several_answers import majority, pass_at
from archlab.search.evaluation.downstream.suites import SUITES
from archlab.search.evaluation.downstream.text_model import TextModel, text_model
from archlab.search.evaluation.measures import Measure, Measures, Subject
from archlab.search.evaluation.measures.lm_eval import LmEval
from tests.search.downstream_kit import CONTEXT, byte_data, log_p, subject, task

ENDS = ("acc", "acc_norm", "n")
CHOICES = [
    {"q": "to be or not to", "choices": ["be", "question", "see"], "gold": 0},
    {"q": "whether 'tis", "choices": ["slings", "nobler"], "gold": 1},
    {"q": "that is the", "choices": ["question", "arrow", "be", "x"], "gold": 0},
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject(byte_data(tmp_path_factory.mktemp("data")))


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's data sets are cached in the test's own folder, and nothing is downloaded."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def text(asked: Subject, context: int = CONTEXT) -> TextModel:
    return text_model(asked, context)


def test_a_continuation_has_the_likelihood_of_its_tokens_one_after_another(asked: Subject) -> None:
    model = text(asked)
    pairs = [("to be", " or not"), ("t", "hat is the question"), ("x" * 90, "yz"), ("a", "b"), ("to be", " ")]
    tokens = [(model.encode(before), model.encode(after)) for before, after in pairs]
    best = int(asked.at(CONTEXT)(torch.tensor([tokens[0][0]]))[0, -1].argmax())
    tokens.append((tokens[0][0], [best]))
    for pair, (found, greedy) in zip(tokens, model.scores(tokens), strict=True):
        by_hand, likeliest = log_p(asked, *pair)
        assert found == pytest.approx(by_hand, abs=1e-4)
        assert greedy == likeliest
    assert model.scores(tokens)[-1][1], "the likeliest token is"


def test_a_text_longer_than_the_window_is_predicted_once_with_as_much_before_as_there_is(asked: Subject) -> None:
    model, eod = text(asked), asked.about.dataset.eod
    long = model.encode("the quick brown fox jumps over the lazy dog; " * 4)
    tokens, total = [eod, *long], 0.0
    place = 1
    while place < len(tokens):  # windows of CONTEXT predictions; the last one goes back for its context
        end = min(place + CONTEXT, len(tokens))
        start = max(end - 1 - CONTEXT, 0)
        with torch.no_grad():
            logits = asked.at(CONTEXT).eval()(torch.tensor([tokens[start : end - 1]]))[0].double().log_softmax(-1)
        total += sum(float(logits[i - 1 - start, tokens[i]]) for i in range(place, end))
        place = end
    assert model.scores([([eod], long)])[0][0] == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("most", [1, 7, 30])
def test_greedy_answers_are_those_of_reading_all_anew(asked: Subject, most: int) -> None:
    model = text(asked)
    prompts = [model.encode(prompt) for prompt in ("to be", "that is the question", "slin", "or no", "y" * 80)]
    plain = asked.at(CONTEXT).eval()
    for prompt, found in zip(prompts, model.continued(prompts, most), strict=True):
        tokens, own = prompt[-(CONTEXT - most) :], b""
        for _ in range(most):
            with torch.no_grad():
                token = int(plain(torch.tensor([tokens]))[0, -1].argmax())
            if token == asked.about.dataset.eod:
                break
            own += bytes([token])
            tokens = [*tokens, token]
        assert found == own.decode(errors="replace")


def test_an_answer_ends_before_the_first_of_the_strings_that_end_it(asked: Subject) -> None:
    model = text(asked)
    prompt = model.encode("to be")
    drawn = Sampling(temperature=3.0)
    whole = model.continued([prompt], 40, (), drawn, [5])[0]
    letters = [letter for letter in whole if letter.isascii()]  # other bytes may be no text by themselves
    late, early = letters[-1], letters[len(letters) // 2]
    for stops in ([late], [late, early, ""], [early], ["no such text"]):
        expected = whole
        for stop in filter(None, stops):
            expected = expected.partition(stop)[0]
        assert model.continued([prompt], 40, stops, drawn, [5])[0] == expected
    assert len(whole.partition(early)[0]) < len(whole.partition(late)[0]) < len(whole)


def test_what_is_drawn_depends_on_the_seed_alone_and_not_on_what_is_drawn_beside_it(asked: Subject) -> None:
    model, drawn = text(asked), Sampling(temperature=2.0, top_k=40, top_p=0.9)
    prompts = [model.encode(prompt) for prompt in ("to be", "to be", "slings", "to be")]
    together = model.continued(prompts, 12, (), drawn, [1, 2, 3, 1])
    alone = [
        model.continued([prompt], 12, (), drawn, [seed])[0] for prompt, seed in zip(prompts, [1, 2, 3, 1], strict=True)
    ]
    assert together == alone
    assert together[0] == together[3] != together[1]


def measured(asked: Subject, **options: Any) -> dict[str, float]:
    measure = parse(Measure, {"type": "lm_eval", **options})
    assert measure.refusal(asked.about) is None
    return measure.compute(asked).values


def choice_task(folder: Path) -> Path:
    metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
    said = {"doc_to_text": "{{q}}", "doc_to_target": "gold", "doc_to_choice": "choices", "metric_list": metrics}
    return task(folder, "choose", CHOICES, output_type="multiple_choice", **said)


def test_multiple_choice_is_right_where_the_right_choice_is_likeliest(asked: Subject, tmp_path: Path) -> None:
    found = measured(asked, tasks=[str(choice_task(tmp_path / "tasks"))])
    right, normed = [], []
    for row in CHOICES:
        logs = [log_p(asked, [*row["q"].encode()], [*f" {choice}".encode()])[0] for choice in row["choices"]]
        right.append(int(np.argmax(logs)) == row["gold"])
        lengths = [len(choice) for choice in row["choices"]]
        normed.append(int(np.argmax(np.array(logs) / lengths)) == row["gold"])
    assert found == {"choose_acc": np.mean(right), "choose_acc_norm": np.mean(normed), "choose_n": 3.0}
    limited = measured(asked, tasks=[str(tmp_path / "tasks")], limit=2)
    assert limited["choose_n_limit_2"] == 2.0
    assert limited["choose_acc_limit_2"] == np.mean(right[:2])


def test_a_task_that_shuffles_asks_all_trials_the_same(asked: Subject, tmp_path: Path) -> None:
    rows = [{"q": str(place), "a": "b"} for place in range(20)]
    file = generating(tmp_path / "tasks", "drawn", rows)
    (tmp_path / "tasks/draw.py").write_text(
        "import random\nimport numpy\n\ndef draw(rows):\n"
        "    return rows.select([random.randrange(20), numpy.random.randint(20)])\n"
    )
    file.write_text(file.read_text()[:-1] + ', "process_docs": !function draw.draw}')
    told = []
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate()
        with harness.quiet():
            found, _, _ = harness.load([str(file)], None)
            told.append([row["q"] for row in found["drawn"].test_docs()])
        assert random.getstate() == before
    assert len(told[0]) == 2 and told[0] == told[1] == told[2]


def test_a_group_is_one_number_and_a_tag_stands_for_its_tasks(
    asked: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tasks"
    said = json.loads(choice_task(folder).read_text())
    (folder / "choose.yaml").unlink()
    for name in ("first", "second"):
        (folder / f"{name}.yaml").write_text(json.dumps({**said, "task": name, "tag": "both"}))
    mean = [{"metric": "acc", "weight_by_size": True}]
    (folder / "whole.yaml").write_text(
        json.dumps({"group": "whole", "task": ["first", "second"], "aggregate_metric_list": mean})
    )
    (folder / "loose.yaml").write_text(json.dumps({"group": "loose", "task": ["first"]}))
    monkeypatch.chdir(folder)  # where the harness looks for data of its own tasks
    known = TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(harness, "index", lambda: known)
    single = measured(asked, tasks=["first"])
    assert measured(asked, tasks=["whole"]) == {"whole_acc": single["first_acc"], "whole_n": 6.0}
    assert set(measured(asked, tasks=["both"])) == {f"{name}_{end}" for name in ("first", "second") for end in ENDS}
    assert measured(asked, tasks=["loose"]) == single
    assert len(harness.says("whole")) == len(harness.says("both")) == 2
    assert measured(asked, tasks=["both"], samples=3)["first_acc_samples_3"] == single["first_acc"]


def test_shots_stand_before_a_question(asked: Subject, tmp_path: Path) -> None:
    file = choice_task(tmp_path / "tasks")
    bare, shown = measured(asked, tasks=[str(file)]), None
    text_of: list[str] = []
    encode = TextModel.encode

    def noted(self: TextModel, string: str) -> list[int]:
        text_of.append(string)
        return encode(self, string)

    TextModel.encode = noted  # type: ignore[method-assign]
    try:
        shown = measured(asked, tasks=[str(file)], shots=1)
    finally:
        TextModel.encode = encode  # type: ignore[method-assign]
    assert set(shown) == {f"{name}_shots_1" for name in bare}
    assert all("\n\n" in string for string in text_of), "an example, then the question"


def test_a_text_task_counts_its_bytes_and_words(asked: Subject, tmp_path: Path) -> None:
    texts = ["to be or not to be, that is the question" * 3, "slings and arrows"]
    metrics = [{"metric": metric} for metric in ("word_perplexity", "bits_per_byte")]
    said = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    file = task(tmp_path / "tasks", "read", [{"text": each} for each in texts], **said, metric_list=metrics)
    found = measured(asked, tasks=[str(file)])
    eod = asked.about.dataset.eod
    total = sum(text(asked).scores([([eod], [*each.encode()])])[0][0] for each in texts)
    words, size = sum(len(each.split()) for each in texts), sum(map(len, texts))
    assert found["read_bits_per_byte"] == pytest.approx(-total / math.log(2) / size, rel=1e-6)
    assert found["read_word_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-6)


def generating(folder: Path, name: str, rows: list[dict[str, Any]], **said: Any) -> Path:
    kwargs = {"until": ["\n"], "max_gen_toks": 3, **said.pop("generation_kwargs", {})}
    plain = {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "metric_list": [{"metric": "exact_match"}]}
    return task(folder, name, rows, output_type="generate_until", generation_kwargs=kwargs, **{**plain, **said})


def test_an_answer_that_is_generated_is_compared(asked: Subject, tmp_path: Path) -> None:
    model = text(asked)
    rows = [{"q": q, "a": model.continued([model.encode(q)], 3, ["\n"])[0]} for q in ("to be", "slings", "that")]
    rows[1]["a"] = "something else"
    found = measured(asked, tasks=[str(generating(tmp_path / "tasks", "answer", rows))])
    assert found == {"answer_exact_match": pytest.approx(2 / 3), "answer_n": 3.0}


def test_several_samples_give_pass_at_k_and_the_majority(asked: Subject, tmp_path: Path) -> None:
    rows = [{"q": q, "a": "t"} for q in ("to be", "slings", "that is", "nobler")]
    file = generating(tmp_path / "tasks", "one", rows, generation_kwargs={"max_gen_toks": 1})
    options = {"tasks": [str(file)], "samples": 6, "temperature": 1.5, "pass_at": [1, 3], "maj_at": [3]}
    found, again = measured(asked, **options), measured(asked, **options)
    assert found == again
    end = "_samples_6_t_1.5"
    assert found[f"one_exact_match_pass_at_1{end}"] == pytest.approx(found[f"one_exact_match{end}"])
    assert found[f"one_exact_match_pass_at_3{end}"] >= found[f"one_exact_match{end}"]
    assert 0 <= found[f"one_exact_match_maj_at_3{end}"] <= 1
    assert found[f"one_n{end}"] == 4


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_chance_that_one_of_k_of_them_is_right(samples: int) -> None:
    for right in range(samples + 1):
        for k in range(1, samples + 1):
            draws = [any(place < right for place in chosen) for chosen in combinations(range(samples), k)]
            assert pass_at(k, right, samples) == pytest.approx(sum(draws) / len(draws))
    with pytest.raises(ValueError, match="pass@9 needs as many samples"):
        pass_at(9, 1, samples)


@pytest.mark.parametrize(
    ("k", "answers", "expected"),
    [(3, "aab", 1.0), (3, "abb", 0.0), (2, "ba", 0.0), (2, "abba", 0.5), (2, "aabbb", 0.5), (1, "ab", 0.5)],
)
def test_the_majority_is_the_most_frequent_answer_and_of_equals_the_first(
    k: int, answers: str, expected: float
) -> None:
    assert majority(k, answers, [float(answer == "a") for answer in answers]) == expected


@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("import os; os._exit(0)", False),
        ("raise SystemExit(0)", False),
        ("x = bytearray(3 << 30)", False),
        ("open('big', 'wb').write(b'x' * (4 << 20))", False),
        ("import os; assert not [n for n in os.environ if n != 'LC_CTYPE'] and not os.listdir('.')", True),
        ("while True: pass", False),
        ("def f(:", False),
    ],
)
def test_a_program_passes_that_comes_to_its_end_within_its_limits(program: str, passes: bool) -> None:
    assert sandbox.run(program, seconds=2).passed == passes


def test_nothing_that_a_program_starts_outlives_it(tmp_path: Path) -> None:
    path = tmp_path / "held"
    waits = f"while not os.path.exists({str(path)!r}):\n    time.sleep(0.01)\n"
    child = f"    fcntl.flock(open({str(path)!r}, 'w'), fcntl.LOCK_EX) or time.sleep(3600)\n"
    sandbox.run(f"import fcntl, os, time\nif os.fork() == 0:\n{child}{waits}")  # only root may fork there
    with path.open("w") as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)


def test_a_program_without_a_network_reaches_none() -> None:
    if not sandbox.has_no_network():
        pytest.skip("this system gives programs no network of their own")
    tries = "import socket\ns = socket.socket()\ns.settimeout(1)\ns.connect(('127.0.0.1', 9))"
    assert not sandbox.run(tries).passed
    alone = "import os\nassert os.listdir('/proc/self/net') and open('/proc/self/net/dev').read().count(':') == 1"
    assert sandbox.run(alone).passed, "it has the loopback device alone"


def test_generated_programs_run_only_where_that_is_allowed(asked: Subject, tmp_path: Path) -> None:
    rows = [{"q": "to be", "a": "pass"}, {"q": "slings", "a": "assert False"}]
    folder = tmp_path / "tasks"
    (folder / "code.py").parent.mkdir()
    (folder / "code.py").write_text(
        "def programs(resps, docs):\n    return [['x = 1' for _ in resp] for resp in resps]\n"
    )
    file = generating(folder, "programs", rows, unsafe_code=True)
    kept = '"filter_list": [{"name": "made", "filter": [{"function": "custom", "filter_fn": !function code.programs}]}]'
    file.write_text(file.read_text()[:-1] + f", {kept}}}")
    why = parse(Measure, {"type": "lm_eval", "tasks": [str(file)]}).refusal(asked.about)
    assert why == "programs runs programs that the model writes; `run_code: true` allows it"
    with pytest.raises(ValueError, match="run_code"):
        LmEval(tasks=(str(file),)).compute(asked)
    found = measured(asked, tasks=[str(file)], run_code=True)
    alone = float(sandbox.has_no_network())
    told = {"programs_n": 2.0, "programs_no_network": alone, "programs_pass": 0.5, "programs_pass_pass_at_1": 0.5}
    assert found == told


def test_any_tokenizer_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "\n\n".join(f"{n} to be or not to be, that is the question" * 20 for n in range(60))
    )
    source = parse(Source, {"text": f"{tmp_path}/a.txt"})
    made = subject(prepared(source, tmp_path))
    model = text(made)
    before, after = "to be or not", " to be"
    assert len(model.encode(before + after)) < len(before + after), "tokens are pieces of words"
    pair = harness.HarnessModel(model)._encode_pair(before + " ", "to be")
    assert [*pair[0], *pair[1]] == model.encode(before + after)
    assert model.scores([pair])[0][0] == pytest.approx(log_p(made, *pair)[0], abs=1e-4)
    assert model.continued([model.encode(before)], 4)[0]


def prepared(source: Any, folder: Path) -> Dataset:
    from archlab.search.data import prepare

    return prepare(source, parse(Tokenizer, {"type": "bpe", "vocab": 300}), folder / "store", base=folder)


def named(plain: str, file: str = "study.yaml") -> Measures:
    problems: list[Any] = []
    found = Measures.parse_node(read_text(plain, file), "evaluate", problems)
    if problems:
        raise SpecError(problems)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ("{lm_eval: {shots: 1}}", "names no task"),
        ("{lm_eval: {suite: fox_shrt}}", "'fox_shrt' is not a suite; did you mean 'fox_short'?"),
        ("{lm_eval: [piqa, piqa]}", "names piqa twice"),
        ("{lm_eval: {tasks: [gsm8k], samples: 4, temperature: 0}}", "at 0 all samples are the same"),
        ("{lm_eval: {tasks: [gsm8k], samples: 4, pass_at: [8]}}", "asks for more than the 4 samples"),
        ("{lm_eval: {tasks: [gsm8k], top_p: 1.5}}", "must be at most 1, found 1.5"),
        ("lm_eval", "names no task"),
    ],
)
def test_what_a_task_cannot_mean_is_refused_where_it_stands(plain: str, told: str) -> None:
    with pytest.raises(SpecError) as error:
        named(plain)
    assert told in str(error.value)


def test_tasks_are_found_beside_the_study_and_known_by_what_they_hold(asked: Subject, tmp_path: Path) -> None:
    choice_task(tmp_path / "tasks")
    (tmp_path / "study.yaml").write_text("{lm_eval: [tasks/choose.yaml, piqa]}\n")
    problems: list[Any] = []
    (found,) = Measures.parse_node(read(tmp_path / "study.yaml"), "evaluate", problems)
    assert (problems, found.tasks) == ([], (str(tmp_path / "tasks/choose.yaml"), "piqa"))
    assert found.label == "lm_eval_choose_piqa"
    assert named(f"[{canonical_text(found)}]")[0] == found, "a record of a study is read as it was written"
    before = found.digest("data")
    (tmp_path / "tasks").rename(tmp_path / "moved")
    moved = LmEval(tasks=(str(tmp_path / "moved/choose.yaml"), "piqa"))
    assert moved.digest("data") == before
    assert "is no task file" in (LmEval(tasks=(found.tasks[0],)).refusal(asked.about) or "")
    (tmp_path / "moved/choose.jsonl").write_text('{"q": "other", "choices": ["a", "b"], "gold": 1}\n')
    assert moved.digest("data") != before
    (tmp_path / "moved/choose.jsonl").unlink()
    assert "names data that are not there" in (LmEval(tasks=moved.tasks[:1]).refusal(asked.about) or "")


def canonical_text(measure: Measure) -> str:
    return json.dumps(canonical(measure))


def test_a_task_that_nobody_knows_or_a_model_that_does_not_go_on_is_refused(
    asked: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked = subject(asked.about.dataset, objective="prefix").about
    assert "its objective must be causal" in (LmEval(tasks=("piqa",)).refusal(masked) or "")

    monkeypatch.setattr(harness, "names", lambda: ["hellaswag", "piqa"])
    monkeypatch.setattr(harness, "says", lambda task: [{"task": task}])
    told = LmEval(tasks=("helaswag",)).refusal(asked.about)
    assert told is not None
    assert told.startswith("'helaswag' is none of the 2 tasks of lm-evaluation-harness; did you mean 'hellaswag'?")
    assert LmEval(tasks=("piqa",)).refusal(asked.about) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert LmEval(tasks=("piqa",)).refusal(asked.about) == (
        "needs lm-evaluation-harness: pip install 'archlab[lm-eval]'"
    )


def test_data_that_cannot_be_had_are_the_measures_own_failure(asked: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> Any:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(harness, "load", unreachable)
    with pytest.raises(RuntimeError, match="the data of piqa can't be had: no route to the hub"):
        LmEval(tasks=("piqa",)).compute(asked)
    assert LmEval(tasks=("piqa",)).facts.keys() == {"lm-eval"}


def test_what_waits_without_a_forward_pass_is_seen_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_BEAT_S", 0.001)
    seen = threading.Event()
    with harness.awake(seen.set):
        assert seen.wait(60)
    with harness.awake(seen.set, most_s=-1.0):
        seen.clear()
    assert not seen.is_set(), "not for ever"


def test_a_suite_averages_the_accuracies_of_its_table() -> None:
    suite = SUITES["fox_slimpajama"]
    told = {task: {"acc": 0.2, "acc_norm": 0.6, "n": 3.0} for task in suite.tasks}
    found = LmEval(suite="fox_slimpajama", limit=3)._average(told)
    assert found == {"fox_slimpajama_avg_limit_3": pytest.approx((4 * 0.2 + 2 * 0.6) / 6)}
    assert LmEval(suite="fox_slimpajama")._average({"piqa": {"acc": 0.5}}) == {}
    assert all(set(each.averaged) <= set(each.tasks) for each in SUITES.values())
    assert len(SUITES["fox_long"].tasks) == 14
