"""Embeddings and scores over a real runner: tiny models, compared with transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.models.tiny_pooling import NAN, NO, QUERY, WIDTH, YES, write_modules, write_pooling_config, write_pooling_model
from transformers import PreTrainedModel

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.config import EngineArgs
from headrace.engine.core import EngineCore
from headrace.errors import ConfigError, RequestError
from headrace.frontend.pairs import INSTRUCTION
from headrace.frontend.pooling import EmbedOptions
from headrace.outputs import OutputDelta
from headrace.pooling_params import PoolingParams

TEXTS = ["The mill", "a", "Water boils at a hundred degrees, and mills turn " * 2]
SIZES: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64}
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def states(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """``[T, width]``: the last hidden states by transformers."""
    with torch.inference_mode():
        hidden: torch.Tensor = getattr(model, "model", model)(torch.tensor([tokens])).last_hidden_state[0]
    return hidden


def vectors(outputs: list[Any]) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def ids(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer().encode(text)


def refused(call: Any, param: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        call()
    assert caught.value.param == param


@pytest.fixture(scope="module")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def embedder_model(embedder_folder: Path) -> PreTrainedModel:
    """As Qwen3-Embedding is published: layers without a head, under the name of a causal language model."""
    model = write_pooling_model(embedder_folder, "Qwen3Model", tie_word_embeddings=False)
    write_pooling_config(embedder_folder, "Qwen3ForCausalLM", tie_word_embeddings=False)
    write_modules(embedder_folder)
    return model


@pytest.fixture(scope="module")
def embedder(embedder_folder: Path, embedder_model: PreTrainedModel) -> Iterator[LLM]:
    with LLM(str(embedder_folder), **SIZES) as llm:
        yield llm
        llm.check_integrity()


def test_the_last_token_is_pooled_and_normalised(embedder: LLM, embedder_model: PreTrainedModel) -> None:
    outputs = embedder.embed(TEXTS)
    expected = torch.stack([states(embedder_model, ids(embedder, text))[-1] for text in TEXTS])
    close(vectors(outputs), torch.nn.functional.normalize(expected))
    assert [output.prompt_token_ids[-1] for output in outputs] == [257] * 3
    raw = torch.tensor([output.outputs.data for output in embedder.encode(TEXTS) if output.outputs])
    close(raw, expected)
    close(torch.tensor([o.outputs.embedding for o in embedder.embed(TEXTS, normalize=False) if o.outputs]), expected)


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_one_vector_an_input(embedder: LLM, count: int) -> None:
    outputs = embedder.embed([{"prompt_token_ids": [65 + i % 26, 66 + i % 7]} for i in range(count)])
    assert len(outputs) == count
    assert [output.outputs and len(output.outputs.embedding) for output in outputs] == [WIDTH] * count
    assert [output.prompt_token_ids for output in outputs] == [[65 + i % 26, 66 + i % 7] for i in range(count)]


def test_prompts_and_instructions(embedder: LLM) -> None:
    query = "how do mills work"
    plain = embedder.embed(f"{QUERY}{query}")
    for options in ({"input_type": "query"}, {"prompt_name": "query"}):
        assert embedder.embed(query, **options)[0].prompt_token_ids == plain[0].prompt_token_ids
    (own,) = embedder.embed(query, instruction="Find mills")
    assert own.prompt_token_ids == ids(embedder, "Instruct: Find mills\nQuery:how do mills work")
    assert embedder.embed(query, input_type="document")[0].prompt_token_ids == ids(embedder, query)


def test_dimensions_are_cut_before_the_norm(embedder: LLM) -> None:
    (whole,) = vectors(embedder.embed("mill"))
    for count in (32, 33, WIDTH):
        (cut,) = vectors(embedder.embed("mill", dimensions=count))
        assert cut.shape == (count,) and abs(cut.norm().item() - 1) < 1e-6
        close(cut, torch.nn.functional.normalize(whole[:count], dim=0))
    refused(lambda: embedder.embed("mill", dimensions=31), "dimensions", "32 to 64")


def test_refusals_of_embeddings(embedder: LLM) -> None:
    refused(lambda: embedder.embed("a", prompt_name="passage"), "prompt_name", "there is query, document")
    refused(lambda: embedder.embed("a", prompt_name="query", input_type="query"), "prompt_name", "not both")
    refused(lambda: embedder.embed("a", prompt_name="query", instruction="x"), "prompt_name", "not both")
    refused(lambda: embedder.embed("a", instruction="x", input_type="document"), "instruction", "for queries")
    refused(lambda: embedder.embed("a", input_type="passage"), "input_type", "query or document")
    refused(lambda: embedder.embed({"prompt_token_ids": [1]}, input_type="query"), "input_type", "token ids")
    refused(lambda: embedder.embed(["a", {"prompt_token_ids": []}]), "prompts[1]", "empty")
    refused(lambda: embedder.embed({"prompt_token_ids": [272]}), "prompts", "not in the vocabulary")
    refused(lambda: embedder.embed({"prompt_token_ids": [65] * 257}), "prompts", "at most 256")
    refused(lambda: embedder.embed({"prompt": "a", "multi_modal_data": {}}), "prompts", "multi_modal_data")
    refused(lambda: embedder.generate("a"), "model", "generates no text: the checkpoint has no output head")
    refused(lambda: embedder.classify("a"), "prompts", "no classification head")
    refused(lambda: embedder.score("a", "b", max_tokens_per_doc=2), "max_tokens_per_doc", "for rerankers")
    refused(lambda: embedder.score(["a", "b"], ["c"] * 3), "data_1", "give one, or as many")
    with pytest.raises(TypeError):
        embedder.embed("a", dimension=3)


def test_a_prompt_may_fill_the_context(embedder: LLM, embedder_model: PreTrainedModel) -> None:
    tokens = [65 + i % 26 for i in range(256)]
    expected = states(embedder_model, tokens)[-1:]
    close(vectors(embedder.embed({"prompt_token_ids": tokens})), torch.nn.functional.normalize(expected))


def test_prefixes_are_found_and_the_last_token_is_computed(embedder: LLM) -> None:
    embedder.reset_prefix_cache()
    tokens = {"prompt_token_ids": list(range(65, 113))}
    (first,), (again,) = embedder.embed(tokens), embedder.embed(tokens)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    close(vectors([first]), vectors([again]))


def test_not_finite_is_an_error_of_one_input(embedder: LLM) -> None:
    outputs = embedder.embed(["a", {"prompt_token_ids": [65, NAN, 66]}, "b"])
    assert [output.outputs is None for output in outputs] == [False, True, False]
    assert "not finite" in str(outputs[1].error)
    assert all(output.outputs for output in embedder.embed(["a", "b"]))


def test_similarity_scores(embedder: LLM) -> None:
    outputs = embedder.score("mill", ["water mill", "mill", "water mill"])
    query, *documents = vectors([*embedder.embed("mill", input_type="query"), *embedder.embed(["water mill", "mill"])])
    scores = [output.outputs.score for output in outputs if output.outputs]
    close(torch.tensor(scores), torch.stack([query @ documents[place] for place in (0, 1, 0)]))
    assert [len(output.prompt_token_ids) for output in outputs][2] == 0  # It was computed for the first.


@pytest.fixture(scope="module")
def decoder_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("decoder")
    return folder, write_pooling_model(folder, max_position_embeddings=512)


def outputs_of(core: EngineCore, deltas: Sequence[OutputDelta] = ()) -> dict[str, Any]:
    """Runs an engine until it has no work: request -> its tokens, or its pooled numbers. ``deltas``: earlier ones."""
    found: dict[str, Any] = {}
    while deltas or core.has_work():
        deltas, own = (), deltas or core.step()
        for delta in own:
            assert delta.error is None
            if delta.pooled is not None:
                found[delta.request_id] = torch.frombuffer(bytearray(delta.pooled), dtype=torch.float32)
            else:
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found


@pytest.mark.parametrize("args", [{}, {"num_kv_blocks": 13, "max_num_batched_tokens": 16, "pipeline_depth": 2}])
def test_generation_and_embeddings_share_steps(decoder_model: tuple[Path, PreTrainedModel], args: dict[str, Any]) -> None:
    folder, model = decoder_model
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [[65 + (i * j) % 26 for j in range(20 + 30 * i)] for i in range(4)]
    with LLM(str(folder), **SIZES | args) as llm:
        alone = [llm.generate({"prompt_token_ids": tokens}, greedy)[0].outputs[0].token_ids for tokens in prompts]
        llm.reset_prefix_cache()
        core, pooling = llm._engine.core, llm._engine.pooling
        assert isinstance(core, EngineCore)
        embeddings = pooling.embed(prompts, "embed", EmbedOptions())
        for tokens, request, number in zip(prompts, embeddings.requests, range(4), strict=True):
            core.add(llm.inputs.request({"prompt_token_ids": tokens}, greedy, request_id=f"text-{number}"))
            core.add(request)
        found = outputs_of(core)
        assert (llm.stats.num_preemptions > 0) == bool(args)
        llm.check_integrity()
    for number, tokens in enumerate(prompts):
        assert found[f"text-{number}"] == alone[number]
        close(found[f"embed-{number}"], states(model, tokens)[-1])


def test_preemption_at_any_step_changes_no_result(decoder_model: tuple[Path, PreTrainedModel]) -> None:
    folder, model = decoder_model
    tokens = [65 + i % 26 for i in range(100)]
    hidden = states(model, tokens)
    with LLM(str(folder), pipeline_depth=2, **SIZES | {"max_num_batched_tokens": 16}) as llm:
        core = llm._engine.core
        assert isinstance(core, EngineCore)
        (request,) = llm._engine.pooling.embed([tokens], "a", EmbedOptions()).requests
        kinds = {"last": PoolingParams(), "mean": PoolingParams(method="mean")}
        num_preempted = 0
        for steps in range(1, 14):
            llm.reset_prefix_cache()
            for name, pooling in kinds.items():
                core.add(msgspec.structs.replace(request, request_id=name, pooling=pooling))
            early = [delta for _ in range(steps) for delta in core.step()]
            for seq in core.scheduler._running.snapshot():
                core.scheduler._preempt(seq)
                num_preempted += 1
            found = outputs_of(core, early)
            close(found["last"], hidden[-1])
            close(found["mean"], hidden.mean(0))
        assert num_preempted > 9
        llm.check_integrity()


def test_the_mean_leaves_the_prompt_out_and_finds_no_prefix(decoder_model: tuple[Path, PreTrainedModel]) -> None:
    folder, model = decoder_model
    write_modules(folder, "mean", normalize=False, include_prompt=False, prompts={"query": "query: "})
    try:
        with LLM(str(folder), **SIZES | {"max_num_batched_tokens": 16}) as llm:
            for _ in range(2):
                outputs = llm.embed(TEXTS, input_type="query")
                expected = [states(model, ids(llm, f"query: {text}"))[len("query: ") :].mean(0) for text in TEXTS]
                close(vectors(outputs), torch.stack(expected))
                assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
            close(vectors(llm.embed(TEXTS))[:1], states(model, ids(llm, TEXTS[0])).mean(0)[None])
            refused(lambda: llm.embed("a", instruction="x"), "instruction", "takes no instruction")
            refused(lambda: llm.embed("a", dimensions=8), "dimensions", "Matryoshka")
    finally:
        (folder / "modules.json").unlink()


def test_a_reranker_scores_by_yes_and_no(decoder_model: tuple[Path, PreTrainedModel]) -> None:
    folder, model = decoder_model
    documents = ["mills", "water, " * 60]
    with LLM(str(folder), task="score", max_model_len=400, **SIZES | {"num_kv_blocks": 100}) as llm:
        cases: list[dict[str, Any]] = [{}, {"instruction": "Find mills"}, {"max_tokens_per_doc": 9, "max_tokens_per_query": 3}]
        for options in cases:
            outputs = llm.score("how do mills work", documents, **options)
            query, most = (
                "how" if "max_tokens_per_query" in options else "how do mills work",
                options.get("max_tokens_per_doc", 0),
            )
            for output, document in zip(outputs, documents, strict=True):
                filled = TEMPLATE.format(instruction=options.get("instruction", INSTRUCTION), query=query, document=document)
                tokens = llm.get_tokenizer().encode(filled, add_special_tokens=False)
                start = len(
                    llm.get_tokenizer().encode(filled[: filled.index(f" {document}<|im_end|>")], add_special_tokens=False)
                )
                end = len(tokens) - len(llm.get_tokenizer().encode(TEMPLATE.partition("{document}")[2], False))
                kept = min(end - start, most or end - start, 400 - len(tokens) + end - start)
                tokens = [*tokens[: start + kept], *tokens[end:]]
                assert output.prompt_token_ids == tokens and len(tokens) <= 400
                with torch.inference_mode():
                    logits = model(torch.tensor([tokens])).logits[0, -1]
                assert output.outputs is not None
                close(torch.tensor(output.outputs.score), torch.sigmoid(logits[YES] - logits[NO]))
        refused(lambda: llm.score("q" * 400, "d"), "data_1", "leaves no room")
        refused(lambda: llm.embed("a"), "prompts", "--task score")
        refused(lambda: llm.generate("a"), "model", "--task score")


def test_a_classifier_scores_pairs(tmp_path: Path) -> None:
    model = write_pooling_model(tmp_path, "Qwen3ForSequenceClassification", tie_word_embeddings=False, id2label={"0": "yes"})
    with LLM(str(tmp_path), **SIZES) as llm:
        documents = ["mills", "water, " * 9, "x" * 400]
        outputs = llm.score(["a", "b", "c"], documents)
        for query, document, output in zip("abc", documents, outputs, strict=True):
            tokens = [*query.encode(), 257, *document.encode(), 257]
            tokens = [*tokens[:255], 257] if len(tokens) > 256 else tokens
            assert output.outputs is not None and output.prompt_token_ids == tokens
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0]
            close(torch.tensor([output.outputs.score]), torch.sigmoid(logits))
        close(
            torch.tensor([o.outputs.probs for o in llm.classify(["abc"]) if o.outputs]).logit(),
            torch.tensor([o.outputs.data for o in llm.encode(["abc"]) if o.outputs]),
        )
        refused(lambda: llm.embed("a"), "prompts", "classification head")
        refused(lambda: llm.score("a", "b", instruction="x"), "instruction", "takes no instruction")


def test_words_of_several_tokens_are_refused_at_the_start(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="yes has 3 tokens"):
        LLM(str(tiny_folder), load_format="dummy", task="score", num_kv_blocks=50)


def test_the_asynchronous_api(embedder_folder: Path, embedder: LLM) -> None:
    async def calls() -> None:
        async with AsyncLLM(EngineArgs(model=str(embedder_folder), **SIZES)) as llm:
            close(vectors(await llm.embed(TEXTS, dimensions=32)), vectors(embedder.embed(TEXTS, dimensions=32)))
            (score,), (other,) = await llm.score("a", "b", cache_salt="c"), embedder.score("a", "b")
            assert score.outputs is not None and other.outputs is not None
            assert abs(score.outputs.score - other.outputs.score) < 1e-4
            with pytest.raises(RequestError, match="generates no text"):
                async for _ in llm.generate("a"):
                    pass

    asyncio.run(calls())


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [{"tensor_parallel_size": 2}, {"model_impl": "transformers"}, {"data_parallel_size": 2}], ids=str
)
def test_ranks_foreign_models_and_replicas(decoder_model: tuple[Path, PreTrainedModel], args: dict[str, Any]) -> None:
    folder, model = decoder_model
    with LLM(str(folder), task="embed", **SIZES | args) as llm:
        expected = torch.stack([states(model, ids(llm, text))[-1] for text in TEXTS])
        close(vectors(llm.embed(TEXTS, normalize=False)), expected)
    with LLM(str(folder), task="score", **SIZES | args) as llm:
        (output,) = llm.score("mill", "water")
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert output.outputs is not None
        close(torch.tensor(output.outputs.score), torch.sigmoid(logits[YES] - logits[NO]))
