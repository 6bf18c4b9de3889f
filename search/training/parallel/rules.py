"""What cannot be divided among processes, and why: said when a study is planned, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from archlab.arch_dsl.language.errors import Problem, SpecError
from archlab.arch_dsl.language.spec import walk
from archlab.arch_dsl.model.model import DecoderModel, Model, exit_of
from archlab.arch_dsl.model.places import distinct, places
from archlab.search.executors.process_group import Parallel
from archlab.search.recipe.recipe import Recipe
from archlab.search.recipe.stages import staged

WHERE = "resources.parallel"


def refuse(parallel: Parallel, model: Model, recipe: Recipe) -> None:
    """Raises SpecError with everything that stands in the way of training a resolved model so."""
    if found := problems(parallel, model, recipe):
        raise SpecError(found)


def problems(parallel: Parallel, model: Model, recipe: Recipe) -> list[Problem]:
    """What stands in the way, at the field of `resources.parallel` that asks for it."""
    if parallel.world == 1:
        return []
    found: dict[tuple[str, str], None] = {}
    for own, recipe_of in _stages(model, recipe):
        for rule in (_rows, _compiled, _optimizer, _constraint, _experts, _heads, _tensor, _pipeline):
            found |= dict.fromkeys(rule(parallel, own, recipe_of))
    return [Problem(f"{WHERE}.{name}", message, parallel.mark(name)) for name, message in found]


def _stages(model: Model, recipe: Recipe) -> Iterator[tuple[Model, Recipe]]:
    """The model and the recipe of every stage, from the first on."""
    own, *later = recipe.whole
    yield model, own
    for stage, recipe_of in zip(recipe.stages, later, strict=True):
        model = staged(model, stage)
        yield model, recipe_of


Found = Iterator[tuple[str, str]]  # a dimension, and what is wrong with it


def _rows(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """Every micro-batch is divided into equally many rows."""
    copies, size = parallel.copies, recipe.micro_batch
    wrong = sorted({rows for whole in _batches(recipe) for rows in (min(whole, size), whole % size) if rows % copies})
    if wrong:
        what = f"divides micro-batches into {copies} parts ({parallel}), and one has {wrong[0]} sequences"
        yield _of_rows(parallel), f"{what}; choose batch, accumulate and ramp so that all can be divided"


def _of_rows(parallel: Parallel) -> str:
    """The dimension that divides rows."""
    return "data" if parallel.data > 1 else "shard"


def _batches(recipe: Recipe) -> set[int]:
    """How many sequences the batches have, those of a ramp among them."""
    found: set[int] = set()
    for step in range(recipe.steps):
        found.add(recipe.rows_before(step + 1) - recipe.rows_before(step))
        if recipe.sequences in found:
            break
    return found


def _compiled(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """Layers are compiled as one process has them."""
    if recipe.compile == "blocks":
        name = next(name for name in ("data", "shard", "tensor", "pipeline") if getattr(parallel, name) > 1)
        yield name, "train.compile: blocks is for trials of one process; say `compile: off`"


def _optimizer(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """An optimizer that looks at whole matrices needs them whole."""
    for name in ("shard", "tensor"):
        if getattr(parallel, name) > 1 and not recipe.optimizer.by_element:
            own = f"{recipe.optimizer.type}{' with cautious' if getattr(recipe.optimizer, 'cautious', False) else ''}"
            yield name, f"divides matrices, and {own} needs them whole (adamw, adam, lion, schedule_free)"


def _constraint(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """What puts whole vectors back needs them whole."""
    for name in ("shard", "tensor"):
        if getattr(parallel, name) > 1 and model.constraint is not None:
            yield name, f"divides matrices, and constraint: {model.constraint.type} needs them whole; use data"


def _experts(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """Losses of routers and indexers that are no mean over targets."""
    if parallel.copies == 1:
        return
    name = _of_rows(parallel)
    uneven = f"over tokens, of which rows have unequally many under {recipe.objective.type}"
    if not recipe.objective.every and any(stack.depths for stack in model.stacks().values()):
        yield name, f"depths has a loss {uneven}"
    for path, part in branches(model):
        if not recipe.objective.every and any(x.type == "lightning_indexer" for x in getattr(part, "scores", ())):
            yield name, f"{path}.scores has a loss {uneven}"
        if part.type != "moe":
            continue
        balance = None if part.balance is None else part.balance.penalty
        if balance is not None and getattr(balance, "over", "batch") != "sequence":
            yield name, f"{path}.balance is over a whole batch, whose rows are divided; set `over: sequence`"
        elif (balance is not None or part.z_loss) and not recipe.objective.every:
            yield name, f"{path} has losses {uneven}"


def _heads(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """Heads of further tokens, and the gate of a loop, are whole on every process."""
    for name in ("shard", "tensor", "pipeline"):
        if getattr(parallel, name) > 1 and getattr(model, "predict", None) is not None:
            yield name, "predict: the heads of further tokens are not divided; use data"
        if getattr(parallel, name) > 1 and exit_of(model) is not None:
            yield name, "loop.exit: what tokens exit by is not divided; use data"


def _tensor(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """Heads and hidden channels are divided where nothing looks at several of them."""
    size = parallel.tensor
    if size == 1:
        return
    if len(model.stacks()) > 1:
        yield "tensor", "divides a decoder alone, and the model has an encoder too"
    for path, branch in branches(model):
        if branch.type == "attention":
            yield from (("tensor", f"{path}{message}") for message in _attention(branch, size))
        elif branch.type in ("glu", "mlp"):
            yield from (("tensor", f"{path}{message}") for message in _hidden(branch, size))
        elif branch.type == "parallel" and branch.output != "each":
            yield "tensor", f"{path}.output: one map of all members is not divided with them"
        elif branch.type not in ("parallel", "dense"):
            yield "tensor", f"{path} is {branch.type}, which cannot be divided (attention, glu, mlp)"


def _attention(branch: Any, size: int) -> Iterator[str]:
    for name in ("heads", "kv_heads"):
        if getattr(branch, name) % size:
            yield f".{name}: {getattr(branch, name)} cannot be divided into {size} equal parts"
    if branch.mask.pattern(branch.heads).blocks is not None:
        yield f".mask: {branch.mask.type} differs from head to head"
    for name in ("memory", "share", "kv", "switch", "concat", "lora"):
        if getattr(branch, name) not in (None, "none", "own", ()):
            yield f".{name} cannot be divided"
    if branch.queries != "hidden":
        yield ".queries: those of positions cannot be divided"
    for item in branch.scores:
        if item.type != "softcap":
            yield f".scores: {item.type} belongs to heads, and is not divided with them (softcap)"
    if getattr(branch.weights, "remainder", None) == "learned":
        yield f".weights: {branch.weights.type} has learned vectors of heads, which are not divided with them"
    for site in ("query", "key", "value", "sdpa"):
        for item in getattr(branch, site):
            if not _within_heads(item):
                yield f".{site}: {item.type} looks at more than one head, or is not divided with them"


def _within_heads(item: Any) -> bool:
    """Whether what acts on heads does it to each by itself, with parameters that are the same for all or divided."""
    if getattr(item, "share", "none") != "none" or getattr(item, "per_head", False):
        return False
    if item.type == "gate":
        fine = item.granularity in ("elementwise", "headwise") and item.heads == "specific"
        return fine and item.input == "hidden" and item.rank is None and item.channels is None
    plain = ("activation", "l2", "layernorm", "rmsnorm", "scalenorm", "rope", "xpos", "scale", "depth_scale", "softcap")
    return item.type in plain and getattr(item, "over", "head") == "head"


def _hidden(branch: Any, size: int) -> Iterator[str]:
    if branch.width % size:
        yield f".width: {branch.width} channels cannot be divided into {size} equal parts"
    for site in ("preactivation", "linear", "inner"):
        for item in getattr(branch, site, ())[:1]:
            yield f".{site}: {item.type} looks at all hidden channels, or is not divided with them"
    for name in ("share", "lora"):
        if getattr(branch, name) not in ("none", ()):
            yield f".{name} cannot be divided"


def _pipeline(parallel: Parallel, model: Model, recipe: Recipe) -> Found:
    """Layers are divided where each hands on nothing but the stream."""
    count = parallel.pipeline
    if count == 1:
        return
    if not isinstance(model, DecoderModel):
        yield "pipeline", "divides the layers of a decoder alone, and the model has an encoder too"
        return
    if model.n_layers < count:
        yield "pipeline", f"n_layers: {model.n_layers} layers cannot be divided among {count} processes"
    if model.prompt:
        told = "prompt: vectors before the tokens are dropped after the last layer, which has another process"
        yield "pipeline", told
    if recipe.ramp:
        yield "pipeline", "train.ramp: the micro-batches under way are as many in every step"
    if model.loop is not None:
        yield "pipeline", "loop: a layer is applied again after layers that another process has"
    if model.depths is not None:
        yield "pipeline", "depths: routers have losses, which other processes would not see"
    for name in ("streams", "skips"):
        if getattr(model, name):
            yield "pipeline", f"{name}: layers hand on more than one stream"
    for item in model.final:
        if item.type == "dual":
            yield "pipeline", f"final: {item.type} reads what all layers have carried"
    for path, branch in branches(model):
        if getattr(branch, "kv", "own") != "own":
            yield "pipeline", f"{path}.kv: takes keys and values of a layer that another process may have"
        if branch.type == "moe":
            yield "pipeline", f"{path} is moe, whose losses and loads other processes would not see"
        for score in getattr(branch, "scores", ()):
            if score.type == "lightning_indexer":
                yield "pipeline", f"{path}.scores has a lightning_indexer, whose loss other processes would not see"
        for own, part in walk(branch):
            where = ".".join(filter(None, (path, own)))
            if getattr(part, "share", "none") != "none" or getattr(part, "table_of", None) is not None:
                yield "pipeline", f"{where} is shared by layers that different processes have"
            carries = getattr(part, "type", "") in ("value_residual", "residual_dual")
            if carries or getattr(part, "reads_embeddings", False) or getattr(part, "value_rank", 0) != 0:
                yield "pipeline", f"{where}: {part.type} carries more than the stream from layer to layer"  # type: ignore[attr-defined]


def branches(model: Model) -> Iterator[tuple[str, Any]]:
    """Every branch that a layer has, those inside a parallel group among them, by path."""
    for name, stack in model.stacks().items():
        for place in distinct(places(stack, model.context(), stack.layers())):
            yield f"{name}.{place.path}".removeprefix("."), place.branch
