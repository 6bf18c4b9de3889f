"""Stages: they go on from the weights before them, freeze what they say, and are continued to the same bits."""

import hashlib
import json

import numpy as np
import pytest
import torch

from archlab.arch_dsl import canonical, load, resolve
from archlab.arch_dsl.language.errors import SpecError
from archlab.search.comparison.notes import stage_notes
from archlab.search.planning import estimate as estimates
from archlab.search.planning.plan import plan
from archlab.search.recipe.recipe import load_recipe
from archlab.search.recipe.stages import parts
from archlab.search.sections.budget.spec import attempt_spent
from archlab.search.study.load import load_study
from archlab.search.training import compiling
from archlab.search.training.loop import Loop
from archlab.search.training.shared_beginnings import shared_stage
from archlab.search.training.train import Interrupted, train
from archlab.search.trial import checkpoint
from archlab.search.trial.fingerprint import fingerprint
from archlab.search.trial.journal import events
from archlab.search.trial.trial import Trial
from archlab.search.utils.canonical import canonical_json
from tests.search.study_files import write_study
from tests.search.training.test_train import data_root, lines, measures, one_thread  # noqa: F401  # fixtures

MODEL = {
    "d_model": 16,
    "n_layers": 2,
    "block": {"norm": "rmsnorm", "attention": {"heads": 2, "positional": "rope"}, "ffn": {"type": "glu"}},
}
ADAPTED = {
    "tokens": 4 * 64,
    "lr": 0.01,
    "objective": "prefix",
    "model": {
        "block.attention.mask": "prefix",
        "block.*.post": {"append": [{"type": "adapter", "width": 3}, {"type": "dropout", "rate": 0.2}]},
    },
    "trainable": ["*.adapter.*"],
}
RECIPE = {"tokens": 6 * 64, "context": 16, "batch": 4, "lr": 0.02}


def make(folder, **recipe):
    """A folder for a trial with stages."""
    folder.mkdir()
    model = canonical(resolve(load(MODEL), vocab=257, max_positions=16))
    trial = Trial(model, canonical(load_recipe(RECIPE | recipe)), "data", 0)
    (folder / "trial.json").write_text(trial.to_json())
    return folder


def run(folder, root, attempt=1, steps=None, **options):
    calls = iter(range(1, 10**6))
    return train(folder, root, attempt, lambda: steps is not None and next(calls) >= steps, **options)


def weights(folder):
    return checkpoint.load(folder, checkpoint.steps_in(folder)[0])["model"]


def same(first, second):
    """Whether two trials agree in every bit that is no timing."""
    return (digest(first), lines(first), measures(first)) == (digest(second), lines(second), measures(second))


