"""Configurations of published models in transformers, built by hand: the counts of the zoo are held against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from archlab.arch_dsl.model.model import Model
from tests.arch_dsl.published_gemma3n import as_ours as gemma3n
from tests.arch_dsl.published_hybrids import HYBRIDS
from tests.arch_dsl.published_kimi import as_ours as kimi_linear
from tests.arch_dsl.published_recent import RECENT
from tests.arch_dsl.their_modules import GATED_DELTA, as_buffers, by_torch, modeling

Facts = dict[str, Any]


def facts(model: Model) -> Facts:
    """The numbers of a resolved model that its configuration needs; of two stacks those of the decoder."""
    return {**_numbers(model), "model": model}


def _numbers(model: Model) -> Facts:
    *_, stack = model.stacks().values()
    layers = [_branches(block) for block in stack.layers()]
    branches = {name: branch for layer in layers for name, branch in layer.items()}
    if linear := next((branch for branch in branches.values() if branch.type in ("linear_attention", "mlstm")), None):
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
            "window": 10**6,
            **_sparse(branches.get("ffn")),
            **({"attention": branches["attention"]} if "attention" in branches else {}),
        }
    if "attention" not in branches:  # mixers without heads
        ends = {"heads": 1, "kv": 1, "head_dim": model.d_model, "width": 0, "linear": False}
        return {**ends, "d": model.d_model, "layers": stack.n_layers, "vocab": model.vocab}
    attention, ffn = branches["attention"], branches["ffn"]
    first = layers[0].get("attention", attention)
    return {
        "linear": False,
        "attention": attention,
        "dense": getattr(branches.get("dense"), "width", 0),
        "experts of": ffn,
        "d": model.d_model,
        "layers": stack.n_layers,
        "heads": attention.heads,  # type: ignore[attr-defined]
        "kv": attention.kv_heads,  # type: ignore[attr-defined]
        "head_dim": attention.head_dim,  # type: ignore[attr-defined]
        "width": ffn.width,  # type: ignore[attr-defined]
        "vocab": model.vocab,
        "positions": model.max_positions,
        "table": model.embedding.width,
        "rotated": next((int(attention.head_dim * item.fraction) for item in attention.query if _is_rope(item)), 0),
        "window": min(layer.get("attention", attention).mask.window or 10**6 for layer in layers),
        "tied": model.unembedding.tied,
        "factor": next((item.by for item in model.logits if item.type == "scale"), 1.0),
        "scale": attention.scale or attention.head_dim**-0.5,
        "bias": attention.bias is not False,
        "normed": any("norm" in item.type for item in attention.query),
        "rope": next((item for item in first.query if _is_rope(item)), None),
        "every": next((depth + 1 for depth, layer in enumerate(layers) if layer != layers[0]), len(layers)),
        **_sparse(ffn),
    }


def _branches(block: Any) -> dict[str, Any]:
    """The branches of a layer, of a parallel group its members."""
    alone = {name: branch for name, branch in block.items() if name != "parallel"}
    return {**(block["parallel"].branches if "parallel" in block else {}), **alone}


def _sparse(ffn: Any) -> Facts:
    """Of a mixture of experts how many there are, how many a token meets, and how wide the shared one is."""
    return {name: getattr(ffn, name, 0) for name in ("experts", "top_k", "shared")}


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


def modern(name: str, text: str = "", **choices: Any) -> Callable[[Facts], Any]:
    """A model of transformers with the sizes of Llama's configuration; a choice may be a function of the facts."""

    def build(f: Facts) -> Any:
        import transformers

        config, model = getattr(transformers, f"{name}{text}Config"), getattr(transformers, f"{name}ForCausalLM")
        given = {key: value(f) if callable(value) else value for key, value in choices.items()}
        common = {"tie_word_embeddings": f["tied"], "pad_token_id": None, "attn_implementation": "eager"}
        return _llama_like(f, config, model, **common | given)

    return build


def _scaled_rope(f: Facts) -> Facts:
    """Llama 3's rotations; from 3.1 on slowed down."""
    rope = f["rope"]
    if rope.scaling is None:
        return _rope(rope.theta)["rope_parameters"]  # type: ignore[no-any-return]
    names = {"original": "original_max_position_embeddings", "low": "low_freq_factor", "high": "high_freq_factor"}
    fields = {name: getattr(rope.scaling, key) for key, name in names.items()}
    return {"rope_type": "llama3", "rope_theta": rope.theta, "factor": rope.scaling.factor, **fields}


def _experts(count: str = "num_experts") -> Facts:
    """The choices of a mixture of experts."""
    return {
        count: lambda f: f["experts"],
        "num_experts_per_tok": lambda f: f["top_k"],
        "experts_implementation": "eager",
    }


def _kinds(f: Facts) -> list[str]:
    """Windows in all layers but each of a period's last."""
    return ["sliding_attention" if (depth + 1) % f["every"] else "full_attention" for depth in range(f["layers"])]


def _windows(f: Facts) -> bool:
    """Whether any layer has one."""
    return bool(f["window"] < 10**6)


