"""What an engine that knows the plain model would get: the policy, whole and merged, and the policy left as it was."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import make_model, make_tokenizer
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sdpo.generation.weights import check_engine_can_hold, describe, engine_weights, lora_factors

IDS = torch.tensor([[8, 9, 10, 3, 11, 12, 13, 30]])
LINEAR = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "down_proj"]}
LORA = {**LINEAR, "r": 4}
VERA = {**LINEAR, "target_modules": ["q_proj", "o_proj"]}  # one shape for the random matrices that layers share

ADAPTERS = {
    "LoRA": peft.LoraConfig(**LORA),
    "LoRA, rank pattern": peft.LoraConfig(**LORA, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}),
    "rsLoRA": peft.LoraConfig(**LORA, use_rslora=True),
    "DoRA": peft.LoraConfig(**LORA, use_dora=True),
    "LoRA, biases": peft.LoraConfig(**LORA, bias="all"),
    "LoRA, its own biases": peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "v_proj"]}, lora_bias=True),
    "LoRA, embeddings and head": peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "DoRA, embeddings": peft.LoraConfig(**{**LORA, "target_modules": ["embed_tokens"]}, use_dora=True),
    "LoRA, saved head": peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "LoRA, saved norms and MLP": peft.LoraConfig(
        **{**LORA, "target_modules": ["q_proj"]}, modules_to_save=["norm", "mlp"]
    ),
    "LoRA, trained tokens": peft.LoraConfig(**LORA, trainable_token_indices={"embed_tokens": [8, 30]}),
    "LoRA on parameters": peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=[], target_parameters=["q_proj.weight", "down_proj.weight"]
    ),
    "trained tokens": peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[8, 30]),
    "AdaLoRA": peft.AdaLoraConfig(**LINEAR, init_r=4, total_step=10),
    "IA3": peft.IA3Config(**LINEAR, feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(**LORA),
    "LoKr": peft.LoKrConfig(**LORA),
    "OFT": peft.OFTConfig(**LINEAR, r=0, oft_block_size=4),
    "VeRA": peft.VeraConfig(**VERA, r=4),
    "VB-LoRA": peft.VBLoRAConfig(**VERA, r=2, num_vectors=8, vector_length=4, topk=2),
    "LN tuning": peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "norm"]),
}
TIED_ADAPTERS = {
    "LoRA": peft.LoraConfig(**LORA),
    "LoRA, embeddings": peft.LoraConfig(**{**LORA, "target_modules": ["embed_tokens"]}, ensure_weight_tying=True),
    "LoRA, saved embeddings": peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "LoRA, trained tokens": peft.LoraConfig(**LORA, trainable_token_indices={"embed_tokens": [8, 30]}),
    "trained tokens": peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[8, 30]),
}


def make_tied(tokenizer: Any) -> Qwen2ForCausalLM:
    config = make_model(tokenizer).config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def adapted(model: nn.Module, config: Any) -> Any:
    """The model with an adapter that has moved: every trained parameter is shifted by a random draw."""
    policy = peft.get_peft_model(model, copy.deepcopy(config)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for param in policy.parameters():
            if param.requires_grad:
                param.add_(0.2 * torch.randn_like(param))
    return policy


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def state(model: nn.Module) -> dict[str, Any]:
    """All tensors of a model, the objects they are, and what each adapted layer says about itself."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    kept = {name: (id(tensor), tensor.requires_grad, tensor.detach().clone()) for name, tensor in tensors}
    for name, module in model.named_modules():
        kept[f"{name}:"] = [
            (key, len(value), id(value)) for key, value in vars(module).items() if isinstance(value, dict | list)
        ]
    return kept


def assert_same(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, tuple):
            assert value[:2] == after[name][:2], name
            assert torch.equal(value[2], after[name][2]), name
        else:
            assert value == after[name], name


def assert_engine_gets(policy: nn.Module, plain: Any, expected: Tensor, *, tolerance: float = 1e-5) -> None:
    """That a plain model with the weights that an engine would get computes the expected logits."""
    weights = list(engine_weights(policy))
    assert sorted(describe(weights)) == sorted((n, "float32", list(p.shape)) for n, p in plain.named_parameters())
    assert not any(tensor.requires_grad or type(tensor) is not Tensor for _, tensor in weights)
    missing, unexpected = plain.load_state_dict(dict(weights), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if plain.config.tie_word_embeddings else set())
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=tolerance)


def test_a_plain_model_gives_its_own_parameters(tokenizer, model):
    assert_engine_gets(model, make_model(tokenizer, seed=1).eval(), logits(model.eval()))


