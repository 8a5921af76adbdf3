"""A small Mixture-of-Experts model, made on the spot: random weights, a vocabulary of bytes, no download.

4 layers of 32 experts, of which a token goes to 4; 6.5 million parameters. Which kernels compute its
experts on a CPU is the key `experts_implementation` of its config.json (transformers 5.24.0,
`modeling_utils.py:get_correct_experts_implementation`): `grouped_mm` is about twice as fast as `batched_mm`.
"""

from __future__ import annotations

import json
from pathlib import Path

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
_SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")


def make_model(folder: Path) -> None:
    """Write model and tokenizer, and a config file `config.NAME.json` for each implementation."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    vocabulary = make_tokenizer(folder)
    torch.manual_seed(0)
    begin, end, pad = range(len(_SPECIAL))
    special = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=4096,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **special,
    )
    model = Qwen3MoeForCausalLM(config)
    # No special token is ever the likeliest: an answer does not end before it has the asked length.
    with torch.no_grad():
        model.lm_head.weight[: len(_SPECIAL)] = 0
    model.generation_config = GenerationConfig(do_sample=False, **special)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    for name in IMPLEMENTATIONS:
        text = json.dumps({**written, "experts_implementation": name})
        (folder / f"config.{name}.json").write_text(text)


def make_tokenizer(folder: Path) -> int:
    """Write a tokenizer that has a token for each byte; say how many tokens there are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    begin, end, pad = _SPECIAL
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad
    )
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    wrapped.save_pretrained(folder)
    return len(words)
