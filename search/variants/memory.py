"""The memory that training a variant takes, in bytes."""

from __future__ import annotations

from archlab.search.variants.variant import Variant


def memory_bytes(variant: Variant, rows: int | None = None) -> int:
    """What training keeps at once: weights, gradients, the optimizer's moments, activations of so many rows (None: of a
    micro-batch).

    What a process takes is more: libraries, buffers of kernels, what an allocator holds back. Under bf16 activations
    are counted with two bytes; with recomputation those of one layer, and what each layer reads.
    """
    recipe, figures = variant.recipe, variant.figures
    activations = figures["activation_bytes"]
    if recipe.recompute == "layers":
        layers = sum(stack.effective_depth for stack in variant.model.stacks().values())
        activations = activations // layers + 4 * layers * recipe.context * variant.model.d_model
    half = 2 if recipe.precision == "bf16" else 1
    kept = 2 * variant.parameters + recipe.optimizer.kept(variant.model, variant.parameters)
    return 4 * kept + activations * (rows or recipe.micro_batch) // half
