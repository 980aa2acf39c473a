"""A server whose every byte is chosen, and that can break off anywhere."""

import asyncio
import contextlib
import json

from attrs import define, field

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\nconnection: close\r\n"
EVENTS = HEAD % b"text/event-stream; charset=utf-8" + b"transfer-encoding: chunked\r\n\r\n"
NONE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def whole(value):
    body = json.dumps(value).encode()
    return HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value):
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


@define(eq=False)
class RawServer:
    """`answer` is sent to every POST, and `feed`, then whatever is put into its queue in `feeds`,
    to each reader of events; None in a queue closes the connection. No `feed`: no events."""

    model: str
    answer: bytes = b""
    feed: bytes | None = None
    feeds: list = field(factory=list)
    num_posts: int = 0
    writers: list = field(factory=list)
    url: str = ""
    _tasks: set = field(factory=set)

    @contextlib.asynccontextmanager
    async def listening(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # closed connections are gone

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        try:
            await self._speak(reader, writer)
        finally:
            writer.close()

    async def _speak(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            await reader.readexactly(size)
            method, path, _ = head.split(" ", 2)
            if method == "POST":
                self.num_posts += 1
                self.writers.append(writer)
                writer.write(self.answer)
            elif path == "/health":
                writer.write(whole({"status": "ok"}))
            elif path == "/v1/models":
                writer.write(whole({"data": [{"id": self.model, "max_model_len": 512}]}))
            elif path == "/kv_events" and self.feed is not None:
                self.feeds.append(queue := asyncio.Queue())
                writer.write(self.feed)
                while (more := await queue.get()) is not None:
                    writer.write(more)
            else:
                writer.write(NONE)
            await writer.drain()
