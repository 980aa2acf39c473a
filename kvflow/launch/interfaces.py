"""Network interfaces of this host, by name and IPv4 address (Linux)."""

import fcntl
import socket
import struct

from kvflow.errors import KvflowError

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """The IPv4 address of an interface. Raises `KvflowError` if there is no such interface or it
    has none."""
    known = _addresses()
    if interface not in known:
        raise KvflowError(f"interface {interface!r}, must be one with an address here: {known}")
    return known[interface]


def interface_of(address: str) -> str:
    """The interface that bears an IPv4 address. Raises `KvflowError` if none here does."""
    known = _addresses()
    for name, borne in known.items():
        if borne == address:
            return name
    raise KvflowError(f"address {address!r}, must be that of an interface here: {known}")


def interface_towards(host: str) -> str:
    """The interface by which packets leave for `host`, a name or an IPv4 address. Raises
    `KvflowError` if it cannot be resolved or no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # chooses a route; a datagram socket sends nothing yet
        except OSError as error:
            raise KvflowError(f"host {host!r} cannot be reached: {error}") from error
        return interface_of(str(probe.getsockname()[0]))


def _addresses() -> dict[str, str]:
    """Of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
