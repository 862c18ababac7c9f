"""Trains a tiny model, or with a rank an adapter of it, against a server:

    python -m support.trl.program MODEL URL OUTPUT STEPS [RANK]

Prints the trainer's log as JSON.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any


def attention(
    query: Any, key: Any, value: Any, ends_q: Any, ends_k: Any, longest_q: int, longest_k: int, **options: Any
) -> Any:
    """Stands for a kernel of Hopper GPUs: causal attention of packed sequences, aligned at their ends."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    groups = query.shape[1] // key.shape[1]
    parts = []
    for (q0, q1), (k0, k1) in zip(ends_q.unfold(0, 2, 1).tolist(), ends_k.unfold(0, 2, 1).tolist(), strict=True):
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options["softmax_scale"])
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def main(model: str, url: str, output: str, steps: int, rank: int = 0) -> None:
    from types import SimpleNamespace

    from datasets import Dataset
    from datasets.fingerprint import Hasher
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from support.trl.reward import reward

    # It names caches alone, and some versions of dill cannot hash tables of some versions of pyarrow.
    Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex)
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *args, **kwargs: None
    prompts = [{"prompt": [{"role": "user", "content": f"Say {word}."}]} for word in ("mill", "wheel", "water", "stone")]
    args = AsyncGRPOConfig(
        output_dir=output,
        vllm_server_base_url=url,
        dtype="float32",
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=16,
        max_inflight_tasks=8,
        weight_sync_steps=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj", "down_proj"]) if rank else None
    data = Dataset.from_list(prompts * 32)
    trainer = AsyncGRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=data, peft_config=adapter)
    trainer.train()
    print(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
