"""Tenants: whose sessions and stored objects are.

A server derives a caller's tenant from its token, and puts it before the names that the caller chooses: a session
``chat`` of the tenant ``acme`` is ``acme/chat`` between worker and manager, and to operators. The caller itself sees
``chat`` alone and cannot name anything of another tenant. Without tokens everybody is one tenant, of which names stand
alone.
"""

import re

DEFAULT_TENANT = "default"
TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


def qualified(tenant: str, name: str) -> str:
    """Return a tenant's name for something, as servers and operators write it."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}/{name}"


def split(name: str) -> tuple[str, str]:
    """Return whose a qualified name is, and the name alone."""
    tenant, _, alone = name.rpartition("/")
    return tenant or DEFAULT_TENANT, alone
