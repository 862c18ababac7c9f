"""API keys, CORS, request ids, settings."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api, error

from headrace.errors import ConfigError
from headrace.server.settings import ServerSettings

KEYS = ServerSettings(api_keys=("first-key", "zweiter-schlüssel"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("first-ke"),
        bearer("first-keyy"),
        bearer("FIRST-KEY"),
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "first-ke"},
        {"x-api-key": ""},
    ],
)
def test_wrong_keys(headers: dict[str, str]) -> None:
    api = Api(FakeLLM(), KEYS)
    for method, path in [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nowhere"),
                         ("POST", "/reset_prefix_cache"), ("GET", "/openapi.json")]:  # fmt: skip
        response = api.request(method, path, headers=headers)
        found = error(response, 401)
        assert (found["code"], found["type"]) == ("invalid_api_key", "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"


def test_every_key_opens() -> None:
    api = Api(FakeLLM(), KEYS)
    assert api.get("/v1/models", headers=bearer("first-key")).status_code == 200
    assert api.get("/v1/models", headers={"authorization": "bearer first-key"}).status_code == 200
    utf8 = {"authorization": "Bearer zweiter-schlüssel".encode()}
    assert api.get("/v1/models", headers=utf8).status_code == 200


def test_whoever_watches_the_server_needs_no_key() -> None:
    api = Api(FakeLLM(), KEYS)
    for path in ("/", "/health", "/live", "/ping", "/version", "/metrics"):
        assert api.get(path).status_code == 200


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "one, two,")
    assert ServerSettings().api_keys == ("one", "two")
    assert error(Api(FakeLLM(), ServerSettings()).get("/v1/models"), 401)
    monkeypatch.delenv("HEADRACE_API_KEY")
    assert ServerSettings().api_keys == ()


def test_cors() -> None:
    api = Api(FakeLLM(), dataclasses.replace(KEYS, cors_origins=("https://page.example",)))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = api.request("OPTIONS", "/v1/chat/completions", headers={"origin": "https://page.example"} | ask)
    assert preflight.status_code == 200, "a preflight carries no key"
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    other = api.request("OPTIONS", "/v1/chat/completions", headers={"origin": "https://other.example"} | ask)
    assert "access-control-allow-origin" not in other.headers
    answer = api.get("/v1/models", headers=bearer("first-key") | {"origin": "https://page.example"})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in Api(FakeLLM()).get("/health", headers={"origin": "https://a.example"}).headers


PAGE = "https://page.example"
CROSS_SITE = [
    {"sec-fetch-site": "cross-site", "origin": PAGE},
    {"sec-fetch-site": "same-site", "origin": PAGE},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "origin": "null"},
    {"origin": PAGE},
    {"origin": "null"},
    {"origin": "http://server:81"},
]
OWN = [
    {},
    {"sec-fetch-site": "same-origin", "origin": "http://server"},
    {"sec-fetch-site": "none"},
    {"origin": "http://server"},
    {"origin": "http://SERVER"},
]


def test_pages_of_other_origins_may_not_post_without_a_key() -> None:
    open_, keyed = Api(FakeLLM()), Api(FakeLLM(), KEYS)
    allowed = Api(FakeLLM(), ServerSettings(cors_origins=(PAGE,)))
    for path, body in [("/reset_prefix_cache", None), ("/v1/completions", {"prompt": "Hi"}), ("/tokenize", {"prompt": "Hi"})]:
        for headers in CROSS_SITE:
            assert error(open_.post(path, body, headers=headers), 403)["code"] == "forbidden_origin"
            assert keyed.post(path, body, headers=headers | bearer("first-key")).status_code == 200
            assert allowed.post(path, body, headers=headers).status_code == (200 if headers.get("origin") == PAGE else 403)
            assert open_.get("/v1/models", headers=headers).status_code == 200
        for headers in OWN:
            assert open_.post(path, body, headers=headers).status_code == 200
    anyone = Api(FakeLLM(), ServerSettings(cors_origins=("*",)))
    assert anyone.post("/reset_prefix_cache", headers=CROSS_SITE[0]).status_code == 200


def test_allowed_hosts() -> None:
    api = Api(FakeLLM(), ServerSettings(allowed_hosts=("localhost", "Chat.example.com", "[::1]")))
    for host, status in [
        ("localhost", 200), ("localhost:8000", 200), ("LOCALHOST", 200), ("chat.example.com", 200), ("[::1]", 200),
        ("[::1]:80", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1", 403), ("", 403),
        ("[::2]", 403),
    ]:  # fmt: skip
        for path in ("/health", "/v1/models"):
            assert api.get(path, headers={"host": host}).status_code == status, host
    assert Api(FakeLLM()).get("/health", headers={"host": "any.example"}).status_code == 200


def test_request_ids(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    response = api.post("/v1/completions", {"prompt": "Hi"}, headers={"x-request-id": "trace/7:a"})
    assert response.headers["x-request-id"] == "trace/7:a"
    [line] = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert "id=trace/7:a" in line and f"engine={response.json()['id']}" in line and " 200 completed " in line
    ids = {api.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    for bad in ("", "a b", "x" * 129, "a\tb", b"\xff", 'a"b'):
        response = api.get("/health", headers={"x-request-id": bad})
        assert error(response)["param"] == "X-Request-Id"
        assert response.headers["x-request-id"] != bad


def test_the_log_holds_one_line_a_request_whatever_its_path(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    api.get("/v1/x%0Aforged")
    assert all("\n" not in record.getMessage() for record in caplog.records)
    quiet = Api(FakeLLM(), ServerSettings(log_requests=False))
    caplog.clear()
    quiet.complete()
    assert not caplog.records


def test_served_names() -> None:
    api = Api(FakeLLM(), ServerSettings(served_model_names=("big", "org/small")))
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["big", "org/small"]
    for name in ("big", "org/small"):
        assert api.chat(model=name).json()["model"] == "big"
        assert api.get(f"/v1/models/{name}").json()["id"] == name
    assert api.chat().json()["model"] == "big"
    assert error(api.chat(model="fake-model"), 404)["code"] == "model_not_found"
    assert error(api.get("/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"port": 70000}, "port"),
        ({"drain_timeout": -1}, "drain_timeout"),
        ({"drain_timeout": float("nan")}, "drain_timeout"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"tls_cert": Path("/nowhere.pem")}, "tls_key"),
        ({"tls_key": Path("/nowhere.pem")}, "tls_cert"),
        ({"tls_cert": Path("/nowhere.pem"), "tls_key": Path("/nowhere.pem")}, "tls_cert"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"served_model_names": ("",)}, "served_model_names"),
        ({"cors_origins": ("*",), "cors_credentials": True}, "cors_credentials"),
    ],
)
def test_settings_that_make_no_sense(fields: dict, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**fields)
    assert caught.value.param == param
