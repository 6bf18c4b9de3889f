"""Layers that are computed again for the gradients: the same bits, with less kept."""

import pytest
import torch

from archlab.arch_dsl.compiler.modules import compile
from archlab.arch_dsl.conformance.hosts import TARGETS, TOKENS, Case, cases
from archlab.arch_dsl.model.stack import StackModule
from archlab.arch_dsl.parts.context import Call

SOME = (
    *("adapter", "dropout", "residual_dual", "value_residual", "hyper", "x0_mix", "moe", "mamba2", "t5_buckets"),
    "attention",
)


def learned(case: Case, recompute: bool):
    """Gradients of a training step with its noise, its auxiliary losses, and the bytes that were kept for it."""
    module = compile(case.model)
    for stack in module.modules():
        if isinstance(stack, StackModule):
            stack.recompute = recompute
    kept = []
    call = Call(source_tokens=TOKENS)
    with (
        torch.random.fork_rng([]),
        torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value.nbytes) or value, lambda value: value),
    ):
        torch.manual_seed(0)
        loss = module.loss(TOKENS, TARGETS, call)
        size = sum(kept)
        sum(call.losses.values(), loss).backward()
    return {name: value.grad for name, value in module.named_parameters()}, call.losses, size


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in cases() if case.id in SOME])
def test_gives_the_same_gradients_and_keeps_less(case):
    before, losses, size = learned(case, recompute=False)
    after, again, less = learned(case, recompute=True)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert {name: float(value) for name, value in losses.items()} == {name: float(v) for name, v in again.items()}
    assert less < size / 2


def test_every_case_is_there():
    assert {case.id for case in cases()} >= set(SOME)
