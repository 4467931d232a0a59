"""A process that keeps somebody's state in its memory: `python peer_memory.py FD BYTES`, over a socket pair.

A request is its letter and a length.  S: a state follows; it counts once all has come, which is
acknowledged.  L: send the one that counts.  It ends when the socket does.
"""

import socket
import struct
import sys

REQUEST = struct.Struct("<cQ")


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills `into`; false if the other side is gone."""
    while into:
        count = connection.recv_into(into)
        if count == 0:
            return False
        into = into[count:]
    return True


def serve(connection: socket.socket, most: int) -> None:
    # Two: what arrives must not overwrite the only complete one.
    halves = [memoryview(bytearray(most)), memoryview(bytearray(most))]
    complete, length = 0, 0
    head = memoryview(bytearray(REQUEST.size))
    while receive(connection, head):
        letter, count = REQUEST.unpack(head)
        if letter == b"L":
            connection.sendall(struct.pack("<Q", length))
            connection.sendall(halves[complete][:length])
        elif receive(connection, halves[1 - complete][:count]):
            complete, length = 1 - complete, count
            connection.sendall(b"k")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given, int(sys.argv[2]))