def test_buffers_of_a_checkpoint_are_sent(tokenizer: Any, model: Any) -> None:
    """Such as the router's bias of DeepSeek-V3 and the layer scalar of Gemma 4, which engines read by that name."""
    layer = model.model.layers[0].self_attn
    layer.register_buffer("scalar", torch.tensor([0.3]))
    layer.register_buffer("of_this_process", torch.ones(1), persistent=False)
    policy = adapted(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for one in (model, policy):
        sent = dict(engine_weights(one))
        assert sent["model.layers.0.self_attn.scalar"].item() == pytest.approx(0.3)
        assert not [name for name in sent if "of_this_process" in name or "inv_freq" in name]


def test_a_tied_weight_comes_once(tokenizer):
    model = make_tied(tokenizer)
    assert "lm_head.weight" not in dict(engine_weights(model))
    assert_engine_gets(model, make_tied(tokenizer).eval(), logits(model.eval()))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_arrive_merged_and_the_policy_stays_as_it_was(tokenizer, kind):
    plain = make_model(tokenizer).eval()
    policy = adapted(make_model(tokenizer), ADAPTERS[kind])
    expected, before = logits(policy), state(policy)
    assert (expected - logits(plain)).abs().max() > 1e-2  # the adapter does something
    assert_engine_gets(policy, plain, expected)
    assert_same(policy, before)
    assert torch.equal(logits(policy), expected)


@pytest.mark.parametrize("kind", TIED_ADAPTERS)
def test_adapters_of_a_tied_model(tokenizer, kind):
    plain = make_tied(tokenizer).eval()
    policy = adapted(make_tied(tokenizer), TIED_ADAPTERS[kind])
    expected, before = logits(policy), state(policy)
    assert_engine_gets(policy, plain, expected)
    assert_same(policy, before)


def test_layers_that_keep_their_weight_transposed(tokenizer):
    def make() -> GPT2LMHeadModel:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=32)
        return GPT2LMHeadModel(config).eval()

    policy = adapted(make(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_proj"]))
    assert_engine_gets(policy, make(), logits(policy))


def test_experts_whose_parameters_are_adapted_one_on_the_other(tokenizer):
    def make() -> Qwen3MoeForCausalLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        experts = {"num_experts": 4, "num_experts_per_tok": 2}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **sizes, **heads, **experts)).eval()

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    policy = adapted(make(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=[], target_parameters=targets))
    assert (logits(policy) - logits(make())).abs().max() > 1e-3
    assert_engine_gets(policy, make(), logits(policy))


def test_merged_weights_of_half_precision_are_rounded_once(tokenizer):
    policy = adapted(make_model(tokenizer).bfloat16(), peft.LoraConfig(**LORA))
    layer = policy.get_base_model().model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    merged = dict(engine_weights(policy))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(merged, exact.bfloat16())


@pytest.mark.parametrize("num_taken", [1, 3, 12])
def test_a_consumer_may_stop(tokenizer, num_taken):
    policy = adapted(make_model(tokenizer), ADAPTERS["DoRA"])
    before = state(policy)
    weights = engine_weights(policy)
    for _ in range(num_taken):
        next(weights)
        assert_same(policy, before)  # also while the consumer has the tensor
    weights.close()
    assert_same(policy, before)


def test_a_consumer_may_fail(tokenizer):
    policy = adapted(make_model(tokenizer), ADAPTERS["DoRA"])
    before = state(policy)
    with pytest.raises(RuntimeError, match="out of memory"):
        for name, _ in engine_weights(policy):
            if name.endswith("layers.1.self_attn.q_proj.weight"):
                raise RuntimeError("out of memory")
    assert_same(policy, before)


def test_a_merge_that_fails_leaves_the_layer_as_it_was(tokenizer, monkeypatch):
    policy = adapted(make_model(tokenizer), ADAPTERS["DoRA"])
    before = state(policy)
    layer = policy.get_base_model().model.layers[0].self_attn.q_proj
    merge = type(layer).merge

    def fail(self: Any, **settings: Any) -> None:
        merge(self, **settings)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "merge", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(engine_weights(policy))
    assert_same(policy, before)


def test_one_layer_at_a_time_exists_twice(tokenizer):
    policy = adapted(make_model(tokenizer), peft.LoraConfig(**{**LORA, "target_modules": "all-linear"}))
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    taken: list[weakref.ref[Tensor]] = []
    weights = engine_weights(policy)
    most = 0
    while (pair := next(weights, None)) is not None:
        tensor = pair[1]
        if tensor.untyped_storage().data_ptr() not in own:
            taken.append(weakref.ref(tensor))
        del pair, tensor
        most = max(most, sum(ref() is not None for ref in taken))
    assert len(taken) == 20  # 7 weights and 3 biases in each of 2 layers
    assert most <= 2  # weight and bias of one layer


