"""The channel: signed messages come through, anything else does not, and a lost driver harms no task."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import queue
import time
from multiprocessing.connection import Client

import pytest

from tikv_br.tasks.channel import ChannelAddress, ProgressListener, ProgressSender, RunSender
from tikv_br.tasks.task import TaskMessage

MESSAGE = TaskMessage("progress", 3, 0, (10, 1))


def test_messages_arrive_in_order() -> None:
    """The driver receives the messages of a task in order."""
    received: queue.Queue[TaskMessage] = queue.Queue()
    with ProgressListener(received.put) as listener:
        sender = ProgressSender(listener.address)
        sent = [TaskMessage("progress", 0, 0, (n, n)) for n in range(100)]
        for message in sent:
            sender.send(message)
        assert [received.get(timeout=60) for _ in sent] == sent


def test_listener_is_on_loopback_only_unless_told_otherwise() -> None:
    """A local run opens no port to the network."""
    with ProgressListener(lambda _: None) as listener:
        assert listener._listener.address[0] == "127.0.0.1"


def test_wrong_key_is_refused() -> None:
    """A sender without the key of the run is disconnected before a message of it is read."""
    received: list[TaskMessage] = []
    with ProgressListener(received.append) as listener:
        other = dataclasses.replace(listener.address, key=b"guess")
        with Client((other.host, other.port)) as connection:
            connection.send_bytes(other.answer(connection.recv_bytes()))
            with pytest.raises((EOFError, ConnectionResetError)):
                connection.recv_bytes()
    assert received == []


def test_silent_connections_hold_nobody_up() -> None:
    """Connections that never answer the challenge, as of a port scanner, are open while others report."""
    received: queue.Queue[TaskMessage] = queue.Queue()
    with ProgressListener(received.put) as listener, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(Client((listener.address.host, listener.address.port)))
        ProgressSender(listener.address).send(MESSAGE)
        assert received.get(timeout=60) == MESSAGE


def test_unsigned_message_is_dropped_unread() -> None:
    """A packet put into a connection by somebody else is not even unpickled."""
    received: list[TaskMessage] = []
    address: ChannelAddress
    with ProgressListener(received.append) as listener:
        address = listener.address
        with Client((address.host, address.port)) as connection:
            connection.send_bytes(address.answer(connection.recv_bytes()))
            connection.send_bytes(b"\0" * 32 + pickle.dumps(MESSAGE))
            with pytest.raises((EOFError, ConnectionResetError)):
                connection.recv_bytes()
    assert received == []


def test_lost_driver_harms_nobody() -> None:
    """Sending to a driver that is not there returns at once, however often."""
    with ProgressListener(lambda _: None) as listener:
        address = listener.address
    sender = ProgressSender(address)
    begin = time.monotonic()
    for _ in range(10_000):
        sender.send(MESSAGE)
    assert time.monotonic() - begin < 30


def test_worker_keeps_one_sender_for_a_run() -> None:
    """Many tasks of one worker share a connection, and a new run gets a new one."""
    with ProgressListener(lambda _: None) as listener:
        senders = RunSender()
        first = senders.to(listener.address)
        assert senders.to(listener.address) is first
        assert senders.to(dataclasses.replace(listener.address, key=b"other")) is not first
