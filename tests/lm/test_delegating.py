"""What transformers sets on a model, or asks of it, is set on and answered by the base model."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Trainer, TrainingArguments

import knnstore
from knnstore import KNNLMForCausalLM, KNNSettings
from knnstore.errors import ConfigError, FingerprintMismatchError

SHAPE = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "num_local_experts": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
IDS = torch.tensor([[0, 5, 6, 7, 8, 9]])


DENSE_IN_CI = ["llama", pytest.param("mixtral", marks=pytest.mark.exhaustive)]


@pytest.fixture(params=["llama", "mixtral"])
def lm(request, make_model, tokenizer, tmp_path):
    """A dense model and one of experts, each with a store of one document."""
    if request.param == "llama":
        base = make_model("llama")
    else:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE)).eval()
    with knnstore.create(tmp_path / "home", base, tokenizer=tokenizer) as made:
        made.add(["w5 w6 w7 w8 w9 w10"], domain="d")
        yield made


def test_setters_reach_the_layers(lm) -> None:
    base = lm.base
    for attention in ("eager", "sdpa"):
        lm.set_attn_implementation(attention)
        assert base.config._attn_implementation == attention
    if "Mixtral" in type(base).__name__:
        for experts in ("eager", "batched_mm", "grouped_mm"):
            lm.set_experts_implementation(experts)
            assert lm.get_experts_implementation() == {"": experts}
            assert base.config._experts_implementation == experts
            found = lm(IDS, knn=KNNSettings(lam=0)).logits
            assert torch.allclose(found, base(IDS).logits, atol=1e-5)
    lm.activation_checkpointing_enable()
    assert lm.is_activation_checkpointing
    assert base.is_activation_checkpointing
    assert base.model.layers[0].gradient_checkpointing
    lm.activation_checkpointing_disable()
    assert not base.is_activation_checkpointing
    assert lm.resize_token_embeddings(120).weight.shape == (120, 32)
    assert base.get_input_embeddings().weight.shape == (120, 32)
    assert base.get_output_embeddings().weight.shape == (120, 32)
    assert base.config.vocab_size == lm.config.vocab_size == 120
    lm.model_tags = ["tag"]
    assert base.model_tags == ["tag"]
    assert lm.half() is lm
    assert base.dtype == lm.dtype == torch.float16
    assert lm.to(torch.float32) is lm
    assert lm.train().training
    assert base.training
    assert not lm.eval().base.training


def test_the_base_answers(lm) -> None:
    base = lm.base
    for name in (
        "device", "dtype", "_no_split_modules", "_supports_sdpa", "_supports_flash_attn", "main_input_name",
        "is_activation_checkpointing", "supports_gradient_checkpointing", "tp_plan", "_tied_weights_keys",
        "all_tied_weights_keys", "use_kernels", "_is_stateful", "lm_head", "model", "generation_config",
        "config", "name_or_path",
    ):  # fmt: skip
        assert getattr(lm, name) == getattr(base, name), name
    for name in ("num_parameters", "get_memory_footprint", "get_decoder", "get_input_embeddings"):
        assert getattr(lm, name)() == getattr(base, name)(), name
    assert lm.can_generate()
    assert lm.get_output_embeddings() is base.lm_head
    assert not hasattr(lm, "no_such_attribute")
    # The class itself is that of transformers still.
    assert KNNLMForCausalLM.can_generate()
    assert KNNLMForCausalLM._supports_sdpa is PreTrainedModel._supports_sdpa
    assert KNNLMForCausalLM.set_attn_implementation is PreTrainedModel.set_attn_implementation


def trainer(lm, folder, kind=Trainer, **options):
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    options |= {"max_steps": 2, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(folder), **options)
    return kind(model=lm, args=arguments, train_dataset=data, eval_dataset=data)


@pytest.mark.slow
@pytest.mark.parametrize("lm", DENSE_IN_CI, indirect=True)
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"activation_checkpointing": True}])
def test_a_trainer_is_refused_before_its_first_step(lm, tmp_path, options) -> None:
    class Own(Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    before = [weight.clone() for weight in lm.parameters()]
    for kind in (Trainer, Own):
        made = trainer(lm, tmp_path / "out", kind, **options)
        made.evaluate()
        with pytest.raises(ConfigError, match=r"Train the base model \(Trainer\(model=lm\.base\)\)"):
            made.train()
    assert all(torch.equal(one, other) for one, other in zip(before, lm.parameters(), strict=True))
    trainer(lm.base, tmp_path / "out", **options).train()


def test_weights_that_changed_are_not_lost_in_silence(lm, tmp_path) -> None:
    """A loop of one's own may train the base model, but then the saved folder would not hold what it has."""
    lm.train()
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
    lm(IDS, labels=IDS).loss.backward()
    optimizer.step()
    lm.eval()
    with pytest.raises(FingerprintMismatchError, match="make a store for this one"):
        lm.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_what_would_make_the_keys_wrong_is_refused(lm) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    refused = {
        "adapter first": (lambda: lm.add_adapter(config), lambda: lm.load_adapter("a/b")),
        "continuous batching of transformers": (lambda: lm.generate_batch([[0, 5]]),),
        "lm.base.push_to_hub": (lambda: lm.push_to_hub("a/b"),),
    }
    for match, calls in refused.items():
        for call in calls:
            with pytest.raises(ConfigError, match=match):
                call()


@pytest.mark.slow
@pytest.mark.parametrize("lm", DENSE_IN_CI, indirect=True)
def test_the_base_is_compiled(lm) -> None:
    knn = KNNSettings(k=2, lam=0.5, temperature=1.0)
    with torch.no_grad():
        expected = lm(IDS, knn=knn).logits
        lm.compile(backend="eager")
        assert torch.allclose(lm(IDS, knn=knn).logits, expected, atol=1e-5)
        compiled = torch.compile(lm, backend="eager")
        assert torch.allclose(compiled(IDS, knn=knn).logits, expected, atol=1e-5)
