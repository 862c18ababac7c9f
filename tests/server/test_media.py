"""Pictures and videos in requests of every shape, uploads of features, and what is refused by name."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import save
from support.feature_files import tensors
from support.media import clip, data_url, noise, picture, real_picture
from support.server.fakes import FakeLLM
from support.server.harness import Api, running
from support.server.media import HIDDEN, SeeingLLM, loader

from headrace.errors import RequestError
from headrace.multimodal.feature_file import read_features
from headrace.multimodal.media import MediaLoader
from headrace.server.batch import BatchAnswer, answered
from headrace.server.errors import ApiError
from headrace.server.features import FeatureStore
from headrace.server.settings import ServerSettings
from headrace.server.state import Serving

PNG = data_url(picture(32, 24))
FEATURES = save(tensors())


@pytest.fixture(scope="module")
def media() -> Iterator[MediaLoader]:
    made = loader(max_image_pixels=100_000, num_video_frames=4)
    yield made
    made.close()


@pytest.fixture
def llm(media: MediaLoader) -> SeeingLLM:
    return SeeingLLM(media)


@pytest.fixture
def api(llm: SeeingLLM) -> Api:
    return Api(llm)


def image(url: str = PNG) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def embeds(**value: str) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def chat(api: Api, *parts: Any, **fields: Any) -> Any:
    answer = api.post("/v1/chat/completions", user(*parts) | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(api: Api, body: dict[str, Any], param: str, status: int = 400, path: str = "/v1/chat/completions") -> str:
    answer = api.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert param in (error["message"] if "messages" in path else error["param"]), error
    return error["message"]


def prompt(llm: SeeingLLM) -> str:
    return bytes(llm.seen[-1].prompt_token_ids).decode()


def test_a_picture_takes_its_place_in_the_prompt(api: Api, llm: SeeingLLM) -> None:
    answer = chat(api, text("before"), image(), text("after"))
    assert prompt(llm) == "[user]before" + "\x01" * 24 + "after\n[assistant]"
    assert (llm.pictures[0] == np.asarray(noise(32, 24))).all()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 48, "image_tokens": 24, "video_tokens": 0}
    request = llm.seen[-1]
    assert [(item.start, item.end) for item in request.items] == [(12, 36)]


def test_pictures_and_videos_in_order(api: Api, llm: SeeingLLM) -> None:
    video = {"type": "video_url", "video_url": {"url": data_url(clip(6))}}
    answer = chat(api, image(), video, image(data_url(picture(8, 10))))
    assert prompt(llm) == "[user]" + "\x01" * (24 + 48 + 10) + "\n[assistant]"
    details = answer["usage"]["prompt_tokens_details"]
    assert (details["image_tokens"], details["video_tokens"]) == (34, 48)


def test_a_request_of_text_alone(api: Api, llm: SeeingLLM) -> None:
    answer = chat(api, text("one"), text("<image>"))
    assert prompt(llm) == "[user]one\n<_image>\n[assistant]"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert api.complete().status_code == 200


def test_options_of_the_processor(api: Api, llm: SeeingLLM) -> None:
    chat(api, image(), mm_processor_kwargs={"max_pixels": 100})
    assert llm.processor.seen[-1][1] == {"max_pixels": 100}
    wrong = {"messages": [{"role": "user", "content": "Hi"}], "mm_processor_kwargs": {"max_pixels": 100}}
    refused(Api(FakeLLM()), wrong, "mm_processor_kwargs")


def test_responses(api: Api, llm: SeeingLLM) -> None:
    body = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG}]}]
    }
    answer = api.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert prompt(llm) == "[user]a" + "\x01" * 24 + "\n[assistant]"
    assert answer.json()["usage"]["input_tokens_details"]["image_tokens"] == 24
    output = [{"type": "input_image", "image_url": PNG, "detail": "low"}]
    called = [
        {"type": "function_call", "call_id": "1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]
    assert api.post("/v1/responses", {"input": [*body["input"], *called]}).status_code == 200
    assert prompt(llm).endswith("[tool]" + "\x01" * 24 + "\n[assistant]")
    body["input"][0]["content"][1]["image_url"] = "data:image/png;base64,AAAA"
    assert "is not a picture" in refused(api, body, "input[0].content[1]", path="/v1/responses")
    refused(
        api,
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        "input[0]",
        path="/v1/responses",
    )


def test_messages(api: Api, llm: SeeingLLM) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(32, 24)).decode()}
    block = {"type": "image", "source": source}

    def body(*content: Any) -> dict[str, Any]:
        return {"max_tokens": 4, "messages": [{"role": "user", "content": list(content)}]}

    answer = api.post("/v1/messages", body(block, text("a")))
    assert answer.status_code == 200, answer.text
    assert prompt(llm) == "[user]" + "\x01" * 24 + "a\n[assistant]"
    counted = api.post("/v1/messages/count_tokens", {"messages": body(block, text("a"))["messages"]})
    usage = answer.json()["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert counted.json() == {"input_tokens": sum(usage[name] for name in names)}
    use = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), block], "is_error": True}
    conversation = [
        body(text("a"))["messages"][0],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = api.post("/v1/messages", {"max_tokens": 4, "messages": conversation})
    assert answer.status_code == 200, answer.text
    assert prompt(llm).endswith("[tool]Error: seen" + "\x01" * 24 + "\n[assistant]")
    source["data"] = "AAAA"
    refused(api, body(text("a"), block), "messages[0].content[1].source", path="/v1/messages")
    url = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}
    assert "not public" in refused(api, body(url), "messages[0].content[0].source", path="/v1/messages")


def test_tokenize_counts_what_chat_does(api: Api, llm: SeeingLLM) -> None:
    count = chat(api, text("a"), image())["usage"]["prompt_tokens"]
    answer = api.post("/tokenize", user(text("a"), image()) | {"add_generation_prompt": True})
    assert answer.json()["count"] == count
    assert answer.json()["tokens"] == llm.seen[-1].prompt_token_ids


def test_batch_lines(llm: SeeingLLM) -> None:
    async def run(body: dict[str, Any]) -> BatchAnswer:
        await llm.start()
        return await answered(Serving(llm, ServerSettings(responses_store=False)), "/v1/chat/completions", body)

    answer = asyncio.run(run(user(text("a"), image())))
    assert (answer.status, answer.body["usage"]["prompt_tokens_details"]["image_tokens"]) == (200, 24)
    answer = asyncio.run(run(user(embeds(ref="feat_x"))))
    assert (answer.status, answer.body["error"]["param"]) == (400, "messages[0].content[0].image_embeds")


def test_a_model_of_text_names_the_part() -> None:
    api = Api(FakeLLM())
    assert "the model reads text" in refused(api, user(text("a"), image()), "messages[0].content[1].type")
    source = {"type": "url", "url": "https://a.test/"}
    messages = {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    refused(api, messages, "messages[0].content[0].source", path="/v1/messages")
    responses = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]}
    refused(api, responses, "input[0].content[0]", path="/v1/responses")
    answer = api.post("/v1/features", {"data": base64.b64encode(FEATURES).decode()})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data")


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/", "http://[::1]/", "http://2130706433/", "file:///etc/passwd", "ftp://a.test/", "data:,x", PNG[:-40]],
)
def test_media_that_cannot_be_had(api: Api, url: str) -> None:
    refused(api, user(text("a"), image(), image(url)), "messages[0].content[2].image_url.url")
    assert api.get("/health").status_code == 200


def test_too_many_media_at_once(api: Api, media: MediaLoader) -> None:
    with media.budget.share() as others:
        others.charge(2**30, "x")
        answer = api.post("/v1/chat/completions", user(image()))
    assert answer.status_code == 429
    assert "Retry-After" in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_the_keys_have_the_decoding_threads_in_turns(
    llm: SeeingLLM, media: MediaLoader, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tenants: list[str] = []
    run = media.decoder.threads.run

    async def watched(tenant: str, work: Callable[[], Any]) -> Any:
        tenants.append(tenant)
        return await run(tenant, work)

    monkeypatch.setattr(media.decoder.threads, "run", watched)
    source = {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]}
    part = {"type": "image", "source": source} if path == "/v1/messages" else image()
    body = user(part) | ({} if path == "/tokenize" else {"max_tokens": 3})
    answer = Api(llm, ServerSettings(api_keys=("a", "b"))).post(path, body, headers={"Authorization": "Bearer b"})
    assert answer.status_code == 200, answer.text
    assert {*tenants} == {hashlib.sha256(b"b").hexdigest()} and media.budget.by_tenant.total() == 0


def test_a_template_without_a_placeholder(api: Api, llm: SeeingLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*args: Any, **options: Any) -> Any:
        raise RequestError("the prompt has 0 placeholders for 1 images", "multi_modal_data.image")

    monkeypatch.setattr(llm.processor, "prepare", prepare)
    assert "0 placeholders" in refused(api, user(image()), "messages")


def test_features_in_the_message(api: Api, llm: SeeingLLM) -> None:
    answer = chat(api, embeds(data=base64.b64encode(FEATURES).decode()))
    assert prompt(llm) == "[user]\x01\x01\n[assistant]"
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 2
    wide = save(tensors(features=np.ones((2, 2 * HIDDEN), np.float32)))
    message = refused(api, user(embeds(data=base64.b64encode(wide).decode())), "messages[0].content[0].image_embeds.features")
    assert f"expected hidden size {HIDDEN}, not {2 * HIDDEN}" in message


def test_features_at_a_url(api: Api, llm: SeeingLLM) -> None:
    chat(api, embeds(url=f"data:application/octet-stream;base64,{base64.b64encode(FEATURES).decode()}"))
    assert prompt(llm) == "[user]\x01\x01\n[assistant]"
    message = refused(api, user(embeds(url="http://127.0.0.1:9/a.safetensors")), "messages[0].content[0].image_embeds.url")
    assert "not public" in message
    assert '"url" of safetensors' in refused(api, user(embeds(url="a", ref="b")), "messages[0].content[0].image_embeds")


@pytest.mark.parametrize("binary", [False, True])
def test_uploads(llm: SeeingLLM, binary: bool) -> None:
    with running(llm) as server, server.openai() as client:
        http = client._client
        if binary:
            headers = {"Content-Type": "application/octet-stream"}
            made = http.post(f"{server.url}/v1/features?modality=image", content=FEATURES, headers=headers)
        else:
            made = http.post(f"{server.url}/v1/features", json={"data": base64.b64encode(FEATURES).decode()})
        assert made.status_code == 200, made.text
        facts = made.json()
        assert facts["id"].startswith("feat_")
        assert (facts["num_tokens"], facts["hidden_size"], facts["grid_thw"]) == (2, 8, [1, 2, 4])
        place = f"{server.url}/v1/features/{facts['id']}"
        assert http.get(place).json() == facts
        for _ in range(2):
            answer = client.chat.completions.create(
                model="fake-model", **user(embeds(ref=facts["id"]), embeds(ref=facts["id"]))
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len("[user]\n[assistant]") + 4
        wrong = user({"type": "video_embeds", "video_embeds": {"ref": facts["id"]}})
        refusal = http.post(f"{server.url}/v1/chat/completions", json=wrong)
        assert refusal.json()["error"]["param"] == "messages[0].content[0].video_embeds.ref"
        assert http.delete(place).json()["deleted"] is True
        assert http.get(place).status_code == http.delete(place).status_code == 404
        refusal = http.post(f"{server.url}/v1/chat/completions", json=user(embeds(ref=facts["id"])))
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "features_not_found")


def test_uploads_are_seen_by_their_own_key_alone(llm: SeeingLLM) -> None:
    settings = ServerSettings(api_keys=("one", "two"))
    with running(llm, settings) as server, server.openai() as client:
        http = client._client

        def call(method: str, path: str, key: str, **more: Any) -> Any:
            return http.request(method, server.url + path, headers={"Authorization": f"Bearer {key}"}, **more)

        made = call("POST", "/v1/features", "one", json={"data": base64.b64encode(FEATURES).decode()}).json()
        assert call("GET", f"/v1/features/{made['id']}", "one").status_code == 200
        for method in ("GET", "DELETE"):
            assert call(method, f"/v1/features/{made['id']}", "two").status_code == 404
        body = user(embeds(ref=made["id"]))
        assert call("POST", "/v1/chat/completions", "two", json=body).json()["error"]["code"] == "features_not_found"
        assert call("POST", "/v1/chat/completions", "one", json=body).status_code == 200
        assert call("GET", f"/v1/features/{made['id']}", "three").status_code == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "data"),
        ({"data": 5}, "data"),
        ({"data": "?"}, "data"),
        ({"data": "AAAA"}, "data"),
        ({"data": base64.b64encode(FEATURES).decode(), "modality": "sound"}, "modality"),
        ({"data": base64.b64encode(FEATURES).decode(), "modality": ["audio"]}, "modality"),
        ({"data": base64.b64encode(FEATURES).decode(), "modality": "audio"}, "data"),
        ({"data": base64.b64encode(FEATURES).decode(), "other": 1}, "other"),
        ({"data": base64.b64encode(save(tensors(features=np.ones((2, 9), np.float32)))).decode()}, "data.features"),
        ({"data": base64.b64encode(save(tensors(grid_thw=None))).decode()}, "data.grid_thw"),
    ],
)
def test_malformed_uploads(api: Api, body: Any, param: str) -> None:
    refused(api, body, param, path="/v1/features")


def audio(**value: str) -> dict[str, Any]:
    return {"type": "audio_embeds", "audio_embeds": value}


def test_features_of_audio(api: Api, llm: SeeingLLM) -> None:
    sent, wide = (
        base64.b64encode(save({"features": np.ones((5, width), np.float32)})).decode() for width in (HIDDEN, HIDDEN + 1)
    )
    answer = chat(api, text("hear"), audio(data=sent))
    assert prompt(llm) == "[user]hear" + "\x01" * 5 + "\n[assistant]"
    details = answer["usage"]["prompt_tokens_details"]
    assert (details["audio_tokens"], details["image_tokens"]) == (5, 0)
    refused(api, user(audio(data=wide)), "messages[0].content[0].audio_embeds.features")
    raw = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    assert "audio is taken as features alone" in refused(api, user(raw), "messages[0].content[0].type")
    with running(llm) as server, server.openai() as client:
        http = client._client
        made = http.post(f"{server.url}/v1/features", json={"data": sent, "modality": "audio"}).json()
        assert (made["modality"], made["num_tokens"], made["grid_thw"]) == ("audio", 5, [5, 1, 1])
        asked = user(audio(ref=made["id"]))
        assert (
            http.post(f"{server.url}/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens_details"]["audio_tokens"]
            == 5
        )
        error = http.post(f"{server.url}/v1/chat/completions", json=user(embeds(ref=made["id"]))).json()["error"]
        assert error["param"] == "messages[0].content[0].image_embeds.ref"
        assert error["message"].endswith("are of an audio clip, not of a picture")


def test_uploads_have_limits(llm: SeeingLLM) -> None:
    binary = {"Content-Type": "application/octet-stream"}
    api = Api(llm, ServerSettings(max_feature_bytes=len(FEATURES), max_body_bytes=100))
    assert api.request("POST", "/v1/features", content=FEATURES, headers=binary).status_code == 200
    assert api.request("POST", "/v1/features", content=FEATURES + b" ", headers=binary).status_code == 413
    assert api.request("POST", "/v1/features", content=FEATURES).status_code == 415
    assert api.request("POST", "/v1/features?modality=x", content=FEATURES, headers=binary).status_code == 400
    zipped = binary | {"Content-Encoding": "gzip"}
    assert api.request("POST", "/v1/features", content=FEATURES, headers=zipped).status_code == 415


def test_the_store_forgets_and_refuses() -> None:
    now = [0.0]
    features = read_features(FEATURES, "image", "data")
    store = FeatureStore(ServerSettings(features_ttl=10.0, features_bytes=2 * 1200), lambda: now[0])
    first = store.put("a", "image", features)
    second = store.put("a", "image", features)
    with pytest.raises(ApiError) as error:
        store.put("a", "image", features)
    assert error.value.status == 429
    now[0] = 9.9
    assert store.get("a", first) is not None and store.get("b", first) is None
    assert store.delete("a", second) and not store.delete("b", first)
    store.put("a", "image", features)
    now[0] = 10.1
    assert store.get("a", first) is None
    assert len(store) == 1
    now[0] = 20.1
    assert store.get("a", first) is None
    assert (len(store), store.used["a"]) == (0, 0)
    shared = FeatureStore(ServerSettings(features_bytes=2 * 1200, api_keys=("a", "b")))
    shared.put("a", "image", features)
    shared.put("b", "image", features)
    with pytest.raises(ApiError):
        shared.put("a", "image", features)


def test_real_pictures_through_the_openai_client(llm: SeeingLLM) -> None:
    with running(llm) as server, server.openai() as client:
        parts = [image(data_url(real_picture(name))) for name in ("page.png", "text.png")]
        answer = client.chat.completions.create(model="fake-model", stream=False, **user(*parts))
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 191 + 172
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="fake-model", **user(image(PNG[:-40])))
        assert error.value.param == "messages[0].content[0].image_url.url"
