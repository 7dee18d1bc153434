"""Trust: who may have written what is about to be loaded. ``judge`` is pure, ``walk`` looks.

An entry loads only if it and each folder up to the store's root belong to the user, to root or to an owner
that the store's policy names, and none is world-writable without the sticky bit. Group-writable is allowed
where the store is declared shared. Windows has other means: nothing is checked there.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable
from typing import NamedTuple

CHECKED = hasattr(os, "geteuid")
MEND = "; mend: "
"""What stands in a reason before the command that mends it."""

SETGID_GROUP = stat.S_ISGID | stat.S_IWGRP


class Policy(NamedTuple):
    """Whom a store trusts, besides the user and root. ``owners`` are user ids."""

    shared: bool = False
    owners: frozenset[int] = frozenset()


STRICT = Policy()


def policy(shared: bool = False, owners: Iterable[int | str] = ()) -> Policy:
    """Return the policy; a name that no user has is left out, for it owns nothing."""
    return Policy(shared, frozenset(uid for owner in owners if (uid := _uid(owner)) is not None))


def judge(path: str, info: os.stat_result, rule: Policy, user: int) -> str | None:
    """Return None if a file or folder with that ``lstat`` may be trusted by *user*, else why not and the remedy."""
    mode, owner = info.st_mode, info.st_uid
    if owner != user and owner != 0 and owner not in rule.owners:
        return (
            f"{path} (mode {stat.S_IMODE(mode):04o}) belongs to user {owner}, whom the store does not name as an owner"
            f"{MEND}chown -R {user} {shlex.quote(path)}"
        )
    if not mode & 0o022:
        return None
    if mode & stat.S_IWOTH and not (mode & stat.S_ISVTX and stat.S_ISDIR(mode)):
        what = "writable by everyone"
        mend = "o-w" if rule.shared or not mode & stat.S_IWGRP else "go-w"
    elif mode & stat.S_IWGRP and not rule.shared:
        what, mend = "writable by its group, and the store is not declared shared", "g-w"
    else:
        return None
    return f"{path} (mode {stat.S_IMODE(mode):04o}) is {what}{MEND}chmod {mend} {shlex.quote(path)}"


def refusal(path: str, info: os.stat_result, rule: Policy) -> str | None:
    """Return None if this process may trust what *info* describes, else why not and the remedy."""
    return judge(path, info, rule, os.geteuid()) if CHECKED else None


def refusal_of_folder(path: str, info: os.stat_result, rule: Policy) -> str | None:
    """Return why a folder on the way to an entry is refused, or None. *info* is of ``lstat``."""
    if stat.S_ISDIR(info.st_mode):
        return refusal(path, info, rule)
    if stat.S_ISLNK(info.st_mode):
        return f"{path} is a link; a store follows none{MEND}rm {shlex.quote(path)}"
    return f"{path} is not a folder"


def walk(root: str, below: str, rule: Policy) -> tuple[Policy, str | None]:
    """Return the policy in force, and why a folder from *root* down to *below* is refused, or None. Raises OSError."""
    path, info = root, os.lstat(root)
    if declares_sharing(info):
        rule = rule._replace(shared=True)
    refused = refusal_of_folder(path, info, rule)
    for part in below.split("/") if below else ():
        if refused:
            break
        path = f"{path}/{part}"
        refused = refusal_of_folder(path, os.lstat(path), rule)
    return rule, refused


def mendable(reason: str | None) -> bool:
    """Tell whether a reason is one of modes or owners: what it speaks of is whole, and a command mends it."""
    return reason is not None and f"{MEND}ch" in reason


def remedy(reason: str) -> tuple[str, str | None]:
    """Split a reason into what is wrong and the command that mends it, if there is one."""
    text, _, command = reason.partition(MEND)
    return text, command or None


def declares_sharing(info: os.stat_result) -> bool:
    """Tell whether a root says by itself that a group shares it: nobody sets both bits by accident."""
    return info.st_mode & SETGID_GROUP == SETGID_GROUP


def _uid(owner: int | str) -> int | None:
    if isinstance(owner, int):
        return owner
    if owner.isdecimal():
        return int(owner)
    try:
        import pwd

        return pwd.getpwnam(owner).pw_uid
    except (ImportError, KeyError, ValueError):  # of a name that none could have
        return None
