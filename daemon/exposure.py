"""Which addresses are this machine's alone, and what takes keys of its clients.

Pure. Asked for the address in the configuration, and again for that of the socket that is really
listened on, which a service manager may have passed.
"""

import ipaddress

from daemon.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach it; a name but `localhost` may be anybody."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_exposure(host: str, *, has_keys: bool, is_insecure: bool) -> None:
    """Raises ConfigError where others could reach the API and nobody would be asked for a key."""
    if not (is_loopback(host) or has_keys or is_insecure):
        raise ConfigError(
            f"host: {host or 'every address'} can be reached from other machines, and there are no "
            "API keys: set api_keys (`distserve api-key NAME` makes one), or say --insecure"
        )
