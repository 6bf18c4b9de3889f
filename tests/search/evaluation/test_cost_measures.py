"""Memorisation, spikes and what training and decoding cost: each against what is known of a tiny model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archlab import arch_dsl
from archlab.arch_dsl.tree.identity import canonical
from archlab.search.data import mixing
from archlab.search.evaluation.measures import Measure, Subject
from archlab.search.evaluation.measures.decoding import Decoding
from archlab.search.evaluation.measures.loss_spikes import LossSpikes
from archlab.search.evaluation.measures.memorisation import Memorisation
from archlab.search.evaluation.measures.speed import Speed, flops_of, training_flops
from archlab.search.hardware.peaks import PEAKS, joules, known_peak, measured_peak, rapl_joules
from archlab.search.sections.evaluate.told import TIMED, is_timed
from archlab.search.training.module import seeds_of
from archlab.search.trial.spikes import spikes
from archlab.search.trial.trial import Trial
from tests.search.downstream_kit import CONTEXT, byte_data, subject


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject(byte_data(tmp_path_factory.mktemp("data")))


def in_folder(asked: Subject, folder: Path, **recipe: Any) -> Subject:
    """The same with a folder that has the trial's spec."""
    about = replace(asked.about, recipe=asked.about.recipe.replace(**recipe))
    trial = Trial(canonical(about.model), canonical(about.recipe), about.dataset.identity, 4)
    (folder / "trial.json").write_text(trial.to_json())
    return replace(asked, about=about, folder=folder)


@pytest.mark.slow
def test_what_a_model_learned_by_heart_is_extracted_and_what_it_has_not_seen_is_not(tmp_path: Path) -> None:
    """A model is trained on the windows of a trial until it knows them, and asked for them."""
    draw = np.random.default_rng(0)
    texts = {name: [bytes(draw.integers(97, 123, 900).tolist())] for name in ("train", "validation", "test")}
    own = in_folder(subject(byte_data(tmp_path / "random", texts)), tmp_path, tokens=4 * CONTEXT, batch=4)
    recipe, streams = own.about.recipe, own.about.dataset.streams()
    trial = Trial.from_json((tmp_path / "trial.json").read_text())
    rows = torch.from_numpy(mixing.rows(streams, seeds_of(trial, recipe).data, 0, 4, CONTEXT))
    torch.manual_seed(0)
    model = arch_dsl.compile(own.about.model, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(300):
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        if loss.item() < 0.05:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    measure = Memorisation(prompt=20, continuation=12, sequences=50)
    learned = measure.compute(replace(own, weights=dict(model.state_dict())))
    end = "_prompt_20_for_12_of_50"
    with torch.no_grad():
        known = []
        for row in rows:
            tokens = row[:20].tolist()
            for _ in range(12):
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            known.append(tokens == row[:32].tolist())
    assert learned.values[f"extracted{end}"] == np.mean(known) >= 0.75
    assert learned.values[f"extracted_held_out{end}"] == 0
    untrained = measure.compute(own).values
    assert untrained[f"extracted{end}"] == untrained[f"extracted_held_out{end}"] == 0
    curve = learned.curves[f"extracted_by_length{end}"]
    assert (curve.x[-1], curve.y[-1], curve.n[-1]) == (12, learned.values[f"extracted{end}"], 4)
    assert curve.y == sorted(curve.y, reverse=True)
    read = sum(len(stream) for _, stream in streams)
    assert learned.values[f"repeats{end}"] == pytest.approx(4 * CONTEXT / read)


@pytest.mark.parametrize(
    ("measure", "told"),
    [
        (Memorisation(), "50 + 50 tokens are more than a window has, 64"),
        (LossSpikes(window=3), "a window of 3 lines is too short"),
        (Memorisation(prompt=20, continuation=20), None),
        (Decoding(prompt=CONTEXT, tokens=8), None),
        (Decoding(prompt=2000, tokens=8), "longer than the test stream"),
    ],
)
def test_what_a_measure_cannot_mean_is_refused(asked: Subject, measure: Measure, told: str | None) -> None:
    found = measure.refusal(asked.about)
    assert told in found if told and found else found is told


def test_decoding_is_not_timed_where_nothing_can_be_held(asked: Subject) -> None:
    mask = {"type": "causal", "documents": True}
    block = {"norm": "rmsnorm", "attention": {"type": "attention", "heads": 2, "positional": "rope", "mask": mask}}
    about = subject(asked.about.dataset, block).about
    assert "can't hold what was read" in (Decoding().refusal(about) or "")
    assert Memorisation(prompt=20, continuation=20).refusal(about) is None, "which reads all anew"


def test_spikes_are_counted_where_a_value_is_far_above_those_before_it(asked: Subject, tmp_path: Path) -> None:
    values = [3.0 + 0.01 * math.sin(place) for place in range(200)]
    assert spikes(values, 100, 7.0) == 0
    values[50], values[120], values[5] = 4.0, 4.0, 9.0
    assert spikes(values, 100, 7.0) == 1, "5 has too few before it, and hides 50 behind its own spread"
    values[5] = 3.0
    assert spikes(values, 100, 7.0) == 2
    assert spikes([5.0 - 0.01 * place for place in range(200)], 100, 7.0) == 0, "a loss that falls has none"
    lines = [{"step": i, "loss": v, "grad_norm": 1.0 + i % 2 + 50 * (i == 90)} for i, v in enumerate(values)]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 200, "validation_loss": 3.0}])
    (tmp_path / "metrics.jsonl").write_text(text)
    found = LossSpikes().compute(replace(asked, folder=tmp_path)).values
    assert found == {"loss_spikes": 2.0, "gradient_spikes": 1.0, "journal_lines": 200.0}


