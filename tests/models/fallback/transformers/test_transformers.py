"""Models of transformers on headrace's attention: the same tokens and logprobs, and refusals that say why."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import tiny_models
from support.models.architectures import TOLERANCE, quiet, survey_one
from support.models.foreign import decisions, engine, model_of, tokens_of
from support.models.packers import Rounded
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.models.fallback.refusal import Unfit
from headrace.models.fallback.transformers.load import describe
from headrace.models.fallback.transformers.trace import window_of
from headrace.models.interface import ModelInputs

RUN = [
    "bart",
    "bigbird_pegasus",
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3n_text",
    "gpt2",
    "gpt_oss",
    "gptj",
    "granite",
    "jetmoe",
    "kimi_linear",
    "llama",
    "mamba",
    "mimo_v2_flash",
    "mixtral",
]
"""Tables that are asked for a place in the batch, layers causal by their mask alone, windows between full layers, latent
attention, soft caps, shared KV, learned positions, sinks, multipliers, heads that differ by layer with K wider than V, experts,
experts that read on the host how many tokens they are given, attention in a method of its own, convolutions and states beside
attention and without any."""
REFUSED = {
    "bloom": r"transformer\.h\.0: it adds biases by position to the logits \(ALiBi",
    "blt": r"model\.patcher: the shapes of what it computes depend on what it computes for a step's tokens",
    "deepseek_v32": r"model\.layers\.0\.self_attn: its DeepseekV32Indexer chooses the keys that a token sees",
    "doge": r"model\.layers\.0\.self_attn: it changes the attention mask itself",
    "inkling_text": r"model\.layers\.0\.self_attn: it adds biases by position",
    "llama4_text": "neither causal nor a sliding window: how far a token sees depends on its place",
    "minimax": r"model\.layers\.1\.self_attn: a MiniMaxLightningAttention mixes tokens of different sequences",
    "mpt": r"it adds biases by position to the logits \(ALiBi",
    "qwen4_exp_text": r"model\.layers\.1\.self_attn: its Qwen4ExpTextQSAIndexer chooses the keys that a token sees",
    "recurrent_gemma": r"model\.layers\.0\.temporal_block\.conv_1d: it carries a state",
    "reformer": "none of its layers calls",
    "xlnet": "none of its layers calls",
    "xlstm": "it carries a state",
}
"""Some take fewer tokens than models are looked at with, compute in float32 alone, or need padding: none of this is why."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in ("bart", "gemma2", "gptj", "llama") else ()) for kind in RUN]
)
def test_tokens_and_logprobs_are_transformers_own(kind: str) -> None:
    """The run has chunks, mixed batches, preemptions and prefix hits."""
    verdict = survey_one(kind)
    assert verdict.runs, verdict.reason
    assert not verdict.fault
    assert verdict.error <= TOLERANCE


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_name_the_layer_and_the_reason(kind: str, tmp_path: Path) -> None:
    with quiet():
        tiny_models.save(tiny_models.model(kind), tmp_path)
        with pytest.raises(ConfigError, match=REFUSED[kind]) as caught:
            engine(tmp_path)
    assert caught.value.param == "model_impl"


