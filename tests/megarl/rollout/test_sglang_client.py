"""The client of SGLang's server: lines of a stream, of any length and in any pieces."""

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from megarl.rollout.sglang.client import CallRefusedError, Client

LONG = "x" * 35_000_000
"""As the experts of 16 thousand tokens in 60 layers, of 8 in each, in base64."""
STREAMS = {
    "/long": [b"data: ", json.dumps({"experts": LONG}).encode(), b"\n\ndata: [DONE]\n\n"],
    "/pieces": [b'data: {"index"', b': 0}\n\ndata: {"index": 1}', b"\n", b'\ndata: {"index": 2}'],
    "/refused": [b'data: {"index": 0}\n\ndata: {"error": {"message": "too long"}}\n\n'],
}


class _Streams(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for piece in STREAMS[self.path]:
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Streams)
    Thread(target=server.serve_forever, daemon=True).start()
    client = Client(f"http://127.0.0.1:{server.server_address[1]}", "key")
    yield client
    client.close()
    server.shutdown()
    server.server_close()


def answers(client: Client, path: str) -> list[Any]:
    async def listen() -> list[Any]:
        return [answer async for answer in client.answers(path, {})]

    return client.begin(listen()).result(60)


def test_an_answer_may_be_longer_than_any_buffer(client: Client) -> None:
    assert answers(client, "/long") == [{"experts": LONG}]


def test_answers_come_in_any_pieces(client: Client) -> None:
    assert answers(client, "/pieces") == [{"index": 0}, {"index": 1}, {"index": 2}]


def test_a_refusal_in_the_middle_is_the_servers_own(client: Client) -> None:
    with pytest.raises(CallRefusedError, match=r"^/refused: too long$"):
        answers(client, "/refused")


def test_what_is_under_way_ends_with_the_client() -> None:
    client = Client("http://127.0.0.1:9", "key")
    under_way = client.begin(asyncio.sleep(3600))
    client.close()
    assert under_way.cancelled()