def test_only_the_adapter_in_use_is_merged(tokenizer):
    policy = adapted(make_model(tokenizer), ADAPTERS["LoRA, saved head"])
    policy.add_adapter("second", peft.LoraConfig(**LORA, modules_to_save=["lm_head"], init_lora_weights=False))
    first = logits(policy)
    assert_engine_gets(policy, make_model(tokenizer).eval(), first)
    policy.set_adapter("second")
    assert (logits(policy) - first).abs().max() > 1e-2
    assert_engine_gets(policy, make_model(tokenizer).eval(), logits(policy))
    with policy.disable_adapter():
        assert_engine_gets(policy, make_model(tokenizer).eval(), logits(make_model(tokenizer).eval()))


def assert_factors_make_the_merged(policy: Any) -> None:
    """That under the adapter is the base model, and that the products of the factors are what merging adds to it."""
    merged, base, factors = dict(engine_weights(policy)), dict(engine_weights(policy, is_merged=False)), {}
    for name, factor in lora_factors(policy).items():
        layer, letter = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        factors.setdefault(f"{layer}.weight", {})[letter] = factor
    assert merged.keys() == base.keys() > factors.keys()
    for name, weight in base.items():
        added = factors[name]["B"] @ factors[name]["A"] if name in factors else torch.zeros_like(weight)
        torch.testing.assert_close(weight + added, merged[name], rtol=0, atol=1e-6)
        assert name not in factors or added.abs().max() > 1e-3


PLAIN_LORA = ("LoRA", "LoRA, rank pattern", "rsLoRA")


@pytest.mark.parametrize("kind", PLAIN_LORA)
def test_the_factors_of_an_adapter_are_what_merging_adds(tokenizer, kind):
    policy = adapted(make_model(tokenizer), ADAPTERS[kind])
    before = state(policy)
    assert_factors_make_the_merged(policy)
    assert_same(policy, before)


def test_two_adapters_in_use_are_one_of_both_ranks(tokenizer):
    policy = adapted(make_model(tokenizer), ADAPTERS["LoRA"])
    policy.add_adapter("second", peft.LoraConfig(**{**LORA, "r": 3}, init_lora_weights=False))
    policy.base_model.set_adapter(["default", "second"])
    assert_factors_make_the_merged(policy)
    assert {min(factor.shape) for factor in lora_factors(policy).values()} == {4 + 3}


NOT_FACTORS = {kind: config for kind, config in ADAPTERS.items() if kind not in PLAIN_LORA}
NOT_FACTORS["activated LoRA"] = peft.LoraConfig(**LORA, alora_invocation_tokens=[8])  # not added to every token


@pytest.mark.parametrize("kind", NOT_FACTORS)
def test_what_is_more_than_factors_on_linear_layers_is_no_adapter_for_an_engine(tokenizer, kind):
    with pytest.raises(ValueError, match=r"vllm_lora_as_adapter=True sends plain LoRA.* is trained besides"):
        lora_factors(adapted(make_model(tokenizer), NOT_FACTORS[kind]))


def test_a_policy_without_an_adapter_has_no_factors(tokenizer, model):
    with pytest.raises(ValueError, match="and the policy has none"):
        lora_factors(model.requires_grad_(False))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is trained besides"):
        lora_factors(model.requires_grad_(True))


def test_an_adapter_that_is_merged_already_is_not_merged_again(tokenizer):
    policy = adapted(make_model(tokenizer), ADAPTERS["LoRA"])
    policy.merge_adapter()
    assert_engine_gets(policy, make_model(tokenizer).eval(), logits(policy))


def test_an_adapter_added_by_transformers(tokenizer):
    model = make_model(tokenizer).eval()
    peft.inject_adapter_in_model(peft.LoraConfig(**LORA, init_lora_weights=False), model)
    model._hf_peft_config_loaded = True  # as `PreTrainedModel.add_adapter` marks it
    assert_engine_gets(model, make_model(tokenizer).eval(), logits(model))


@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_wrappers_are_not_in_the_names(tokenizer, kind, gloo):
    model = make_model(tokenizer).eval()
    policy = model if kind == "plain" else adapted(model, ADAPTERS["LoRA, saved norms and MLP"])
    expected = logits(policy)
    layers = model.model.layers
    layers[0] = torch.compile(layers[0])
    layers[1] = checkpoint_wrapper(layers[1])
    for wrapped in (
        torch.compile(policy),
        nn.parallel.DistributedDataParallel(policy),
        torch.compile(nn.parallel.DistributedDataParallel(policy)),
        nn.parallel.DistributedDataParallel(torch.compile(policy)),
    ):
        assert_engine_gets(wrapped, make_model(tokenizer).eval(), expected)