def _two_ropes(near: Facts, far: Facts) -> Facts:
    """Rotations of layers with windows, and of the others."""
    return {"rope_parameters": {"sliding_attention": near["rope_parameters"], "full_attention": far["rope_parameters"]}}


def _yarn(theta: float, factor: float, original: int, **more: Any) -> Facts:
    scaling = {"factor": factor, "original_max_position_embeddings": original, **more}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": theta, **scaling}}


def ministral3(f: Facts) -> Any:
    rope = f["rope"]
    more = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    scaling = _yarn(rope.theta, rope.scaling.factor, rope.scaling.original, **more)
    return modern("Ministral3", **scaling, rms_norm_eps=1e-5, max_position_embeddings=f["positions"])(f)


def olmo3(f: Facts) -> Any:
    original = 32 if f["positions"] == 128 else 8192  # of the tiny one, and of the others
    ropes = _two_ropes(_rope(5e5), _yarn(5e5, 8.0, original))
    windows = {"sliding_window": f["window"], "layer_types": _kinds(f), "max_position_embeddings": 8 * original}
    return modern("Olmo3", rms_norm_eps=1e-6, **ropes, **windows)(f)


def qwen3_next(f: Facts) -> Any:
    by_torch(modeling("qwen3_next"), *GATED_DELTA)
    attention = f["attention"]
    full = {"heads": attention.heads, "kv": attention.kv_heads, "head_dim": attention.head_dim, "tied": False}
    linear = {
        "linear_num_value_heads": f["heads"],
        "linear_num_key_heads": f["kv"],
        "linear_key_head_dim": f["state"],
        "linear_value_head_dim": f["head_dim"],
    }
    experts = {"moe_intermediate_size": f["width"], "shared_expert_intermediate_size": f["shared"], **_experts()}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return modern("Qwen3Next", rope_parameters=rope, **linear, **experts)({**f, **full})


def latent(name: str, theta: float, factor: float, mscale: float, **choices: Any) -> Callable[[Facts], Any]:
    """A model of DeepSeek's with latent attention, slowed down rotations, and some layers without experts at first."""

    def build(f: Facts) -> Any:
        attention, moe = f["attention"], f["experts of"]
        sizes = {
            "kv_lora_rank": attention.kv_latent,
            "q_lora_rank": attention.query_latent,
            "qk_rope_head_dim": attention.rotary_dim,
            "qk_nope_head_dim": attention.head_dim,
            "v_head_dim": attention.value_dim,
        }
        rope = _yarn(theta, factor, 4096, mscale=mscale, mscale_all_dim=mscale)
        rope["rope_parameters"]["beta_fast"] = attention.rotary.scaling.beta_fast
        for item in attention.scores:
            sizes |= {"index_n_heads": item.heads, "index_head_dim": item.head_dim, "index_topk": item.top}
        limited = {"n_group": moe.groups, "topk_group": moe.group_top_k or moe.groups}
        if name == "DeepseekV2":
            limited["topk_method"] = "group_limited_greedy" if moe.groups > 1 else "greedy"
        own = {"max_position_embeddings": f["positions"], **sizes, **rope, **limited, **choices}
        return sigmoid_experts(name, **own)({**f, "head_dim": attention.rotary_dim})  # what its rotations go by

    return build


def sigmoid_experts(name: str, **choices: Any) -> Callable[[Facts], Any]:
    """A model with the fields of DeepSeek's configurations for its experts."""

    def build(f: Facts) -> Any:
        moe = f["experts of"]
        fields = {
            "n_routed_experts": f["experts"],
            "num_experts_per_tok": f["top_k"],
            "moe_intermediate_size": f["width"],
            "n_shared_experts": f["shared"] // f["width"],
            "first_k_dense_replace": f["every"] - 1,
            "routed_scaling_factor": moe.scale,
            "norm_topk_prob": moe.normalize,
            "experts_implementation": "eager",
        }
        return modern(name, **{**fields, **choices})({**f, "width": f["dense"]})

    return build


def ernie4_5_moe(f: Facts) -> Any:
    moe = f["experts of"]
    fields = {
        **_experts(),
        **_rope(5e5),
        "moe_intermediate_size": moe.width,
        "moe_num_shared_experts": moe.shared // moe.width,
        "moe_layer_start_index": f["every"] - 1,
        "rms_norm_eps": 1e-5,
    }
    return as_buffers(modern("Ernie4_5_Moe", **fields)({**f, "width": f["dense"]}), "e_score_correction_bias")


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


