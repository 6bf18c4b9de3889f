"""The JSON Schema of study files: editors complete, explain and check a study that names it in its first line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from archlab.arch_dsl import zoo
from archlab.arch_dsl.catalogue.schema import PATH_STEP, UNIT, Schema, Writer, either
from archlab.arch_dsl.language.include import INCLUDE
from archlab.arch_dsl.language.spec import Count, Family, Positive, fields_of
from archlab.arch_dsl.model.model import DecoderModel, EncoderDecoderModel, Model
from archlab.search.data.cleaning.stages import CleaningStage
from archlab.search.data.sources.family import Source
from archlab.search.data.sources.mixture import Domain
from archlab.search.data.tokenizers.family import Tokenizer
from archlab.search.evaluation.measures import ALL, Measure, Measures
from archlab.search.recipe.initial_weights import Start
from archlab.search.recipe.recipe import Recipe
from archlab.search.sections.contrasts.spec import Contrasts
from archlab.search.sections.design.written_out import KEYS, Ablate
from archlab.search.sections.ladder.spec import PARAMETERS, Along, Ends, Lengths
from archlab.search.sections.recipes.spec import Recipes
from archlab.search.sections.search.axes import KINDS, Components
from archlab.search.sections.search.space import Space
from archlab.search.sections.tune.spec import GRIDS, Brackets, Tune
from archlab.search.study.study import Study, other_sections
from archlab.search.utils.quantities import SIZE, Duration, Memory
from archlab.search.variants.patches import AtScale, Axis, Changes, Patch
from archlab.search.variants.zoo import ZOO

_PLAIN = r"[0-9.]+(e[-+]?[0-9]+)?[kMBT]?"
DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that editors' YAML servers know in full


def study_schema() -> dict[str, Any]:
    """The schema of a study, with every primitive that is registered, those of plug-ins included."""
    writer = Writer(
        {
            Patch: _patch,
            Duration: _duration,
            Memory: _memory,
            Tune: _tune,
            Contrasts: _contrasts,
            Along: lambda _: {"type": "array", "minItems": 1},
            Lengths: _lengths,
            Ends: lambda _: {
                "type": "string",
                "pattern": rf"^{_PLAIN}\s+to\s+{_PLAIN}$",
                "description": "4e-3 to 1e-3",
            },
            Changes: _recipe_changes,
            Recipes: _recipes,
            AtScale: _scale,
            Axis: _axis,
            Space: _space,
            Source: lambda writer: _choice(writer, Source, "files", {"mixture": "domains"}),
            Tokenizer: lambda writer: _choice(writer, Tokenizer, "name", {}),
            Domain: _domain,
            CleaningStage: _stage,
            Model: _model,
            Ablate: _ablate,
            Start: _start,
            Measures: _measures,
        }
    )
    root = writer.record(Study)
    root["properties"] |= {key: writer.of(kind) for key, kind in other_sections().items()}
    for name in ("components", "variants"):
        root["properties"][name]["additionalProperties"] = writer.of(Patch)
    keys = [name for name in root["required"] if name not in ("study", "model")]
    whole: Schema = {"required": keys, "anyOf": [{"required": ["model"]}, {"required": ["ablate"]}]}
    root["required"] = ["study"]
    root["properties"][INCLUDE] = _include()
    root["properties"]["grid"] |= {"propertyNames": {"pattern": path_pattern()}}
    sizes = writer.definitions["ladder"]["properties"]["sizes"]
    sizes |= {"propertyNames": {"pattern": rf"^{PARAMETERS}$|{path_pattern()}"}, "minProperties": 1}
    needed = {"anyOf": writer.definitions["recipe"].pop("anyOf")}  # unless a ladder or a scale says it
    said = {"anyOf": [{"required": ["ladder"]}, {"required": ["scales"]}]}
    whole |= {"if": {"not": said}, "then": {"properties": {"train": needed}}}
    root |= {"if": {"not": {"required": [INCLUDE]}}, "then": whole}  # which may have all the rest
    text = json.dumps({"$schema": DRAFT, "title": "An archlab study", **root, "$defs": writer.definitions})
    found: dict[str, Any] = json.loads(text.replace("#/$defs/", "#/definitions/").replace('"$defs"', '"definitions"'))
    return found


def _axis(writer: Writer) -> Schema:
    named = {"description": "names that rows have in place of the values", "type": "object", "minProperties": 1}
    by_name = {"type": "object", "properties": {"named": named}, "required": ["named"], "additionalProperties": False}
    return either([{"type": "array", "minItems": 1, "uniqueItems": True}, by_name])


def _include() -> Schema:
    file = {"type": "string", "pattern": r"\.ya?ml$"}
    told = "Files with parts of this study, relative to this one; what it says itself comes over them."
    return {"description": told, **either([file, {"type": "array", "items": file, "minItems": 1}])}


def schema_text() -> str:
    """The schema as its file holds it."""
    return json.dumps(study_schema(), indent=1, ensure_ascii=False) + "\n"


def path_pattern() -> str:
    """Paths begin in the recipe or at a key of the model; what follows depends on the model."""
    return rf"^(train|{'|'.join(model_fields())})(\.{PATH_STEP})*$"


def model_fields() -> list[str]:
    """The keys of models of all kinds as patterns, and the one that stands for any of them."""
    return [r"\*", *dict.fromkeys([*fields_of(DecoderModel), *fields_of(EncoderDecoderModel)])]


def _paths() -> Schema:
    return {"type": "object", "propertyNames": {"pattern": path_pattern()}}


def _closed(properties: Schema, required: Iterable[str], **told: str) -> Schema:
    """A mapping of these keys and no others."""
    return {"type": "object", **told, "properties": properties, "required": [*required], "additionalProperties": False}


def _patch(writer: Writer) -> Schema:
    told = "Paths to values, which replace or edit what is there; with `zoo` they are those of another model."
    names = {"pattern": rf"^({ZOO}|size)$|{path_pattern()}"}
    paths = {"type": "object", "description": told, "propertyNames": names, "properties": _reference(writer)}
    items = {"anyOf": [{"type": "string", "description": "the name of a component"}, paths]}
    return {"anyOf": [paths, {"type": "array", "items": items}, {"type": "string"}, {"type": "null"}]}


def _scale(_: Writer) -> Schema:
    keys = [name for name in fields_of(Study) if name not in ("study", "scale", "scales", INCLUDE)]
    told = "Keys of the study to what changes there: mappings key by key, `null` takes a key out."
    return {"type": ["object", "null"], "description": told, "propertyNames": {"enum": keys}}


def _recipe_changes(_: Writer) -> Schema:
    paths = {"propertyNames": {"pattern": rf"^({'|'.join(fields_of(Recipe))})(\.{PATH_STEP})*$"}}
    told = "Paths of `train` to values, which replace what is there."
    return {"type": "object", "description": told, "minProperties": 1, **paths}


def _recipes(writer: Writer) -> Schema:
    """Named changes of the recipe, and of how the model starts."""
    paths = rf"^({'|'.join(fields_of(Recipe))}|model\.init)(\.{PATH_STEP})*$"
    one = {"type": ["object", "null"], "propertyNames": {"pattern": paths}}
    told = " ".join((Recipes.__doc__ or "").split())
    return {"type": "object", "description": told, "minProperties": 2, "additionalProperties": one}


def _model(writer: Writer) -> Schema:
    """A model, or one of the zoo with what it changes, by paths."""
    path = rf"^(zoo|size|({'|'.join(model_fields())})(\.{PATH_STEP})*)$"
    reference = {
        "type": "object",
        "description": "A published model of the zoo; every other key is a path that it changes.",
        "properties": _reference(writer),
        "required": ["zoo"],
        "propertyNames": {"pattern": path},
    }
    return either([writer.record(DecoderModel), writer.record(EncoderDecoderModel), reference])


def _reference(writer: Writer) -> Schema:
    sizes = sorted({size for name in zoo.names() for size in zoo.entry(name).sizes})
    return {
        "zoo": {"enum": zoo.names()},
        "size": {
            "description": "A published size, or {parameters: 1M}: embeddings not counted.",
            "anyOf": [{"enum": sizes}, _closed({"parameters": writer.of(Count)}, ["parameters"])],
        },
    }


def _ablate(writer: Writer) -> Schema:
    ends = {end: writer.of(Model) for end in KEYS}
    return _closed(ends, ends, description="Two models; every slot in which they differ becomes a component.")


def _start(_: Writer) -> Schema:
    file = {"type": "string", "description": "what `archlab import` or `archlab export` wrote, or its folder"}
    digest = {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "the sha256 that the file must have"}
    keys = {"from": file, "sha256": digest}
    return {"type": "object", "properties": keys, "minProperties": 1, "additionalProperties": False}


def _duration(_: Writer) -> Schema:
    return {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*(ms|[smhd])$", "description": "a time: 90s, 30m, 2h"}


def _memory(_: Writer) -> Schema:
    return {"type": "string", "pattern": f"^{SIZE.pattern}$", "description": "a size: 8GB, 500MB, 1.5GiB"}


def _tune(writer: Writer) -> Schema:
    rate, number = writer.of(Positive), {"anyOf": [{"type": "number"}, {"type": "string", "pattern": UNIT}]}

    def grid(value: Schema) -> Schema:
        ends = {"grid": {"enum": [*GRIDS]}, "from": value, "to": value}
        return _closed(ends, ends)

    rates = either([{"type": "array", "items": rate, "minItems": 1}, grid(rate), rate])
    options = {
        "lr": {"description": "learning rates: a list, or the members of a grid between two ends", **rates},
        "train.lr": rates,
        "extend": {
            "type": "integer",
            "minimum": 0,
            "maximum": 20,
            "description": "values more on each side. Default: 2 for grids, else 0",
        },
        "brackets": {
            "description": "Default: true for grids, else false",
            **either([{"type": "boolean"}, writer.of(Brackets)]),
        },
    }
    return {
        "type": "object",
        "description": " ".join((Tune.__doc__ or "").split()),
        "properties": options,
        "additionalProperties": either([{"type": "array", "minItems": 1, "uniqueItems": True}, grid(number)]),
        "propertyNames": {"pattern": rf"{path_pattern()[:-1]}$|^(lr|extend|brackets)$"},
        "minProperties": 1,
    }


def _contrasts(_: Writer) -> Schema:
    pair = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    return {"type": "array", "description": " ".join((Contrasts.__doc__ or "").split()), "items": pair}


def _lengths(writer: Writer) -> Schema:
    """Tokens of a rung: a number, by a rule, or several of these."""
    rule = {"type": "string", "pattern": rf"^{_PLAIN}\s+(per parameter|FLOPs)$"}
    one = {"description": "2M, 20 per parameter or 1e13 FLOPs", **either([writer.of(Count), rule])}
    return either([one, {"type": "array", "items": one, "minItems": 1, "uniqueItems": True}])


def _space(_: Writer) -> Schema:
    """Paths to axes; any other name is that of a component, or of an axis of components."""
    number: Schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": UNIT}]}
    ends = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
    known: Schema = {
        "choice": {"type": "array", "minItems": 1},
        "component": {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
        "int": ends,
        "float": ends,
        "step": {"type": "number", "exclusiveMinimum": 0},
        "log": {"type": "boolean"},
        "when": {"type": "string", "description": "path == 'value', path != 3, path in ['a', 'b'], joined by and"},
    }
    axes = {
        kind: _closed(
            {key: known[key] for key in kind.keys}, kind.keys[:1], description=" ".join((kind.__doc__ or "").split())
        )
        for kind in KINDS.values()
    }
    return {
        "type": "object",
        "minProperties": 1,
        "patternProperties": {path_pattern(): {"anyOf": [*axes.values()]}},
        "additionalProperties": axes[Components],
    }


def _measures(writer: Writer) -> Schema:
    """`all`, a measure by name or as `{perplexity: {context: 64}}`, or a list of these."""
    mains = {name: member.main for name, member in Measure.members.items()}
    one = writer.named("measure", lambda: either([{"const": ALL}, _choice(writer, Measure, "", mains)]))
    return either([one, {"type": "array", "items": one, "minItems": 1}])


def _choice(writer: Writer, kind: type[Family], main: str, mains: dict[str, str]) -> Schema:
    """A member of a family by name, with its type, or as `{member: main field or all fields, other fields}`, such as
    `{text: files}`, `{text: {files: …}}` and `{mixture: {name: source}}`."""
    short, words = [], []
    for name, member in kind.members.items():
        fields = fields_of(member)
        own = fields.get(mains.get(name, main))
        record = writer.record(member, typed=False)
        others = {key: value for key, value in record["properties"].items() if key != "type"}
        alone = writer.of(own.annotation) if own else {"type": "null"}
        whole = writer.named(f"{kind.__name__.lower()}_{name}", partial(dict, record, required=[]))
        properties = {**others, name: either([alone, whole])}
        short.append(_closed(properties, [name]))
        words += [] if any(item.required for item in fields.values()) else [{"const": name}]
    typed = [writer.member(member) for member in kind.members.values()]
    return either([*words, *typed, *short])


def _domain(writer: Writer) -> Schema:
    """A source with a weight beside its fields, which the schema of sources cannot say: only the weight is checked."""
    weight = {"anyOf": [writer.of(Positive), {"type": "null"}]}
    listed = {"type": "object", "minProperties": 1, "properties": {"weight": weight}}
    return either([{"enum": ["stdlib"]}, listed])


def _stage(writer: Writer) -> Schema:
    """A cleaning stage by name, with its type, or as `{dedup: minhash, threshold: 0.8}`."""
    short = []
    for name, member in CleaningStage.members.items():
        fields = {key: value for key, value in writer.record(member)["properties"].items() if key != "type"}
        short.append(_closed({member.group: {"const": name}, **fields}, [member.group]))
    typed = [writer.member(member) for member in CleaningStage.members.values()]
    return either([*({"const": name} for name in CleaningStage.members), *typed, *short])
