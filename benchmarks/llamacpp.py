"""llama.cpp as an engine to compare with, through llama-cpp-python's low-level calls: its high-level ones take one
prompt at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.bench.workloads import Workload
from headrace.errors import ConfigError, EngineError

CONTEXT_STEP = 256
"""llama.cpp rounds a sequence's share of the context to this many tokens."""


class LlamaCppEngine:
    """One GGUF file, one context whose sequences are the prompts of a case."""

    def __init__(self, path: str, *, sequences: int, longest: int, num_threads: int, batch: int = 2048) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise ConfigError("llama.cpp is not installed: pip install llama-cpp-python", "--compare") from None
        self._lib = llama_cpp
        self._version = llama_cpp.__version__
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise EngineError(f"llama.cpp could not load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._capacity = batch
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_ctx = sequences * -(-(longest + 1) // CONTEXT_STEP) * CONTEXT_STEP
        params.n_batch = batch
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise EngineError(f"llama.cpp could not make a context for {sequences} sequences of {longest} tokens")
        self._batch = llama_cpp.llama_batch_init(batch, 0, 1)

    def generate(self, load: Workload) -> None:
        prompts, output_lens = load.prompts, load.output_lens
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        tokens = self._prefill(prompts)
        made = [1] * len(prompts)
        while any(count < length for count, length in zip(made, output_lens, strict=True)):
            rows = [seq for seq, count in enumerate(made) if count < output_lens[seq]]
            entries = [(tokens[seq], len(prompts[seq]) + made[seq] - 1, seq, True) for seq in rows]
            for seq, token in self._decode(entries):
                tokens[seq] = token
                made[seq] += 1

    def _prefill(self, prompts: list[list[int]]) -> dict[int, int]:
        """The first token of each prompt."""
        entries = [
            (token, place, seq, place == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        first: dict[int, int] = {}
        for start in range(0, len(entries), self._capacity):
            first.update(self._decode(entries[start : start + self._capacity]))
        return first

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, int]]:
        """Runs (token, position, sequence, wants logits) entries; yields the likeliest next token of those that want it."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token, position, seq, wanted) in enumerate(entries):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = seq
            batch.logits[place] = wanted
        code = self._lib.llama_decode(self._context, batch)
        if code != 0:
            raise EngineError(f"llama.cpp's decode returned {code}")
        for place, (_, _, seq, wanted) in enumerate(entries):
            if wanted:
                logits = self._lib.llama_get_logits_ith(self._context, place)
                yield seq, int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def counters(self) -> dict[str, float]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"version": self._version, "weights": "as in the file"}

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)
