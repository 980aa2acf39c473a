"""Link: what a rank on another host knows of its connection to the front."""

import threading
import time
from collections.abc import Callable

import zmq
from attrs import define, field
from zmq.utils.monitor import recv_monitor_message

_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_ASKED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _REFUSED
)


def _nothing() -> None:
    pass


@define(eq=False)
class Link:
    """Follows the events of one socket in a thread of its own. `on_lost` runs there, once, if a
    connection that stood has broken; ZeroMQ would connect anew and not say so. `up_at` is the
    time (`time.monotonic`) at which both ends had proven their keys, `num_refused` how often they
    had not."""

    _socket: "zmq.Socket[bytes]"
    _monitor: "zmq.Socket[bytes]"
    num_refused: int = field(init=False, default=0)
    up_at: float | None = field(init=False, default=None)
    lost: bool = field(init=False, default=False)
    on_lost: Callable[[], None] = field(init=False, default=_nothing)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="link", daemon=True)
        self._thread.start()

    @classmethod
    def watch(cls, socket: "zmq.Socket[bytes]") -> "Link":
        """Of a socket that is not connected yet."""
        return cls(socket, socket.get_monitor_socket(_ASKED))

    def end(self) -> None:
        """Stops following; before the socket is closed, by the thread that uses the socket."""
        self.on_lost = _nothing
        self._socket.disable_monitor()
        self._thread.join()

    def _follow(self) -> None:
        with self._monitor:
            while (event := recv_monitor_message(self._monitor)["event"]) != (
                zmq.EVENT_MONITOR_STOPPED
            ):
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.up_at = time.monotonic()
                elif event & _REFUSED:
                    self.num_refused += 1
                elif self.up_at is not None and not self.lost:
                    self.lost = True
                    self.on_lost()
