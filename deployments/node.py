"""Addresses of the machine a replica runs on."""

from __future__ import annotations

import ray


def link_host(setting: str) -> str:
    """The address that direct links bind to: the setting, or the node's own for "node"."""
    return str(ray.util.get_node_ip_address()) if setting == "node" else setting
