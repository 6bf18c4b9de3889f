"""The zoo: entries are short, resolve in every size, have the published counts, and train."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archlab.arch_dsl import Call, SpecError, compile, cost, identity, load, patch, resolve, zoo
from archlab.arch_dsl.compiler.modules import stored as stored_by
from archlab.arch_dsl.language.source import read_text
from archlab.arch_dsl.parts.families import Branch
from archlab.arch_dsl.weights.conversion import import_tensors
from archlab.arch_dsl.weights.layout import layout_of, load_layout
from archlab.arch_dsl.zoo import budget
from archlab.arch_dsl.zoo.budget import MOST_OFF, body, fewest_layers
from archlab.arch_dsl.zoo.entries import FOLDER, rounds_to
from tests.arch_dsl.parity import stored
from tests.arch_dsl.published_models import BUILDERS, UNKNOWN_THERE, facts
from tests.docs_kit import bare, tables

DOC = "\n".join(page.read_text() for page in Path(__file__).parents[3].glob("docs/reference/zoo/*.md"))
every_entry = pytest.mark.parametrize("name", zoo.names())
ALL_SIZES = [(name, size) for name in zoo.names() for size in zoo.entry(name).sizes]


# The files


def test_it_holds_what_is_published():
    assert zoo.names() == [
        "alphacode",
        "bamba",
        "bigbird",
        "bloom",
        "chinchilla",
        "codegen",
        "command_r",
        "command_r7b",
        "decllm",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "delta_net",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "falcon_40b",
        "falcon_7b",
        "falcon_h1",
        "falcon_rw",
        "fox_llama",
        "fox_pro",
        "galactica",
        "gated_attention",
        "gated_attention_moe",
        "gated_delta_net",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gla",
        "glam",
        "glm4",
        "glm4_moe",
        "glm_moe_dsa",
        "gopher",
        "gpt1",
        "gpt2",
        "gpt3",
        "gpt_j",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "granite3",
        "granite4",
        "hgrn2",
        "hymba",
        "jamba",
        "kimi_k2",
        "kimi_linear",
        "lfm2",
        "llama",
        "llama3",
        "llama4",
        "mamba",
        "mamba2",
        "mamba2_fox",
        "mamba3",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "modded_nanogpt",
        "modernbert",
        "mt5",
        "mt_nlg",
        "nemotron",
        "nemotron_h",
        "ngpt",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "opt",
        "ouro",
        "palm",
        "pangu_alpha",
        "phi3",
        "pythia",
        "qwen2_5",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "redllm",
        "retnet",
        "rwkv4",
        "rwkv7",
        "samba",
        "seed_oss",
        "smollm2",
        "smollm3",
        "stablelm",
        "t5",
        "t5_v1_1",
        "transformer_llama",
        "transformer_pro",
        "transformer_swa",
        "u_palm",
        "ul2",
        "xlstm",
        "zamba2",
    ]


@every_entry
def test_an_entry_is_short_and_begins_with_its_source(name: str):
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.endswith("\n") and text.count("\n") <= 40
    assert re.match(r"# .*\b(19|20)\d\d\b", text), "the first line names the publication and its year"


def keys(value: Any) -> set[str]:
    """The keys of a nest of mappings and lists."""
    if isinstance(value, dict):
        return set(value).union(*(keys(child) for child in value.values()))
    return set().union(*(keys(child) for child in value)) if isinstance(value, list) else set()


@every_entry
def test_no_key_of_the_language_is_named_after_a_model(name: str):
    given = keys(zoo.entry(name).node.plain()) | {p for s in zoo.entry(name).sizes.values() for p in s.node.plain()}
    steps = {step for key in given for step in key.split(".")}
    models = {*zoo.names()} - {*Branch.members, *Branch.aliases}  # a mixer's own name is no model's
    assert not steps & {*models, "gpt", "gptj", "neox", "fox", "pangu", "falcon", "transformer", "mt"}


@every_entry
def test_an_entry_has_a_tiny_size_and_published_ones(name: str):
    sizes = zoo.entry(name).sizes
    assert list(sizes)[-1] == "tiny" and sizes["tiny"].published is None
    assert all(size.published for size in list(sizes.values())[:-1])


@every_entry
def test_the_first_size_is_the_model_as_written(name: str):
    first = next(iter(zoo.entry(name).sizes))
    assert identity(resolve(zoo.load(name))) == identity(resolve(zoo.load(name, first)))


def test_an_unknown_name_or_size_names_the_nearest():
    with pytest.raises(SpecError, match="'llma' is not a model of the zoo; did you mean 'llama'"):
        zoo.load("llma")
    with pytest.raises(SpecError, match=r"'6b' is not a size of llama; did you mean '65b'\? \(7b, 13b"):
        zoo.load("llama", "6b")


# Counts


@pytest.mark.parametrize("pair", ALL_SIZES, ids="/".join)
def test_every_size_resolves(pair: tuple[str, str]):
    model = resolve(zoo.load(*pair))
    assert model.vocab and model.max_positions
    if pair[1] != "tiny":
        assert cost(model, tokens=1).parameters > 10**7


def sizes_there(name: str) -> list[Any]:
    """The published sizes of an entry that transformers can say; those between the first and the last are slow."""
    there = [pair for pair in ALL_SIZES if pair[0] == name and pair[1] != "tiny" and pair not in UNKNOWN_THERE]
    return [
        pytest.param(pair, id="/".join(pair), marks=[] if pair in (there[0], there[-1]) else [pytest.mark.slow])
        for pair in there
    ]


@pytest.mark.parametrize("pair", [pair for name in BUILDERS for pair in sizes_there(name)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_parameters_are_those_of_an_independent_implementation(pair: tuple[str, str]):
    model = resolve(zoo.load(*pair))
    with torch.device("meta"):
        theirs = BUILDERS[pair[0]](facts(model))
    assert cost(model, tokens=1).parameters == sum(parameter.numel() for parameter in theirs.parameters())


STORED_AS = {
    "mamba2_fox": "mamba2",
    "transformer_llama": "llama",
    "transformer_swa": "llama",
    "gpt3": "gpt2",
    "gated_attention": "llama",
}
WITHOUT = {  # what theirs cannot say
    "gpt3": {"overrides": {}},
    "gated_attention": {"block.attention.gate": "none"},
    "minimax": {"block.attention.positional.fraction": 1.0},
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_tiny_gives_the_logits_of_an_independent_implementation(name: str):
    model = resolve(patch(zoo.load(name, "tiny"), WITHOUT.get(name, {})))
    theirs = BUILDERS[name](facts(model)).float().eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in theirs.named_parameters():
            around = 1.0 if re.search(r"(norm|ln_).*weight$", key) else 0.0
            value.copy_(
                around + torch.randn(value.shape, generator=rng) * (0.3 if value.ndim == 1 else value.shape[-1] ** -0.5)
            )
    for key, value in theirs.named_buffers():
        if key.endswith("e_score_correction_bias"):
            value.copy_(0.1 * torch.randn(value.shape, generator=rng))
    kept = {key for key, _ in (*theirs.named_parameters(), *theirs.named_buffers())}
    given = stored(theirs, {key: value.clone() for key, value in theirs.state_dict().items() if key in kept})
    ours = compile(model)
    imported = import_tensors(load_layout(STORED_AS.get(name) or layout_of(name)), model, given).tensors
    with torch.no_grad():
        for key, value in stored_by(ours).items():
            value.copy_(imported[key])
    tokens = torch.randint(257, (2, 40), generator=rng)
    with torch.no_grad():
        if theirs.config.is_encoder_decoder:
            source = torch.randint(257, (2, 30), generator=rng)
            wanted = theirs(source, decoder_input_ids=tokens).logits
            found = ours(tokens, Call(source_tokens=source))
        else:
            found, wanted = ours(tokens), theirs(tokens).logits
        exact = ours.double()(tokens, Call(source_tokens=source) if theirs.config.is_encoder_decoder else None)
    rounding, scale = (found - exact).abs().max(), wanted.abs().max()  # of ours, which differs between processors
    assert (found - wanted).abs().max() < 1e-5 * scale + rounding
    assert rounding < 1e-4 * scale


COMPUTED = {  # from the published dimensions by hand, in millions
    ("gopher", "44m"): 43.66,
    ("gopher", "117m"): 116.6,
    ("gopher", "417m"): 417.2,
    ("gopher", "1.4b"): 1374,
    ("gopher", "7.1b"): 7111,
    ("gopher", "280b"): 279_700,
    ("chinchilla", "70b"): 70_060,
    ("palm", "8b"): 8632,
    ("pangu_alpha", "2.6b"): 2630,
    ("pangu_alpha", "13b"): 12_800,
    ("mt_nlg", "530b"): 529_600,
    ("decllm", "150m"): 168,
    ("decllm", "2b"): 2180,
    ("decllm", "8b"): 8720,
    ("redllm", "150m"): 147,
    ("redllm", "1b"): 1124,
    ("redllm", "2b"): 2207,
    ("redllm", "4b"): 3498,
    ("redllm", "8b"): 8590,
    ("ul2", "20b"): 19_460,
    ("bigbird", "base"): 126.88 + 0.59 + 0.05,  # transformers' encoder, the head before the table, the table's bias
    ("u_palm", "8b"): 8632,
    ("alphacode", "300m"): 284.5,
    ("alphacode", "41b"): 41_190,
    ("fox_pro", "760m"): 759.5,
    ("fox_pro", "360m"): 367.3,
    ("fox_llama", "760m"): 757.6,
    ("transformer_pro", "760m"): 757.7,
    ("transformer_llama", "760m"): 756.7,
    ("rwkv4", "169m"): 169.34,
    ("rwkv7", "0.1b"): 191.03,
    ("rwkv7", "2.9b"): 2947.7,
    ("mamba3", "1.5b"): 1494.72,
    ("samba", "421m"): 421.75,
    ("hymba", "1.5b"): 1522.8,
    ("modded_nanogpt", "record29"): 275.74,
    ("gated_attention", "28l"): 1720,
    ("gated_attention", "48l"): 1706,
    ("gated_attention_moe", "15a2b"): 15_577,
    ("glam", "0.1b-64e"): 1883,
}


@pytest.mark.parametrize(("pair", "millions"), COMPUTED.items(), ids=map("/".join, COMPUTED))
def test_parameters_are_those_computed_by_hand(pair: tuple[str, str], millions: float):
    assert zoo.counted(zoo.entry(pair[0]), zoo.load(*pair)) / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize(
    ("pair", "billions"), {("glam", "64b-64e"): 96.6, ("gated_attention_moe", "15a2b"): 1.99}.items(), ids=str
)
def test_active_parameters_are_those_printed_or_computed_by_hand(pair: tuple[str, str], billions: float):
    assert cost(resolve(zoo.load(*pair)), tokens=1).active / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("pair", [pair for pair in ALL_SIZES if zoo.entry(pair[0]).sizes[pair[1]].active], ids="/".join)
def test_active_parameters_are_the_printed_ones(pair: tuple[str, str]):
    total = cost(resolve(zoo.load(*pair)), tokens=1)
    without = pair[0] in (
        "deepseek_v2",
        "glm4_moe",
        "glm_moe_dsa",
        "gpt_oss",
        "minimax_m2",
    )  # printed without the table
    table = total.children["embedding"].parameters if without else 0
    assert rounds_to(total.active - table, zoo.entry(pair[0]).sizes[pair[1]].active or "")


@pytest.mark.parametrize(
    ("published", "count", "agrees"),
    [
        ("6.7B", 6_738_415_616, True),
        ("6.7B", 6_600_000_001, True),
        ("6.7B", 6_800_000_000, False),
        ("175.0B", 174_604_259_328, False),
        ("175B", 174_604_259_328, True),
        ("70426624", 70_426_624, True),
        ("70426624", 70_426_625, False),
        (None, 1, None),
    ],
)
def test_agreement_is_within_the_last_printed_digit(published: str | None, count: int, agrees: bool | None):
    assert zoo.Size("any", published, read_text("{}")).agrees(count) is agrees


# The page


def doc_table(first: str, second: str) -> tuple[tuple[str, ...], ...]:
    (table,) = [table for table in tables(DOC) if table.header[:2] == (first, second)]
    return table.rows


def listed(row: zoo.Row) -> tuple[str, ...]:
    published = f"{row.published}{'' if row.agrees else ' ≠'}"
    return (f"`{row.name}`", f"`{row.size}`", f"{row.parameters:,}", published, f"{row.context:,}", row.release)


def test_the_page_lists_every_size_with_our_count_and_the_published_one():
    (table,) = [table for table in tables(DOC) if table.header[-1] == "release"]
    assert table.rows == tuple(listed(row) for row in zoo.rows())


def test_the_page_names_every_size_that_is_not_reconciled():
    (table,) = [table for table in tables(DOC) if table.header[-1] == "why"]
    said = {(bare(row[0]), bare(row[1])): row for row in table.rows}
    assert set(said) == {(row.name, row.size) for row in zoo.rows() if not row.agrees}
    assert all(len(row[4]) > 10 for row in said.values())


def test_the_page_repeats_what_the_files_say_is_not_certain():
    said = {(bare(name), note) for name, note in doc_table("model", "note")}
    assert said == {(name, note.replace("|", "\\|")) for name in zoo.names() for note in zoo.entry(name).notes}


# Sizes by a number of parameters


FEWEST = {
    "gemma3n": 2_500_000,
    "glam": 2_500_000,
    "glm_moe_dsa": 3_000_000,
    "kimi_k2": 1_500_000,
    "kimi_linear": 1_500_000,
    "llama4": 1_500_000,
    "granite4": 2_500_000,
    "jamba": 2_500_000,
    "mimo_v2_flash": 4_000_000,
    "minimax": 5_000_000,
    "minimax_m2": 3_500_000,
    "qwen3_5_moe": 3_500_000,
    "qwen3_next": 6_500_000,
    "zamba2": 2_500_000,
}  # of the narrowest: with all of their experts, or with layers that read the keys of others


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *(
            pytest.param(name, FEWEST.get(name, 1_000_000), marks=[pytest.mark.slow] if number % 4 else [])
            for number, name in enumerate(zoo.names())
        ),
        *((name, 30_000_000) for name in ("gated_attention_moe", "gpt3", "redllm")),
    ],
)
def test_a_budget_gives_a_model_of_that_shape_with_about_so_many_parameters(name: str, wanted: int):
    model = resolve(zoo.load(name, parameters=wanted), vocab=None)
    counted = body(model)
    assert abs(counted - wanted) <= MOST_OFF * wanted
    *_, stack = model.stacks().values()
    *_, whole = zoo.load(name).stacks().values()
    assert abs(stack.n_layers - max(model.d_model / zoo.entry(name).budget.aspect, fewest_layers(whole))) <= 2
    mine, published = facts(model), facts(resolve(zoo.load(name)))
    assert mine["heads"] * mine["head_dim"] / mine["d"] == pytest.approx(
        published["heads"] * published["head_dim"] / published["d"],
        abs=mine["head_dim"] / mine["d"] / (1 if mine["linear"] else 2),  # half a head
    )
    share = published["width"] / published["d"]
    assert mine["width"] / mine["d"] == pytest.approx(share, abs=8 / mine["d"])
    assert mine["heads"] // mine["kv"] >= 1 and (mine["kv"] == mine["heads"]) == (published["kv"] == published["heads"])


def test_a_budget_scales_latent_attention_with_its_heads():
    whole, small = (
        resolve(model).layers()[0]["attention"]
        for model in (zoo.load("deepseek_v3"), zoo.load("deepseek_v3", parameters=1_000_000))
    )
    assert (small.head_dim, whole.head_dim) == (16, 128)
    for name in ("kv_latent", "rotary_dim", "value_dim"):
        assert getattr(small, name) * 8 == getattr(whole, name)
    assert small.query_latent == 16 and whole.query_latent == 1536  # of a stream of 64 and of 7168
    assert small.scale * 24**0.5 == pytest.approx(whole.scale * 192**0.5)


def test_a_budget_scales_key_and_value_heads_that_only_some_layers_have():
    for parameters, heads in ((4_000_000, (12, 1, 2)), (10**9, (21, 1, 3))):  # 64 heads, of keys and values 4 and 8
        full, near, *_ = (
            layer["attention"] for layer in resolve(zoo.load("mimo_v2_flash", parameters=parameters)).layers()
        )
        assert (full.heads, full.kv_heads, near.kv_heads) == heads and near.heads == full.heads


def test_a_budget_beyond_all_sizes_is_refused_after_few_of_them(monkeypatch: pytest.MonkeyPatch):
    counted: list[int] = []
    monkeypatch.setattr(budget, "body", lambda model: counted.append(body(model)) or counted[-1])
    with pytest.raises(SpecError, match=r"the nearest has [0-9,]{20,}"):
        zoo.load("llama", parameters=10**30)
    assert len(counted) < 30  # of some 12,000


def test_a_budget_that_no_size_meets_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match="no size of this shape has about 1,000; the nearest has"):
        zoo.load("llama", parameters=1000)


# References


def reference(text: str) -> Any:
    return load(read_text(text, "study.yaml"))


def test_a_reference_is_the_model_without_its_vocabulary_and_positions():
    model = reference("{zoo: llama, size: 7b}")
    assert (model.d_model, model.vocab, model.max_positions) == (4096, None, None)
    assert model == zoo.load("llama", "7b").replace(vocab=None, max_positions=None)
    assert reference("{zoo: llama, size: 7b, vocab: 32000, max_positions: 2048}") == zoo.load("llama", "7b")


def test_other_keys_of_a_reference_are_patches():
    model = reference("{zoo: mistral, size: tiny, n_layers: 3, block.attention: {heads: 4, kv_heads: 1, gate: sdpa}}")
    assert (model.n_layers, model.block["attention"].kv_heads) == (3, 1)
    assert [item.type for item in model.block["attention"].sdpa] == ["gate"]


def test_a_size_of_a_reference_may_be_a_number_of_parameters():
    assert reference("{zoo: llama, size: {parameters: 1M}}").d_model == zoo.load("llama", parameters=10**6).d_model


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{zoo: llma}", "study.yaml:1:7: zoo: 'llma' is not a model of the zoo; did you mean 'llama'?"),
        ("zoo: llama\nsize: 6b", "study.yaml:2:7: size: '6b' is not a size of llama; did you mean '65b'?"),
        ("zoo: llama\nsize: {params: 6b}", "study.yaml:2:7: size: is a name, or {parameters: NUMBER}"),
        ("zoo: llama\nsize: {parameters: few}", "study.yaml:2:20: .size.parameters: must be an integer, found 'few'"),
        ("zoo: llama\nsize: {parameters: 9}", "study.yaml:2:7: size.parameters: no size of this shape has about 9;"),
        ("zoo: llama\nblock.attention.kv_hds: 2", "study.yaml:2:1: block.attention.kv_hds: matches nothing"),
        ("zoo: llama\nd_model: wide", "study.yaml:2:10: d_model: must be an integer, found 'wide'"),
    ],
)
def test_what_is_wrong_with_a_reference_has_the_place_in_the_study(text: str, said: str):
    with pytest.raises(SpecError) as caught:
        reference(text)
    assert said in str(caught.value)


def test_what_makes_no_sense_in_a_published_part_has_the_place_of_the_reference():
    with pytest.raises(SpecError) as caught:
        resolve(reference("size: tiny\nzoo: gpt2\nd_model: 33\nmax_positions: 8"), vocab=257)
    assert "study.yaml:1:7: block.attention.heads: 2 heads do not divide d_model 33" in str(caught.value)


# Recipes


def test_a_recipe_counts_its_batch_in_sequences_and_leaves_the_tokens_to_the_study():
    assert zoo.recipe("gpt3-125m") == {
        "context": 2048,
        "optimizer": {"betas": [0.9, 0.95], "weight_decay": 0.1},
        "clip": 1.0,
        "schedule": {"type": "cosine", "warmup": 0.00125, "final": 0.1},
        "lr": 6e-4,
        "batch": 244,
    }


@every_entry
def test_recipes_are_named_after_the_entry(name: str):
    assert all(recipe.startswith(f"{name}-") for recipe in zoo.entry(name).train)


# Tiny models


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Bytes of the standard library's own source."""
    library = Path(sysconfig.get_path("stdlib"))
    source = b"".join((library / f"{module}.py").read_bytes() for module in ("argparse", "ast", "typing", "inspect"))
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def batch(text: Tensor, rng: torch.Generator, length: int = 64) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - length - 1, (8, 1), generator=rng)
    rows = text[starts + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


# The conformance of primitives captures each; these put many together, with an encoder, and in layers that differ.
MANY = ("alphacode", "bigbird", "fox_pro", "gated_attention_moe", "gated_delta_net", "gpt3", "hymba", "rwkv4", "samba")


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_tiny_is_captured_as_one_graph(name: str, text: Tensor):
    model = compile(resolve(zoo.load(name, "tiny")), seed=0)
    tokens, _ = batch(text, torch.Generator().manual_seed(0), 32)
    torch.compiler.reset()
    captured = torch.compile(model, fullgraph=True, backend="aot_eager")
    calls = [Call(source_tokens=tokens.flip(1)) for _ in range(3)]
    torch.testing.assert_close(captured(tokens, calls[0]), model(tokens, calls[1]))
    captured(tokens, calls[2]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


RATES = {"ngpt": 5e-2}  # whose scales and unit vectors are larger than other models' parameters


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if number % 4 else []) for number, name in enumerate(zoo.names())],
)
def test_tiny_learns(name: str, text: Tensor):
    model = compile(resolve(zoo.load(name, "tiny")), seed=0)
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES.get(name, 5e-3))
    losses = []
    inputs, targets = batch(text, rng)
    for _ in range(10):
        if "encoder" in model.spec.stacks():  # which reads the first half
            loss = model.loss(inputs[:, 32:], targets[:, 32:], Call(source_tokens=inputs[:, :32]))
        else:
            loss = model.loss(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.constrain()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