def xlstm(f: Facts) -> Any:
    from transformers import xLSTMConfig, xLSTMForCausalLM

    config = xLSTMConfig(
        vocab_size=f["vocab"],
        hidden_size=f["d"],
        num_hidden_layers=f["layers"],
        num_heads=f["heads"],
        qk_dim_factor=f["heads"] * f["state"] / f["d"],
        v_dim_factor=f["heads"] * f["head_dim"] / f["d"],
        ffn_proj_factor=f["width"] / f["d"],
        ffn_round_up_to_multiple_of=8,
        chunk_size=16,
        use_cache=False,
    )
    return xLSTMForCausalLM(config)


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
    "llama3": modern("Llama", rms_norm_eps=1e-5, rope_parameters=_scaled_rope),
    "qwen2_5": modern("Qwen2", **_rope(1e6), use_sliding_window=False),
    "qwen3": modern("Qwen3", **_rope(1e6)),
    "qwen3_moe": modern(
        "Qwen3Moe", **_rope(1e6), **_experts(), moe_intermediate_size=lambda f: f["width"], norm_topk_prob=True
    ),
    "qwen3_next": qwen3_next,
    "gemma2": modern(
        "Gemma2", sliding_window=lambda f: f["window"], query_pre_attn_scalar=lambda f: round(f["scale"] ** -2)
    ),
    "gemma3": modern(
        "Gemma3",
        "Text",
        **_two_ropes(_rope(1e4), _rope(1e6)),
        layer_types=_kinds,
        sliding_window=lambda f: f["window"],
        query_pre_attn_scalar=lambda f: round(f["scale"] ** -2),
    ),
    "gemma3n": gemma3n,
    "olmo2": modern("Olmo2", **_rope(5e5), rms_norm_eps=1e-6),
    "olmo3": olmo3,
    "olmoe": modern("Olmoe", **_rope(1e4), **_experts(), rms_norm_eps=1e-5, norm_topk_prob=False),
    "mixtral": modern("Mixtral", **_rope(1e6), **_experts("num_local_experts"), rms_norm_eps=1e-5),
    "gpt_oss": modern(
        "GptOss",
        **_yarn(1.5e5, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
        **_experts("num_local_experts"),
        sliding_window=lambda f: f["window"],
    ),
    "smollm2": modern("Llama", rms_norm_eps=1e-5, rope_parameters=_scaled_rope),
    "smollm3": modern("SmolLM3", **_rope(5e6), no_rope_layer_interval=4),
    "phi3": modern("Phi3", rms_norm_eps=1e-5, rope_parameters=_scaled_rope, sliding_window=lambda f: f["window"]),
    "granite3": modern(
        "Granite",
        **_rope(1e4),
        rms_norm_eps=1e-5,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=lambda f: f["scale"],
        logits_scaling=lambda f: 1 / f["factor"],
    ),
    "command_r": modern("Cohere", **_rope(8e6), logit_scale=lambda f: f["factor"], use_qk_norm=lambda f: f["normed"]),
    "command_r7b": modern(
        "Cohere2",
        **_rope(5e4),
        logit_scale=lambda f: f["factor"],
        sliding_window=lambda f: f["window"],
        layer_types=_kinds,
    ),
    "stablelm": modern(
        "StableLm",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        use_qkv_bias=lambda f: f["bias"],
    ),
    "nemotron": modern(
        "Nemotron", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "glm4": modern(
        "Glm4",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        rms_norm_eps=1e-5,
        attention_bias=lambda f: f["bias"],
    ),
    "glm4_moe": sigmoid_experts(
        "Glm4Moe",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        rms_norm_eps=1e-5,
        attention_bias=True,
        use_qk_norm=lambda f: f["normed"],
        num_mtp_layers=0,
    ),
    "exaone4": modern(
        "Exaone4",
        rope_parameters=_scaled_rope,
        rms_norm_eps=1e-5,
        sliding_window=lambda f: f["window"] if _windows(f) else None,
        layer_types=lambda f: _kinds(f) if _windows(f) else ["full_attention"] * f["layers"],
    ),
    "seed_oss": modern("SeedOss", **_rope(1e7), attention_bias=lambda f: f["bias"]),
    "ministral3": ministral3,
    "ernie4_5": modern("Ernie4_5", **_rope(5e5), rms_norm_eps=1e-5),
    "ernie4_5_moe": ernie4_5_moe,
    "dots1": sigmoid_experts("Dots1", **_rope(1e7), rms_norm_eps=1e-5),
    "qwen2_moe": modern(
        "Qwen2Moe",
        **_rope(1e6),
        **_experts(),
        moe_intermediate_size=lambda f: f["width"],
        shared_expert_intermediate_size=lambda f: f["shared"],
        norm_topk_prob=False,
    ),
    "deepseek_v2": latent("DeepseekV2", 1e4, 40.0, 0.707),
    "deepseek_v3": latent("DeepseekV3", 1e4, 40.0, 1.0, num_mtp_layers=0),
    "deepseek_v32": latent("DeepseekV32", 1e4, 40.0, 1.0),
    "kimi_k2": latent("DeepseekV3", 5e4, 32.0, 1.0, num_mtp_layers=0),
    "kimi_linear": kimi_linear,
    "mamba": mamba,
    "rwkv4": rwkv,
    "mamba2": mamba2(tied=True),
    "mamba2_fox": mamba2(tied=False),
    "xlstm": xlstm,
    **HYBRIDS,
    **RECENT,
}
UNKNOWN_THERE = {  # sizes whose choices the configuration cannot say
    ("gated_attention", "28l-elementwise"),
    ("gated_attention", "28l-headwise"),
    ("gated_attention", "48l-elementwise"),
    ("gated_attention", "48l-headwise"),
    ("gated_attention", "48l-sandwich"),
}
