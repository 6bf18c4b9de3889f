"""Configurations of published models in transformers, built by hand: the counts of the zoo are held against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archlab.arch_dsl.model.model import Model

Facts = dict[str, Any]


def facts(model: Model) -> Facts:
    """The numbers of a resolved model that its configuration needs; of two stacks those of the decoder."""
    *_, stack = model.stacks().values()
    branches = {name: branch for block in stack.layers() for name, branch in block.items()}
    if "parallel" in branches:
        branches = dict(branches["parallel"].branches.items())  # type: ignore[attr-defined]
    if linear := next((branch for branch in branches.values() if branch.type == "linear_attention"), None):
        return {
            "d": model.d_model,
            "layers": stack.n_layers,
            "heads": linear.heads,  # type: ignore[attr-defined]
            "kv": linear.key_heads,  # type: ignore[attr-defined]
            "head_dim": linear.value_dim,  # type: ignore[attr-defined]
            "state": linear.head_dim,  # type: ignore[attr-defined]
            "width": getattr(branches.get("ffn"), "width", 0),
            "vocab": model.vocab,
            "linear": True,
        }
    if "attention" not in branches:  # mixers without heads
        ends = {"heads": 1, "kv": 1, "head_dim": model.d_model, "width": 0, "linear": False}
        return {**ends, "d": model.d_model, "layers": stack.n_layers, "vocab": model.vocab}
    attention, ffn = branches["attention"], branches["ffn"]
    return {
        "linear": False,
        "d": model.d_model,
        "layers": stack.n_layers,
        "heads": attention.heads,  # type: ignore[attr-defined]
        "kv": attention.kv_heads,  # type: ignore[attr-defined]
        "head_dim": attention.head_dim,  # type: ignore[attr-defined]
        "width": ffn.width,  # type: ignore[attr-defined]
        "vocab": model.vocab,
        "positions": model.max_positions,
        "table": model.embedding.width,
        "rotated": next((int(attention.head_dim * item.fraction) for item in attention.query if _is_rope(item)), 0),  # type: ignore[attr-defined]
        "window": min(block.get("attention", attention).mask.window or 10**6 for block in stack.layers()),  # type: ignore[attr-defined]
    }


def _is_rope(item: Any) -> bool:
    return bool(item.type == "rope")


def gpt1(f: Facts) -> Any:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    sizes = {"n_embd": f["d"], "n_layer": f["layers"], "n_head": f["heads"]}
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=f["vocab"], n_positions=f["positions"], **sizes))


def gpt2(f: Facts) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": f["d"], "n_layer": f["layers"], "n_head": f["heads"]}
    return GPT2LMHeadModel(GPT2Config(vocab_size=f["vocab"], n_positions=f["positions"], **sizes))


def gpt_neo(f: Facts) -> Any:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=f["vocab"],
        max_position_embeddings=f["positions"],
        hidden_size=f["d"],
        num_layers=f["layers"],
        attention_types=[[["global", "local"], f["layers"] // 2]],
        num_heads=f["heads"],
        window_size=f["window"],
    )
    return GPTNeoForCausalLM(config)


def gpt_j(f: Facts) -> Any:
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"n_embd": f["d"], "n_layer": f["layers"], "n_head": f["heads"], "rotary_dim": f["rotated"]}
    return GPTJForCausalLM(GPTJConfig(vocab_size=f["vocab"], n_positions=f["positions"], **sizes))


def codegen(f: Facts) -> Any:
    from transformers import CodeGenConfig, CodeGenForCausalLM

    sizes = {"n_embd": f["d"], "n_layer": f["layers"], "n_head": f["heads"], "rotary_dim": f["rotated"]}
    return CodeGenForCausalLM(CodeGenConfig(vocab_size=f["vocab"], n_positions=f["positions"], **sizes))


def gpt_neox(activation: str) -> Callable[[Facts], Any]:
    def build(f: Facts) -> Any:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        config = GPTNeoXConfig(
            vocab_size=f["vocab"],
            hidden_size=f["d"],
            num_hidden_layers=f["layers"],
            num_attention_heads=f["heads"],
            intermediate_size=f["width"],
            hidden_act=activation,
        )
        return GPTNeoXForCausalLM(config)

    return build


def opt(f: Facts) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    odd = {"word_embed_proj_dim": f["table"], "do_layer_norm_before": False} if f["table"] else {}
    config = OPTConfig(
        vocab_size=f["vocab"],
        max_position_embeddings=f["positions"],
        hidden_size=f["d"],
        num_hidden_layers=f["layers"],
        num_attention_heads=f["heads"],
        ffn_dim=f["width"],
        **({"word_embed_proj_dim": f["d"]} | odd),
    )
    return OPTForCausalLM(config)


def bloom(f: Facts) -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"hidden_size": f["d"], "n_layer": f["layers"], "n_head": f["heads"]}
    return BloomForCausalLM(BloomConfig(vocab_size=f["vocab"], **sizes))


def falcon(**choices: Any) -> Callable[[Facts], Any]:
    def build(f: Facts) -> Any:
        from transformers import FalconConfig, FalconForCausalLM

        config = FalconConfig(
            vocab_size=f["vocab"],
            hidden_size=f["d"],
            num_hidden_layers=f["layers"],
            num_attention_heads=f["heads"],
            num_kv_heads=f["kv"],
            **choices,
        )
        return FalconForCausalLM(config)

    return build


def _llama_like(f: Facts, config: Any, model: Any, **choices: Any) -> Any:
    sizes = {"hidden_size": f["d"], "num_hidden_layers": f["layers"], "intermediate_size": f["width"]}
    heads = {"num_attention_heads": f["heads"], "num_key_value_heads": f["kv"], "head_dim": f["head_dim"]}
    return model(config(vocab_size=f["vocab"], **sizes, **heads, **choices))


def _rope(theta: float) -> Facts:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def llama(theta: float) -> Callable[[Facts], Any]:
    def build(f: Facts) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        return _llama_like(f, LlamaConfig, LlamaForCausalLM, **_rope(theta), rms_norm_eps=1e-6)

    return build


def mistral(theta: float, eps: float) -> Callable[[Facts], Any]:
    def build(f: Facts) -> Any:
        from transformers import MistralConfig, MistralForCausalLM

        choices = {**_rope(theta), "rms_norm_eps": eps, "sliding_window": f["window"]}
        return _llama_like(f, MistralConfig, MistralForCausalLM, **choices)

    return build


def qwen3(f: Facts) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _llama_like(f, Qwen3Config, Qwen3ForCausalLM, tie_word_embeddings=True, **_rope(10_000.0))


def mamba2(tied: bool) -> Callable[[Facts], Any]:
    def build(f: Facts) -> Any:
        from transformers import Mamba2Config, Mamba2ForCausalLM

        config = Mamba2Config(
            vocab_size=f["vocab"],
            hidden_size=f["d"],
            num_hidden_layers=f["layers"],
            num_heads=f["heads"],
            head_dim=f["head_dim"],
            state_size=f["state"],
            n_groups=1,
            chunk_size=16,
            tie_word_embeddings=tied,
        )
        return Mamba2ForCausalLM(config)

    return build


def mamba(f: Facts) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=f["vocab"], hidden_size=f["d"], num_hidden_layers=f["layers"]))


def rwkv(f: Facts) -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    sizes = {"hidden_size": f["d"], "num_hidden_layers": f["layers"], "rescale_every": 0}
    return RwkvForCausalLM(RwkvConfig(vocab_size=f["vocab"], **sizes))


def t5(feed_forward: str, tied: bool) -> Callable[[Facts], Any]:
    def build(f: Facts) -> Any:
        from torch import nn
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=f["vocab"],
            d_model=f["d"],
            d_kv=f["head_dim"],
            d_ff=f["width"],
            num_layers=f["layers"],
            num_heads=f["heads"],
            feed_forward_proj=feed_forward,
            tie_word_embeddings=tied,
        )
        model = T5ForConditionalGeneration(config)
        if not tied:  # which its configuration no longer says (transformers 5)
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return build


BUILDERS: dict[str, Callable[[Facts], Any]] = {
    "gpt1": gpt1,
    "gpt2": gpt2,
    "gpt3": gpt2,
    "gpt_neo": gpt_neo,
    "gpt_j": gpt_j,
    "codegen": codegen,
    "gpt_neox": gpt_neox("gelu_new"),
    "pythia": gpt_neox("gelu"),
    "opt": opt,
    "bloom": bloom,
    "falcon_rw": falcon(alibi=True, bias=True, multi_query=False, parallel_attn=False),
    "falcon_7b": falcon(),
    "falcon_40b": falcon(new_decoder_architecture=True),
    "llama": llama(10_000.0),
    "transformer_llama": llama(500_000.0),
    "transformer_swa": mistral(500_000.0, 1e-6),
    "mistral": mistral(10_000.0, 1e-5),
    "gated_attention": qwen3,
    "t5": t5("relu", tied=True),
    "t5_v1_1": t5("gated-gelu", tied=False),
    "mt5": t5("gated-gelu", tied=False),
    "ul2": t5("gated-silu", tied=True),
    "mamba": mamba,
    "rwkv4": rwkv,
    "mamba2": mamba2(tied=True),
    "mamba2_fox": mamba2(tied=False),
}
UNKNOWN_THERE = {  # sizes whose choices the configuration cannot say
    ("gated_attention", "28l-elementwise"),
    ("gated_attention", "28l-headwise"),
    ("gated_attention", "48l-elementwise"),
    ("gated_attention", "48l-headwise"),
    ("gated_attention", "48l-sandwich"),
}