def test_a_method_that_attends_otherwise_than_it_is_taken_to_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = GPTNeoXJapaneseAttention._attn
    monkeypatch.setattr(GPTNeoXJapaneseAttention, "_attn", lambda self, q, k, v, mask=None: own(self, 1.5 * q, k, v, mask))
    with quiet():
        tiny_models.save(tiny_models.model("gpt_neox_japanese"), tmp_path)
        with pytest.raises(ConfigError, match="layer 0: the attention of a GPTNeoXJapaneseAttention is not the softmax"):
            engine(tmp_path)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a native implementation."""
    folder = tmp_path_factory.mktemp("granite")
    with quiet():
        tiny_models.save(tiny_models.model("granite"), folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    with quiet():
        tiny_models.save(tiny_models.model("llama"), folder)
    return folder


def test_auto_takes_transformers_where_there_is_no_native_model_and_says_so(granite: Path) -> None:
    with quiet():
        llm = engine(granite, model_impl="auto")
    value, why = decisions(llm)["model_impl"]
    assert value == "transformers"
    assert "GraniteForCausalLM has no native implementation" in why


def test_auto_takes_the_native_model_and_says_so(llama: Path) -> None:
    with quiet():
        native, foreign = engine(llama, model_impl="auto"), engine(llama)
    assert decisions(native)["model_impl"] == ("native", "LlamaForCausalLM is registered")
    assert decisions(foreign)["model_impl"] == ("transformers", "asked for")
    assert tokens_of(native, [5, 6, 7, 8]) == tokens_of(foreign, [5, 6, 7, 8])


def test_native_is_refused_where_there_is_none(granite: Path) -> None:
    with pytest.raises(ConfigError, match="GraniteForCausalLM is not supported"):
        engine(granite, model_impl="native")


@pytest.mark.parametrize("changes", [{"model_impl": "onnx"}, {"model_impl": "megatron"}])
def test_unknown_implementations_are_refused(granite: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(granite, **changes)
    assert caught.value.param == "model_impl"


def test_dummy_weights(granite: Path) -> None:
    with quiet():
        one, two, other = (engine(granite, load_format="dummy", seed=seed) for seed in (3, 3, 4))
    prompt = [9, 8, 7]
    assert tokens_of(one, prompt) == tokens_of(two, prompt)
    weights = [dict(model_of(llm).foreign.named_parameters())["model.embed_tokens.weight"] for llm in (one, other)]
    assert not torch.equal(weights[0], weights[1])


def test_bfloat16_follows_the_model(granite: Path) -> None:
    with quiet():
        llm = engine(granite, dtype="bfloat16")
    assert {parameter.dtype for parameter in model_of(llm).foreign.parameters()} == {torch.bfloat16}
    assert tokens_of(llm, [4, 5, 6])


def copy_of(folder: Path, to: Path, without: str | None = None, **more: torch.Tensor) -> None:
    """The same checkpoint with a tensor less, or some more."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to, dirs_exist_ok=True)
    weights = load_file(to / "model.safetensors")
    weights.pop(without, None)
    save_file(weights | more, to / "model.safetensors", metadata={"format": "pt"})


def quantised(folder: Path, to: Path) -> None:
    """The same checkpoint in GPTQ's layout, with biases of zeros as its writers add them; and its floats in a folder within."""
    from safetensors.torch import load_file, save_file

    for copy in (to, to / "floats"):
        shutil.copytree(folder, copy, dirs_exist_ok=True)
    held, meant = {}, load_file(to / "model.safetensors")
    for name, tensor in list(meant.items()):
        held[name] = tensor
        if "_proj" in name:
            module = name.removesuffix(".weight")
            made = Rounded(*tensor.shape, group=8)
            del held[name]
            held |= {f"{module}.{leaf}": one for leaf, one in made.gptq().items()} | {
                f"{module}.bias": torch.zeros(len(tensor))
            }
            meant[name] = made.meant
    save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, to / "floats" / "model.safetensors", metadata={"format": "pt"})
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))


def test_quantised_checkpoints_are_run_as_floats(granite: Path, tmp_path: Path) -> None:
    quantised(granite, tmp_path)
    with quiet():
        ours, floats = engine(tmp_path), engine(tmp_path / "floats")
    expected = dict(model_of(floats).foreign.named_parameters())
    for name, parameter in model_of(ours).foreign.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert tokens_of(ours, [5, 6, 7, 8]) == tokens_of(floats, [5, 6, 7, 8])
    assert decisions(ours)["checkpoint format"] == (
        "gptq: int4, groups of 8, integer zeros",
        "its matrices are dequantised to float32",
    )


def test_formats_that_are_not_read_are_refused_by_name(granite: Path, tmp_path: Path) -> None:
    copy_of(granite, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "quark"}}))
    with quiet(), pytest.raises(ConfigError, match="quant_method 'quark' is not supported") as caught:
        engine(tmp_path)
    assert caught.value.param == "quantization_config"


def test_a_missing_weight_is_an_error(granite: Path, tmp_path: Path) -> None:
    copy_of(granite, tmp_path, "model.layers.1.mlp.up_proj.weight")
    with quiet(), pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        engine(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.encoder.layers.0.fc1.weight",
        "model.layers.0.self_attn.sinks",
        "v_head.bias",
    ],
)
def test_a_weight_that_nothing_loads_is_an_error(name: str, granite: Path, tmp_path: Path) -> None:
    copy_of(granite, tmp_path, **{name: torch.ones(4)})
    with quiet(), pytest.raises(ConfigError, match="no place for: " + re.escape(name)):
        engine(tmp_path)


def test_what_is_computed_and_encoders_of_pictures_may_be_left_out(granite: Path, tmp_path: Path) -> None:
    names = ["model.layers.1.self_attn.rotary_emb.inv_freq", "h.0.attn.masked_bias", "model.vision_tower.patch.weight"]
    copy_of(granite, tmp_path, **{name: torch.ones(4) for name in names})
    with quiet():
        llm, expected = engine(tmp_path), engine(granite)
    value, why = decisions(llm)["weights left out"]
    assert value == "2" and "h.0.attn.masked_bias, model.vision_tower.patch.weight" in why
    assert tokens_of(llm, [5, 6, 7, 8]) == tokens_of(expected, [5, 6, 7, 8])


