"""What may never be written into a run directory, a log or a report: passwords, keys and tokens."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path

from olmo_ext.base.errors import InputError

CREDENTIALS_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
"""`user:password@` of `https://user:password@host/path`."""

SECRET_VARIABLE = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
"""In the name of an environment variable or of an argument."""

SECRET_KEY = re.compile(r"(^|_)(api_?key|secret|password|passwd|credentials?|access_?token|auth_?token)($|_)", re.I)
"""In a config's key: narrower, since `eos_token_id` and its like are none."""


def without_credentials(text: str) -> str:
    """A text with the `user:password@` of every address in it left out."""
    return CREDENTIALS_IN_ADDRESS.sub("", text)


def refuse_credentials(text: str, *, where: str) -> None:
    """
    :raises InputError: for an address with a user or a password, which would be written beside what it is used for.
    """
    if CREDENTIALS_IN_ADDRESS.search(text):
        raise InputError(
            f"{without_credentials(text)} was given with a user or password, which would be written down",
            where=where,
            right="the address without them; ~/.netrc (http, W&B) or the environment (s3, gs) keeps credentials",
        )


def netrc_login(host: str, environment: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """User and password of a host in $NETRC, ~/.netrc or ~/_netrc; its `default` entry is for no host of ours."""
    environment = os.environ if environment is None else environment
    home = Path(environment.get("HOME", "~")).expanduser()
    named = environment.get("NETRC")
    for path in [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]:
        try:
            login = netrc.netrc(path).hosts.get(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if login and login[2]:
            return login[0], login[2]
    return None