@pytest.fixture
def gloo() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard(policy: Any, model: Qwen2ForCausalLM, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


SHARDED = ("LoRA", "DoRA", "LoRA, saved head", "LoRA, embeddings and head", "LoRA, trained tokens", "IA3", "LN tuning")


def check_sharded(world_size: int) -> None:
    """That FSDP2 policies give whole tensors, before and after a forward, and keep their shards."""
    tokenizer = make_tokenizer()
    for kind in ("", *SHARDED):
        model = make_model(tokenizer).eval()
        policy = adapted(model, ADAPTERS[kind]) if kind else model
        expected, factors = logits(policy), lora_factors(policy) if kind in PLAIN_LORA else {}
        shard(policy, model, world_size)
        for name, factor in (lora_factors(policy) if factors else {}).items():
            assert torch.equal(factor, factors[name])
        shards = {name: (id(p), p.to_local().clone()) for name, p in policy.named_parameters()}
        assert_engine_gets(policy, make_model(tokenizer).eval(), expected)
        for name, param in policy.named_parameters():
            assert shards[name][0] == id(param)
            assert torch.equal(shards[name][1], param.to_local())
        torch.testing.assert_close(logits(policy), expected)  # some parameters stay whole after it
        assert_engine_gets(policy, make_model(tokenizer).eval(), expected)


def test_fsdp2_on_one_process(gloo):
    check_sharded(1)


def check_rank(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    check_sharded(2)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_fsdp2_on_two_processes(tmp_path: Path):
    torch.multiprocessing.spawn(check_rank, args=(str(tmp_path),), nprocs=2)


PROMPT_LEARNING = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8),
}


@pytest.mark.parametrize("kind", PROMPT_LEARNING)
def test_prompt_learning_is_refused(tokenizer, kind):
    policy = peft.get_peft_model(make_model(tokenizer), PROMPT_LEARNING[kind])
    for call in (check_engine_can_hold, engine_weights):  # at the call, not at the first weight
        with pytest.raises(ValueError, match=r"(?s)vLLM cannot be given this type of adapter.*use_vllm=False"):
            call(policy)


def test_an_adapter_that_cannot_be_merged_is_refused(tokenizer):
    policy = adapted(make_model(tokenizer), peft.LoraConfig(**LORA, alora_invocation_tokens=[3]))
    before = state(policy)
    with pytest.raises(ValueError, match="cannot be merged into the weights: aLoRA"):
        list(engine_weights(policy))
    assert_same(policy, before)


def test_what_is_trained_outside_of_the_layers_is_refused(tokenizer):
    policy = adapted(make_model(tokenizer), ADAPTERS["LoRA"])
    policy.base_model.gate = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"base_model\.gate\.weight is trained and belongs to no layer"):
        check_engine_can_hold(policy)


def test_replicated_layers_are_refused(tokenizer):
    policy = peft.get_peft_model(make_model(tokenizer), peft.LoraConfig(**LORA, layer_replication=[(0, 2), (0, 2)]))
    with pytest.raises(ValueError, match="layer_replication"):
        check_engine_can_hold(policy)


@pytest.mark.parametrize("sign", ["dtype", "flag"])
def test_quantized_weights_are_refused(tokenizer, sign):
    policy = adapted(make_model(tokenizer), ADAPTERS["LoRA"])
    base = policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    if sign == "dtype":
        base.weight = nn.Parameter(base.weight.to(torch.int8), requires_grad=False)
    else:
        policy.get_base_model().is_quantized = True  # as transformers marks it
    with pytest.raises(ValueError, match=r"(?s)quantized.*load_in_4bit.*use_vllm=False"):
        check_engine_can_hold(policy)


APART = {
    "saved head": peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "saved embeddings": peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
    "both saved, apart": peft.LoraConfig(**LORA, modules_to_save=["embed_tokens", "lm_head"]),
    "LoRA on the head": peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "lm_head"]}),
    "LoRA on the embeddings": peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "embed_tokens"]}),
    "LoRA on both, apart": peft.LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "lm_head"]}),
}


@pytest.mark.parametrize("kind", APART)
def test_tied_embeddings_that_are_trained_apart_are_refused(tokenizer, kind):
    policy = peft.get_peft_model(make_tied(tokenizer), APART[kind])  # equal still: the adapter is new
    with pytest.raises(ValueError, match=r"(?s)tie_word_embeddings is True.*ensure_weight_tying=True"):
        check_engine_can_hold(policy)
    untied = peft.get_peft_model(make_model(tokenizer), copy.deepcopy(APART[kind]))
    check_engine_can_hold(untied)


def test_tied_in_the_config_alone_is_refused(tokenizer):
    model = make_model(tokenizer)
    model.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="tie_word_embeddings is True"):
        check_engine_can_hold(model)