def test_a_steps_cost_follows_from_its_time(asked: Subject, tmp_path: Path) -> None:
    own = in_folder(asked, tmp_path)
    found = Speed(steps=2, peak=1e12).compute(own).values
    end = "_steps_2_peak_1e+12"
    step_s, recipe = found[f"step_ms{end}"] / 1e3, own.about.recipe
    tokens = recipe.sequences * recipe.context
    assert step_s > 0
    assert found[f"train_tokens_per_s{end}"] == pytest.approx(tokens / step_s)
    flops = 3 * arch_dsl.cost(own.about.model, CONTEXT).flops_model * recipe.sequences
    assert found[f"mfu{end}"] == found[f"hfu{end}"] == pytest.approx(flops / step_s / 1e12)
    assert found[f"training_flops{end}"] == pytest.approx(flops * recipe.steps)
    assert "mfu" not in Speed(steps=1).compute(own).values, "nobody knows a CPU's peak"


def test_what_is_computed_again_counts_for_the_hardware_alone(asked: Subject) -> None:
    model, recipe = asked.about.model, asked.about.recipe
    whole, again = flops_of(model, recipe.replace(recompute="layers"))
    assert flops_of(model, recipe) == (whole, 0)
    assert again == arch_dsl.cost(model, CONTEXT).children["stack"].flops_model < whole / 3
    assert training_flops(asked) == whole * recipe.rows_before(recipe.steps)


def test_decoding_holds_what_the_spec_says(asked: Subject) -> None:
    found = Decoding(prompt=20, tokens=8, batch=3).compute(asked).values
    end = "_prompt_20_tokens_8_batch_3"
    model = asked.about.model
    by_hand = 2 * 4 * model.n_layers * model.d_model  # a key and a value of every layer, in float32
    assert found[f"cache_bytes_per_token{end}"] == found[f"cache_bytes_per_token_by_spec{end}"] == by_hand
    assert found[f"decoding_tokens_per_s{end}"] == pytest.approx(3e3 / found[f"ms_per_token{end}"])
    assert found[f"prompt_ms{end}"] > 0


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA A40-48Q", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Some other card", "bf16", None),
    ],
)
def test_the_peak_of_a_card_is_known_by_its_name(name: str, precision: Any, tflops: float | None) -> None:
    found = known_peak(name, precision)
    assert found is None if tflops is None else found == pytest.approx(tflops * 1e12)
    assert all(half > full for _, half, full in PEAKS)


def test_a_peak_can_be_measured_and_joules_are_told_where_they_can_be_read(tmp_path: Path) -> None:
    assert measured_peak(torch.device("cpu"), "fp32") > 1e6
    assert rapl_joules(tmp_path / "nothing") is rapl_joules(tmp_path) is None
    for name, used in (("intel-rapl:0", "1500000"), ("intel-rapl:0:0", "700000"), ("intel-rapl:1", "500000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{used}\n")
    assert rapl_joules(tmp_path) == 2.0, "packages, not their parts"
    assert joules(torch.device("cpu")) is None or joules(torch.device("cpu")) >= 0  # type: ignore[operator]


def test_reports_mark_what_is_a_time() -> None:
    assert sorted(TIMED) == sorted(name for name, each in Measure.members.items() if each.timed)
    assert is_timed("speed_steps_2") and is_timed("decoding")
    assert not is_timed("speedy") and not is_timed("memorisation")
