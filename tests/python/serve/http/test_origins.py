"""Tests of browsers: which pages may send requests, and under which names the server answers."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import make_engine
from serving import CHAT, connect, post, read_response, serving

from lmdeploy.serve.http.origins import accepted_hosts, is_loopback

PATH = "/v1/chat/completions"
ASK = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
FOREIGN = ("https://a.test", "http://localhost.a.test", "http://localhost:1@a.test", "null", "")
LOCAL = ("http://localhost:3000", "http://127.0.0.1", "http://[::1]:8080", "https://localhost")


@pytest.fixture(scope="module")
def server():
    engine = make_engine()
    with serving(engine) as url:
        yield url, engine.running.core


def allowed_origin(reply):
    return reply.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("origin", FOREIGN)
def test_request_of_a_foreign_page_is_refused_before_it_runs(server, origin):
    url, core = server
    before = len(core.requests)
    for content_type in ("application/json", "text/plain"):
        headers = {"origin": origin, "content-type": content_type}
        reply = post(url, PATH, CHAT, headers=headers)
        assert reply.status_code == 403
        assert "--allow-origins" in reply.json()["error"]["message"]
        assert allowed_origin(reply) is None
    preflight = httpx.options(url + PATH, headers={"origin": origin, **ASK})
    assert (preflight.status_code, allowed_origin(preflight)) == (403, None)
    assert httpx.get(f"{url}/metrics", headers={"origin": origin}).status_code == 403
    assert len(core.requests) == before


@pytest.mark.parametrize("origin", LOCAL)
def test_request_of_a_local_page_is_served_by_default(server, origin):
    url, _ = server
    preflight = httpx.options(url + PATH, headers={"origin": origin, **ASK})
    assert (preflight.status_code, allowed_origin(preflight)) == (200, origin)
    reply = post(url, PATH, CHAT, headers={"origin": origin})
    assert (reply.status_code, allowed_origin(reply)) == (200, origin)
    assert "access-control-allow-credentials" not in reply.headers


def test_request_of_a_page_of_the_server_is_served():
    with serving(
        make_engine(), allow_origins=["https://a.test"], allowed_hosts=["gpu.test"]
    ) as url:
        port = url.rpartition(":")[2]
        for host in (f"localhost:{port}", f"gpu.test:{port}", "gpu.test"):
            for scheme in ("http", "https"):
                headers = {"host": host, "origin": f"{scheme}://{host}"}
                assert post(url, PATH, CHAT, headers=headers).status_code == 200
        for origin in ("http://localhost:3000", "https://gpu.test:1", "https://b.gpu.test"):
            headers = {"host": "gpu.test", "origin": origin}
            assert post(url, PATH, CHAT, headers=headers).status_code == 403


def test_every_origin_is_served_if_all_are_allowed():
    with serving(make_engine(), allow_origins=["*"]) as url:
        for origin in (*FOREIGN, *LOCAL):
            reply = post(url, PATH, CHAT, headers={"origin": origin})
            assert (reply.status_code, allowed_origin(reply)) == (200, "*")
        # Even then, a browser has to ask before it sends a body.
        headers = {"origin": "https://a.test", "content-type": "text/plain"}
        assert post(url, PATH, CHAT, headers=headers).status_code == 415


@pytest.mark.parametrize(
    "host", ["a.test", "a.test:80", "localhost.a.test", "127.0.0.1.a.test", ""]
)
def test_local_server_refuses_foreign_names(server, host):
    url, core = server
    before = len(core.requests)
    # A site that points its name at 127.0.0.1 is the origin of its own requests.
    reply = post(url, PATH, CHAT, headers={"host": host, "origin": f"http://{host}"})
    assert reply.status_code == 421
    assert "--allowed-hosts" in reply.json()["error"]["message"]
    assert len(core.requests) == before


@pytest.mark.parametrize("host", ["LOCALHOST", "localhost:1", "127.0.0.1:23333", "[::1]:23333"])
def test_local_server_accepts_local_names(server, host):
    url, _ = server
    assert httpx.get(f"{url}/health", headers={"host": host}).status_code == 200


def test_request_without_a_host_is_served(server):
    url, _ = server
    with connect(url) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        status, _, text = read_response(sock)
    assert (status, json.loads(text)) == (200, {"status": "ok"})


def test_accepted_hosts_depend_on_the_address():
    local = ["localhost", "127.0.0.1", "[::1]"]
    assert accepted_hosts("127.0.0.1", []) == [*local, "127.0.0.1"]
    assert accepted_hosts("::1", ["a.test"]) == [*local, "[::1]", "a.test"]
    assert accepted_hosts("0.0.0.0", []) is None
    assert accepted_hosts("0.0.0.0", ["a.test"]) == [*local, "0.0.0.0", "a.test"]
    assert accepted_hosts("127.0.0.1", ["*"]) is None
    assert is_loopback("localhost") and is_loopback("127.1.2.3")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("192.0.2.1")
