"""Messages over a socket pair: whole or not at all, and a sender that never waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from headrace.host.channel import Channel, MessageTooLongError, wait

LARGE = bytes(range(256)) * 2**16
"""More than a socket takes at once."""


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = (Channel(one) for one in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    assert theirs.poll() is None
    for size in (1, 0, 3, 5000):
        ours.send(bytes(size))
    ours.send(memoryview(bytearray(b"abcdef"))[1:3])
    assert [len(theirs.receive()) for _ in range(4)] == [1, 0, 3, 5000]
    assert theirs.receive() == b"bc" and theirs.poll() is None


def test_a_sender_does_not_wait_for_a_reader(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    told: list[bool] = []
    ours.on_unsent = lambda: told.append(True)
    ours.send(b"before")
    assert not ours.unsent and not told
    for _ in range(3):
        ours.send(LARGE)
    ours.send(b"after")
    assert ours.unsent and told == [True]
    reader = threading.Thread(target=ours.drain)
    reader.start()
    assert theirs.receive() == b"before"
    assert [theirs.receive(60) for _ in range(3)] == [LARGE] * 3
    assert theirs.receive() == b"after"
    reader.join()
    assert not ours.unsent


def test_who_waits_writes_meanwhile(pair: tuple[Channel, Channel]) -> None:
    """Both ends send more than the sockets hold before either reads."""
    ours, theirs = pair

    def other() -> None:
        theirs.send(LARGE)
        received.append(bytes(theirs.receive(60)))
        theirs.drain()

    received: list[bytes] = []
    thread = threading.Thread(target=other)
    thread.start()
    ours.send(LARGE)
    received.append(bytes(ours.receive(60)))
    ours.drain()
    thread.join()
    assert received == [LARGE] * 2


def test_an_end_inside_a_message_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall((10).to_bytes(4, "little") + b"half")
    assert channel.poll() is None
    theirs.close()
    for _ in range(2):
        with pytest.raises(EOFError):
            channel.receive()
    channel.send(b"lost")
    assert not channel.unsent
    channel.close()


def test_the_last_words_are_read_before_the_end(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    ours.send(b"unread by the one that ends")
    theirs.send(b"last words")
    theirs.close()
    assert ours.receive() == b"last words"
    with pytest.raises(EOFError):
        ours.receive()


def test_long_messages_are_refused_by_both_ends() -> None:
    one, other = socket.socketpair()
    small, large = Channel(one, most_bytes=1000), Channel(other)
    with pytest.raises(MessageTooLongError, match="1001 bytes is longer than 1000"):
        small.send(bytes(1001))
    assert large.poll() is None
    small.send(bytes(1000))
    assert len(large.receive()) == 1000
    large.send(bytes(1001))
    with pytest.raises(MessageTooLongError, match="1001 bytes is longer than 1000"):
        small.receive()
    small.close()
    large.close()


def test_a_silent_end_times_out(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        pair[0].receive(0.01)
    pair[1].connection.send(b"\1\0")
    with pytest.raises(TimeoutError):
        pair[0].receive(0.01)


def test_waiting_for_several_ends(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    left, right = socket.socketpair()
    assert wait([ours], 0) == [] == wait([ours], 0.01, [left.fileno()])
    right.send(b"x")
    assert wait([ours], None, [left.fileno()]) == []
    theirs.send(b"message")
    assert wait([ours, theirs], None, [left.fileno()]) == [ours]
    theirs.close()
    assert ours.receive() == b"message"
    assert wait([ours]) == [ours], "an end can be read"
    left.close()
    right.close()