def digest(folder):
    data = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(weights(folder).items()))
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def store(tmp_path, data_root):  # noqa: F811
    """The folder of data sets of a store of its own, in which no stage was trained."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "data").symlink_to(data_root)
    return tmp_path / "store" / "data"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data_root):  # noqa: F811
    """A trial of three stages that was never interrupted."""
    folder = make(tmp_path_factory.mktemp("trials") / "whole", stages=[ADAPTED, {"tokens": 3 * 64, "lr": 0.005}])
    run(folder, data_root)
    return folder


def test_a_stage_goes_on_from_the_weights_before_it_and_freezes_the_rest(tmp_path, store):
    first, both = make(tmp_path / "first"), make(tmp_path / "both", stages=[ADAPTED])
    run(first, store)
    result = run(both, store)
    before, after = weights(first), weights(both)
    new = after.keys() - before.keys()
    assert {name.split(".")[-3] for name in new} == {"adapter"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(bool(after[name].any()) for name in new)
    assert (result["step"], result["tokens"]) == (10, 10 * 64)
    assert [stage["step"] for stage in result["stages"]] == [6, 10]
    alone = json.loads((first / "result.json").read_text())
    assert result["stages"][0]["test"] == alone["test"]
    assert result["test"] != alone["test"]


def test_a_stage_of_no_tokens_is_tested_with_what_it_changes(tmp_path, store):
    stretched = {"type": "rope", "scaling": {"type": "linear", "factor": 2}}
    beyond = {"tokens": 0, "context": 32, "model": {"block.attention.positional": stretched}}
    first, both = make(tmp_path / "first"), make(tmp_path / "both", stages=[beyond])
    run(first, store)
    result = run(both, store)
    assert digest(both) == digest(first)
    assert lines(both) == lines(first)
    assert (result["step"], result["tokens"]) == (6, 6 * 64)
    alone = json.loads((first / "result.json").read_text())
    assert [stage["test"] == alone["test"] for stage in result["stages"]] == [True, False]
    same_context = make(tmp_path / "other", stages=[beyond | {"model": {}}])
    assert run(same_context, store)["test"] not in (alone["test"], result["test"])


def test_what_follows_a_stage_of_no_tokens_goes_on_from_the_one_before(tmp_path, store):
    stages = [{"tokens": 0, "context": 8}, {"tokens": 2 * 64, "lr": 0.01, "context": 16}]
    straight, stopped = (make(tmp_path / name, stages=stages) for name in ("straight", "stopped"))
    result = run(straight, store)
    assert [stage["step"] for stage in result["stages"]] == [6, 6, 8]
    assert [line["step"] for line in lines(straight) if "loss" in line] == list(range(1, 9))
    with pytest.raises(Interrupted):
        run(stopped, store, 1, steps=1)
    run(stopped, store, 2)
    assert same(stopped, straight)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("{tokens: 1k}", r"stages\.0\.lr: is missing: stage needs it"),
        ("{tokens: 0}", r"stages\.0\.tokens: must be at least 1, found 0, in a stage that changes none of model, data"),
        ("{tokens: 0, context: 64, trainable: [final.*]}", r"stages\.0\.trainable: stands in a stage of no tokens"),
        ("{tokens: 0, context: 64, z_loss: 0}", r"stages\.0\.z_loss: stands in a stage of no tokens"),
    ],
    ids=str,
)
def test_a_stage_of_no_tokens_says_nothing_of_training(tmp_path, stage, message):
    with pytest.raises(SpecError, match=message):
        planned(tmp_path, stage)


def test_a_stage_without_changes_trains_on(whole):
    found = [line for line in lines(whole) if "loss" in line]
    assert [line["step"] for line in found] == list(range(1, 14))
    assert [line["tokens"] for line in found] == [64 * step for step in range(1, 14)]
    assert max(line["lr"] for line in found[10:]) == 0.005


@pytest.mark.parametrize("stops", [[3], [6], [8], [2, 5, 4]], ids=str)
def test_continued_stages_have_the_bits_of_those_that_never_stopped(tmp_path, store, whole, stops):
    folder = make(tmp_path / "parts", stages=[ADAPTED, {"tokens": 3 * 64, "lr": 0.005}])
    for attempt, steps in enumerate(stops, start=1):
        with pytest.raises(Interrupted):
            run(folder, store, attempt, steps)
    run(folder, store, len(stops) + 1)
    assert "taken_over" not in {event["event"] for event in events(folder)}
    assert same(folder, whole)


@pytest.mark.parametrize("pauses", [[3], [6, 7], [2, 10], [8, 12]], ids=str)
def test_stages_that_pause_on_the_way_have_the_bits_of_those_that_never_did(tmp_path, store, whole, pauses):
    folder = make(tmp_path / "parts", stages=[ADAPTED, {"tokens": 3 * 64, "lr": 0.005}])
    for attempt, until in enumerate(pauses, start=1):
        told = run(folder, store, attempt, until=until)
        assert (told["state"], told["step"], told["tokens"]) == ("paused", until, until * 64)
    run(folder, store, len(pauses) + 1)
    assert same(folder, whole)


def test_a_trial_pauses_within_a_stage_that_another_one_trained(tmp_path, store, whole):
    stages = [ADAPTED, {"tokens": 3 * 64, "lr": 0.005}]
    run(make(tmp_path / "first", stages=stages), store)
    folder = make(tmp_path / "second", stages=stages)
    for attempt, until in enumerate([4, 4, 8, 11], start=1):
        told = run(folder, store, attempt, until=until)
        losses = {line["step"]: line["validation_loss"] for line in lines(whole) if "validation_loss" in line}
        assert (told["step"], told["validation"]["loss"]) == (until, losses[until])
    run(folder, store, 5)
    assert same(folder, whole)


def test_trials_that_begin_alike_train_it_once(tmp_path, store, whole):
    later = {"tokens": 3 * 64, "lr": 0.005}
    first, second = (make(tmp_path / name, stages=stages) for name, stages in (("a", [later]), ("b", [ADAPTED, later])))
    run(first, store)
    with pytest.raises(Interrupted):
        run(second, store, 1, steps=2)  # in its second stage, as the first is there
    assert attempt_spent(second, 1, gpus=0.0)["tokens"] == 2 * 64, "not what another trial trained"
    run(second, store, 2)
    assert [(e["event"], e.get("stage"), e["step"]) for e in events(second)] == [
        ("taken_over", 0, 6),
        ("resumed", None, 8),
    ]
    assert same(second, whole)
    assert attempt_spent(second, 2, gpus=0.0)["tokens"] == 5 * 64


def test_a_damaged_stage_is_trained_again(tmp_path, store, whole):
    later = {"tokens": 3 * 64, "lr": 0.005}
    run(make(tmp_path / "a", stages=[later]), store)
    (kept,) = store.parent.glob("stages/*/checkpoint-6.pt")
    kept.write_bytes(kept.read_bytes()[:-9])
    second = make(tmp_path / "b", stages=[ADAPTED, later])
    run(second, store)
    assert same(second, whole)


def test_waits_for_a_stage_that_another_process_trains(tmp_path, store, whole):
    second = make(tmp_path / "b", stages=[ADAPTED, {"tokens": 3 * 64, "lr": 0.005}])
    trial = Trial.from_json((second / "trial.json").read_text())
    asked = iter([False, True])
    with (
        shared_stage(store.parent / "stages", trial, 0, "cpu", lambda: None),
        pytest.raises(Interrupted, match="another"),
    ):
        train(second, store, 1, lambda: next(asked))
    run(second, store, 2)
    assert same(second, whole)


def test_a_compiled_stage_is_not_shared_with_one_that_is_not(tmp_path, monkeypatch):
    def place(name, **recipe):
        trial = Trial.from_json((make(tmp_path / name, stages=[ADAPTED], **recipe) / "trial.json").read_text())
        with shared_stage(tmp_path / "stages", trial, 0, "cpu", lambda: None) as found:
            return found.name

    def machines(word):
        off, blocks = place(f"{word}-off"), place(f"{word}-blocks", compile="blocks")
        return off.split("-"), blocks.split("-")

    monkeypatch.setattr(compiling, "cannot_compile", lambda: "g++ not found")
    off, without = machines("without")
    alike = hashlib.sha256(canonical_json(fingerprint("cpu")).encode()).hexdigest()
    assert off[1] == alike[:16], "where nothing is compiled stages lie where they lay"
    monkeypatch.setattr(compiling, "cannot_compile", lambda: None)
    monkeypatch.setattr(compiling, "_version", lambda program: "g++ 13")
    again, compiled = machines("with")
    assert again == off
    assert compiled[0] == without[0]
    assert len({off[1], without[1], compiled[1]}) == 3


STUDY = """\
train:
  data: {text: corpus.txt}
  tokens: 1k
  context: 32
  batch: 4
  lr: 1e-3
  stages:
    - """


def planned(folder, stage):
    return plan(load_study(write_study(folder, train=STUDY + stage)), folder / "data")


def key(folder, stage):
    return planned(folder, stage).variants[0].trial(0).key


def test_a_plan_counts_what_a_stage_trains(tmp_path):
    (stage,) = (
        planned(tmp_path, "{tokens: 1k, lr: 1e-4, trainable: ['final.*', '*.query_projection.*']}").variants[0].stages
    )
    assert (stage.trained, stage.parameters) == (
        64 + 64 * 64,
        planned(tmp_path, "{tokens: 1k, lr: 1e-4}").variants[0].parameters,
    )


def test_prompts_and_prefixes_can_be_all_that_is_trained(tmp_path, data_root):  # noqa: F811
    change = {"prompt": 4, "block.attention.memory": 2}
    stage = {"tokens": 4 * 64, "lr": 0.01, "model": change, "trainable": ["prompt", "*.memory.*"]}
    first, both = make(tmp_path / "first"), make(tmp_path / "both", stages=[stage])
    run(first, data_root)
    result = run(both, data_root)
    before, after = weights(first), weights(both)
    assert after.keys() - before.keys() == {"prompt"} | {
        f"block.{layer}.attention.memory.{name}" for layer in (0, 1) for name in ("keys", "values")
    }
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert result["parameters"] == sum(value.numel() for value in before.values()) + 4 * 16 + 2 * 2 * 2 * 16
    text = "{tokens: 1k, lr: 1e-4, model: {prompt: 4, block.attention.memory: 2}, trainable: [prompt, '*.memory.*']}"
    (found,) = planned(tmp_path, text).variants[0].stages
    assert found.trained == 4 * 64 + 2 * 2 * 64


def test_a_stage_changes_the_model_in_the_order_that_is_written(tmp_path):
    adapter, dropout = "{append: {type: adapter, width: 3}}", "{append: {type: dropout, rate: 0.1}}"
    added = [f"block.ffn.post: {adapter}", f"block.*.post: {dropout}"]
    found = []
    for changes in (added, added[::-1]):
        (variant,) = planned(tmp_path, f"{{tokens: 1k, lr: 1e-4, model: {{{', '.join(changes)}}}}}").variants[:1]
        trial = Trial.from_json(variant.trial(0).to_json())
        last = parts(load_recipe(trial.recipe | {"data": "stdlib"}), trial)[-1].model
        found.append([post["type"] for post in last["block"][1]["post"]])
    assert found == [["adapter", "dropout"], ["dropout", "adapter"]]


def test_a_stage_ends_a_loss_on_the_normaliser():
    recipe = load_recipe(RECIPE | {"z_loss": 1e-4, "stages": [{"tokens": 64, "lr": 0.01, "z_loss": 0}]})
    assert [each.z_loss for each in recipe.whole] == [1e-4, 0.0]


def test_every_variant_has_the_positions_of_its_own_prompts(tmp_path):
    text = "{tokens: 1k, lr: 1e-4, model: {prompt: 4}}\n    - {tokens: 1k, lr: 1e-4, context: 40}"
    more = "variants:\n  baseline: {}\n  more: {train.stages.0.model: {prompt: 64}}"
    found = plan(load_study(write_study(tmp_path, train=STUDY + text, variants=more)), tmp_path / "data")
    assert [variant.model.max_positions for variant in found.variants] == [44, 104]


def test_a_stage_reads_in_an_order_of_its_own(tmp_path, store, monkeypatch):
    orders, whole = [], Loop.__init__
    monkeypatch.setattr(Loop, "__init__", lambda self, *given: (orders.append(given[6]), whole(self, *given))[1])
    run(make(tmp_path / "both", stages=[{"tokens": 64, "lr": 0.01}]), store)
    assert len(set(orders)) == 2


def test_an_estimate_counts_the_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "_product_rate", lambda: 1e6)
    one, two, three = (
        estimates.estimate(planned(tmp_path, f"{{tokens: {count}, lr: 1e-4}}"), tmp_path, 1).core_s
        for count in ("1k", "2k", "3k")
    )
    assert three - two == pytest.approx(two - one)  # the starts and the evaluations of all four trials are the same


def test_an_estimate_counts_the_held_out_text(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "_product_rate", lambda: 1e6)
    for number in range(200):
        (tmp_path / f"part{number}.txt").write_text(f"{number} words of a file\n" * 20)
    train = "train: {data: {text: part*.txt, test_bytes: %s}, tokens: 1k, context: 32, batch: 4, lr: 1e-3}"
    few, many = (plan(load_study(write_study(tmp_path, train=train % n)), tmp_path / "data") for n in ("2k", "6k"))
    fewer, more = (sum(each.variants[0].dataset.tokens[s] for s in ("validation", "test")) for each in (few, many))
    assert more > fewer + 2000
    flops = [variant.flops_per_token for variant in many.variants]
    added = len(many.seeds) * sum(flops) * (more - fewer) / (0.25 * 1e6)  # forward alone
    assert estimates.estimate(many, tmp_path, 1).core_s - estimates.estimate(few, tmp_path, 1).core_s == pytest.approx(
        added
    )


def test_a_report_says_what_followed(tmp_path):
    record = planned(tmp_path, "{tokens: 1k, lr: 1e-4, name: later, objective: prefix}").record()
    (note,) = stage_notes(record)
    assert note == "then later: 1,000 tokens of text: corpus.txt, prefix, all parameters"
    record["variants"][1].pop("stages")
    assert list(stage_notes(record)) == [f"baseline: {note}"]


def test_all_of_a_stage_but_its_name_is_part_of_a_trial(tmp_path):
    plain = key(tmp_path, "{tokens: 1k, lr: 1e-4}")
    assert key(tmp_path, "{tokens: 1k, lr: 1e-4, name: later}") == plain
    (tmp_path / "more.txt").write_text("\n".join(f"{n} other words\nof another text " * 9 for n in range(400)))
    adapter = "model: {block.ffn.post: [{type: adapter, width: 2}]}"
    changes = (
        "tokens: 2k", "lr: 2e-4", "objective: prefix", "context: 16", "batch: 2", "accumulate: 2", "optimizer: lion",
        "schedule: linear", "clip: 0.5", "precision: bf16", "z_loss: 0.1", "trainable: [final.*]", adapter,
        "data: {text: more.txt}",
    )  # fmt: skip
    found = set()
    for change in changes:
        given = {"tokens": "tokens: 1k", "lr": "lr: 1e-4"} | {change.split(":")[0]: change}
        found.add(key(tmp_path, "{" + ", ".join(given.values()) + "}"))
    assert len(found | {plain}) == len(changes) + 1


def test_a_stage_reads_the_tokens_that_were_trained_before_it(tmp_path):
    (np.random.default_rng(0).integers(0, 40, 9000)).astype("<u2").tofile(tmp_path / "tokens.bin")
    alike, other = (f"{{tokens: tokens.bin, dtype: uint16, vocab: {vocab}, eod: 0}}" for vocab in (40, 41))
    stage = "{tokens: 1k, lr: 1e-4, data: DATA}"
    with pytest.raises(SpecError, match=r"stages\.0\.data: has 41 tokens, .* before it were 257 and 256"):
        planned(tmp_path, stage.replace("DATA", other))
    of_tokens = STUDY.replace("{text: corpus.txt}", alike)
    for data, wrong in ((other, "before it were 40 and 0"), ("{text: corpus.txt}", "is text, and what was trained")):
        with pytest.raises(SpecError, match=wrong):
            plan(load_study(write_study(tmp_path, train=of_tokens + stage.replace("DATA", data))), tmp_path / "data")
    plan(load_study(write_study(tmp_path, train=of_tokens + stage.replace("DATA", alike))), tmp_path / "data")


WRONG = {
    "{lr: 1e-4}": r"train\.stages\.0\.tokens: is missing",
    "{tokens: 1k, lr: 1e-4, trainable: [finl.*]}": r"stages\.0\.trainable: 'finl\.\*' matches no parameter",
    "{tokens: 1k, lr: 1e-4, trainable: ['*.atention.*']}": r"'\*\.atention\.\*' matches no .*'\*\.attention\.\*'\?",
    "{tokens: 1k, lr: 1e-4, model: {block.ffn.width: 9}}": r"stages\.0\.model: block\.0\.ffn\..* a stage keeps sizes",
    "{tokens: 1k, lr: 1e-4, model: {block.fn.width: 9}}": r"stages\.0\.model\.block\.fn.* did you mean 'ffn'",
    "{tokens: 1k, lr: 1e-4, model: {block.attention.mask: full}}": r"full reads the tokens that causal predicts",
    "{tokens: 1k, lr: 1e-4, accumulate: 3}": r"train\.stages\.0\.accumulate: must divide batch",
    "{tokens: 1k, lr: 1e-4, prepared: 0a}": r"train\.stages\.0\.prepared: is what planning finds out of `data`",
    "{tokens: 1k, lr: 1e-4, epochs: 3}": r"'epochs' is not a key of stage",
}


@pytest.mark.parametrize("stage", WRONG)
def test_refuses(tmp_path, stage):
    with pytest.raises(SpecError, match=WRONG[stage]):
        planned(tmp_path, stage)