def test_transformers_own_table_of_weights_is_not_shown(
    granite: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The start-up report has what it would say."""
    copy_of(granite, tmp_path, **{"h.0.attn.masked_bias": torch.ones(4)})
    caplog.clear()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        llm = engine(tmp_path)
    finally:
        transformers.logging.set_verbosity(level)
    assert "weights left out" in decisions(llm)
    assert "UNEXPECTED" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("impl", ["auto", "native", "transformers"])
@pytest.mark.parametrize(
    ("model_class", "fields"),
    [
        (transformers.WhisperForConditionalGeneration, {"max_source_positions": 32, "num_mel_bins": 8}),
        (transformers.BartForConditionalGeneration, {"tie_word_embeddings": False}),
    ],
)
def test_decoders_that_attend_to_an_encoder_are_refused(
    impl: str, model_class: type[transformers.PreTrainedModel], fields: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2} | {"pad_token_id": 0, "vocab_size": 97}
    sizes |= {f"{part}_{name}": 4 for part in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
    with quiet():
        model_class(model_class.config_class(**sizes, **fields)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: is_encoder_decoder is true: .* attends to an encoder"):
        engine(tmp_path, model_impl=impl, max_model_len=64)


def test_a_decoder_with_cross_attention_is_refused(tmp_path: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 97}
    with quiet():
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, add_cross_attention=True)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: add_cross_attention is true: .* attends to an encoder"):
        engine(tmp_path, max_model_len=64)


def test_matrices_of_one_input_are_fused_and_still_take_updates(llama: Path) -> None:
    with quiet():
        llm, again = engine(llama), engine(llama)
    value, _ = decisions(llm)["fused matrices"]
    assert int(value) == 2 * 3, "query, key, value and gate, up of three layers"
    model, prompt = model_of(llm), [5, 9, 11]
    before = tokens_of(llm, prompt)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert name in dict(model.name_table().items())
    weight = dict(model.foreign.named_parameters())[name]
    assert llm.update_weights([(name, 3 * torch.randn(weight.shape))]) == 1
    changed = tokens_of(llm, [prompt[0], 12, *prompt])
    assert changed != tokens_of(again, [prompt[0], 12, *prompt])
    assert before == tokens_of(again, prompt)


def test_updates_of_unknown_weights_raise(llama: Path) -> None:
    with quiet():
        llm = engine(llama)
    with pytest.raises(ConfigError, match="has no weight"):
        llm.update_weights([("model.layers.7.mlp.up_proj.weight", torch.zeros(1))])
    with pytest.raises(ConfigError, match="has the shape"):
        llm.update_weights([("model.norm.weight", torch.zeros(1))])


def test_no_tokens_at_all(llama: Path) -> None:
    with quiet():
        model = model_of(engine(llama))
    empty = torch.empty(0, dtype=torch.int64)
    context: Any = type("Context", (), {"caches": [None] * 3})()
    assert model(ModelInputs(empty, empty), context).shape == (0, 32)
    logits = model.logits(torch.empty(0, 32, dtype=torch.bfloat16))
    assert (logits.shape, logits.dtype) == ((0, tiny_models.VOCAB), torch.float32)


def fresh(folder: Path) -> Any:
    with quiet():
        model = model_of(engine(folder))
    return model


def test_every_layer_attends_in_its_turn(llama: Path) -> None:
    model = fresh(llama)
    q = torch.zeros(1, 4, 2, 8)
    kv = torch.zeros(1, 2, 2, 8)
    with pytest.raises(ValueError, match="whose turn it is not"), model.calls.in_order():
        model.calls.attend(model.calls.modules[1], q, kv, kv, None, {})
    with pytest.raises(ValueError, match="0 of 3 layers called attention"), model.calls.in_order():
        pass
    with pytest.raises(ValueError, match="scaling is 7"), model.calls.in_order():
        model.calls.attend(model.calls.modules[0], q, kv, kv, None, {"scaling": 7.0})
    with pytest.raises(ValueError, match="an attention mask of its own"), model.calls.in_order():
        model.calls.attend(model.calls.modules[0], q, kv, kv, torch.zeros(1, 1, 2, 2), {})


def test_the_attention_is_for_models_loaded_here_alone() -> None:
    config = tiny_models.config("llama")
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="headrace")
    with pytest.raises(ValueError, match="models that headrace has loaded"):
        model(input_ids=torch.tensor([[3, 4]]))


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def test_frequencies_that_depend_on_the_batch_end_the_context() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=11,
        max_position_embeddings=32,
        **rope("dynamic", factor=4.0),
    )
    described = describe(config, EngineArgs(), "")
    assert described.spec.max_position == 32
    assert "dynamic" in described.decisions[1].value
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=11,
        max_position_embeddings=64,
        **rope("longrope", factor=4.0, **factors),
    )
    described = describe(config, EngineArgs(max_model_len=16), "")
    assert described.spec.max_position == 16
    assert described.decisions[1].value == "longrope, up to 16 tokens"
    with pytest.raises(ConfigError, match=r"^max_model_len 17 is beyond 16 tokens: .*longrope") as caught:
        describe(config, EngineArgs(max_model_len=17), "")
    assert caught.value.param == "max_model_len"


def test_why_a_model_does_not_run_comes_before_what_it_lacks() -> None:
    """BLOOM's configuration says no context length, but setting one would not help."""
    with pytest.raises(ConfigError, match="it adds biases by position"):
        describe(tiny_models.config("bloom"), EngineArgs(), "")


@pytest.mark.parametrize("window", [1, 2, 7, 4096])
def test_windows_are_read_off_the_mask(window: int) -> None:
    assert window_of(lambda q, k: (k <= q) & (k > q - window)) == window
    assert window_of(lambda q, k: k <= q) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: k >= 0,
        lambda q, k: (k <= q) & (k // 64 == q // 64),
        lambda q, k: (k <= q) & ((k > q - 8) | (k < 2)),
        lambda q, k: k < q,
    ],
    ids=["both ways", "chunks", "window and first tokens", "not itself"],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(Unfit, match="neither causal nor a sliding window"):
        window_of(mask)


def test_padding_of_the_vocabulary_is_not_drawn(tmp_path: Path) -> None:
    """More columns than the configuration has tokens."""
    with quiet():
        made = tiny_models.model("llama")
        made.config.vocab_size = tiny_models.VOCAB
        tiny_models.save(made, tmp_path)
        model = model_of(engine(tmp_path))
    import dataclasses

    model.spec = dataclasses.replace(model.spec, num_tokens=90)
    logits = model.logits(torch.randn(2, 32))
    assert logits.dtype == torch.float32
    assert bool((logits[:, 90:] == -math.inf).all())
    assert bool(logits[:, :90].isfinite().all())


def test_a_missing_library_is_named_with_a_line_that_installs_it(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.models.fallback.transformers import build
    from headrace.sources.files import find_model

    files = find_model(EngineArgs(model=str(granite), model_impl="transformers"))
    monkeypatch.setattr(build, "is_accelerate_available", lambda: False)
    with pytest.raises(ImportError) as caught:
        build.own_model(files, False, torch.float32, torch.device("cuda"))
    assert str(caught.value).endswith(": pip install 'accelerate>=1.2'")


def test_auto_falls_back_where_the_native_model_does_not_do_all(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.models import registry

    def refuse(config: Any) -> Any:
        raise ConfigError("config: swirl 3 is not supported", "swirl")

    monkeypatch.setattr(registry, "model_spec", refuse)
    with quiet():
        llm = engine(llama, model_impl="auto")
    value, why = decisions(llm)["model_impl"]
    assert value == "transformers"
    assert "does not do all of this model: " in why and "config.json: swirl 3 is not supported" in why


def test_an_error_of_auto_says_why_neither_runs(tmp_path: Path) -> None:
    with quiet():
        tiny_models.save(tiny_models.model("bloom"), tmp_path)
        with pytest.raises(ConfigError, match=r"BloomForCausalLM has no native implementation; .*ALiBi"):
            engine(tmp_path, model_impl="auto")


@pytest.mark.parametrize("kind", ["gemma3_text", "llama", "phi3"])
def test_dummy_models_keep_what_is_computed_and_not_stored(kind: str, tmp_path: Path) -> None:
    """Rotary frequencies, for example, which a model made without memory does not have."""
    with quiet():
        made = tiny_models.save(tiny_models.model(kind), tmp_path)
        model = model_of(engine(tmp_path, load_format="dummy")).foreign
    buffers = dict(made.named_buffers())
    assert buffers
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)


def test_a_layer_that_chooses_its_keys_is_refused() -> None:
    """The indexer chooses from all keys of a short context: only its presence tells."""
    with pytest.raises(ConfigError, match="DeepseekV4Indexer chooses the keys"):
        describe(tiny_models.config("deepseek_v4"), EngineArgs(), "")
