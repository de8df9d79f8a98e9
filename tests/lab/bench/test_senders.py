"""The clients of `bench overload`, with a server that closes each connection after one answer."""

import contextlib
import socket
import threading

from penstock_lab.bench.overload import Request, Senders

REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nRetry-After-Ms: 10\r\n\r\n{}"
NUM_REQUESTS = 3


def _refuse_once_each(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed at the end
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(REFUSAL)


def test_a_request_on_a_connection_that_the_server_has_closed_is_sent_again() -> None:
    """Guards against patient clients that are counted as broken: a server closes connections that idle for seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=_refuse_once_each, args=(listener,), daemon=True)
        server.start()

        def again(request: Request) -> float | None:
            return senders.now() + request.retry_after_s if len(senders.requests) < NUM_REQUESTS else None

        senders = Senders(listener.getsockname(), [b"GET / HTTP/1.1\r\n\r\n"], again, keep_alive=True)
        senders.send_at(0.0)
        senders.run(30.0)
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
    assert [request.status for request in senders.requests] == [429] * NUM_REQUESTS
    assert all(request.ended_at is not None for request in senders.requests)
