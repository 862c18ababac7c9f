"""A tiny random Llama and a tokenizer of bytes, as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS = 256, 257
VOCAB = 272
"""Size of the model's vocabulary: more than the tokenizer has."""
CONTEXT = 256

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "dtype": "float32",
}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Token i is the byte i."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {byte: letter for letter, byte in _byte_of(letters).items()}
    vocab = {by_byte[byte]: byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    hf.chat_template = TEMPLATE
    hf.save_pretrained(folder)


def _byte_of(letters: list[str]) -> dict[str, int]:
    """Printable bytes stand for themselves; the others follow from code point 256 on, in their order."""
    plain = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = [byte for byte in range(256) if byte not in plain.values()]
    return plain | {letter: others[ord(letter) - 256] for letter in letters if ord(letter) >= 256}


def write_config(folder: Path, **changes: object) -> Path:
    """Config and tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    write_tokenizer(folder)
    return folder


def write_model(folder: Path, **changes: object) -> Path:
    """Writes a model with random weights that give peaked distributions."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(folder, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    write_config(folder, **changes)
    return folder
