"""The address of a cluster: how it is given and checked, and whether a cluster answers there."""

from __future__ import annotations

import os
import re
import socket
from importlib.util import find_spec

from fedcor.core.errors import ConfigError, FedcorError, MissingExtraError

CLUSTERS = ("ray", "dask")
ANSWER_WITHIN = 5.0  # seconds

# Backend -> the variable of the library itself, how addresses may begin, and its Python package.
_VARIABLES = {"ray": "RAY_ADDRESS", "dask": "DASK_SCHEDULER_ADDRESS"}
_SCHEMES = {"ray": ("ray",), "dask": ("tcp", "tls")}
_PACKAGES = {"ray": "ray", "dask": "distributed"}
_EXAMPLES = {"ray": "10.0.0.5:6379, ray://10.0.0.5:10001 or auto", "dask": "tcp://10.0.0.5:8786"}
# What a client of each says first. Dask's scheduler speaks first.
_HELLO = {
    "ray": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
    "dask": b"",
}
_ADDRESS = re.compile(r"(?:(\w+)://)?([\w.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")


def check_place(backend: str, address: str | None) -> None:
    """Refuse a missing package or a malformed address, before any connection.

    Args:
        backend: One of `CLUSTERS`, or a backend of joblib, which has no address.
        address: The user's; None for the environment's.
    """
    if backend not in CLUSTERS:
        if address is not None:
            allowed = f"is of a cluster, but the backend {backend} is not one: choose ray or dask"
            raise ConfigError("address", address, allowed)
        return
    if find_spec(_PACKAGES[backend]) is None:
        raise MissingExtraError(_PACKAGES[backend], backend)
    find_address(backend, address)


def find_address(backend: str, given: str | None) -> str | None:
    """The address of the cluster, as its library takes it; None if neither source has one.

    Args:
        backend: One of `CLUSTERS`.
        given: The user's; None for the environment's.

    >>> find_address("dask", "localhost:8786")
    'localhost:8786'
    """
    variable = _VARIABLES[backend]
    address = os.environ.get(variable) if given is None else given
    if not address and given is None:
        return None
    if backend == "ray" and address == "auto":
        return address
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or found[1] not in (None, *_SCHEMES[backend]) or int(found[3]) > 65535:
        key = variable if given is None else "address"
        allowed = f"must be a host and a port, such as {_EXAMPLES[backend]}"
        raise ConfigError(key, address, allowed)
    return address


def check_answer(backend: str, address: str) -> None:
    """Refuse an address at which no such cluster answers. The libraries would wait for minutes."""
    found = _ADDRESS.fullmatch(address)
    if found is None:  # "auto"
        return
    host, port = found[2].strip("[]"), int(found[3])
    try:
        with socket.create_connection((host, port), timeout=ANSWER_WITHIN) as connection:
            if found[1] == "tls":
                return
            if backend == "ray" and os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(_HELLO[backend])
            known = _is_answer(backend, connection.recv(9))
    except (OSError, UnicodeError) as error:  # of a name that no host can have
        why = getattr(error, "strerror", None) or error
        raise FedcorError(
            f"no cluster answers at {address}: {why}; is it running, and can "
            "it be reached from here?"
        ) from None
    if not known:
        raise FedcorError(f"what answers at {address} is not a cluster of {backend}")


def _is_answer(backend: str, answer: bytes) -> bool:
    """Whether these are the first bytes of Ray (settings of HTTP/2) or of Dask (a small number)."""
    if backend == "ray":
        return answer[3:4] == b"\4"
    return len(answer) >= 8 and int.from_bytes(answer[:8], "little") < 1 << 16


def missing_address(backend: str) -> ConfigError:
    """The error if neither the user nor the environment gives an address."""
    allowed = f"must say where the cluster is, such as {_EXAMPLES[backend]}"
    return ConfigError("address", None, allowed, f"or set {_VARIABLES[backend]}")
