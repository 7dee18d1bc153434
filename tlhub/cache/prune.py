"""Prune: what may go, and its removal. ``plan`` is pure; ``remove`` never leaves the root and follows no link."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from tlhub import quantity
from tlhub.cache import key, locks, orphans, trust
from tlhub.cache.entry import MANIFEST, Manifest
from tlhub.cache.keeps import kept
from tlhub.cache.paths import descend, move
from tlhub.cache.signature import Listed, listed
from tlhub.cache.store import DAMAGED, LOCKS, STAGING, VERSION, Item, Store
from tlhub.errors import CacheError

_DAY = 86400.0
_MONTH = 30 * _DAY

IN_USE, KEPT, GONE = "it is in use", "it is kept", "it is gone already"
"""Why something is spared that could be removed."""


@dataclass(frozen=True)
class Plan:
    """What ``remove`` will do: ``remove`` holds what goes with the reason for each, ``keep`` what stays.

    ``misdated``: of those that stay, the ones dated in the future; they count as used now, and are dated so.
    ``spared``: of those that stay, the ones that would go if nobody had said to keep them.
    """

    remove: tuple[tuple[Item, str], ...]
    keep: tuple[Item, ...]
    misdated: tuple[Item, ...] = ()
    spared: tuple[Item, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(item.size for item, _ in self.remove)

    @property
    def files(self) -> int:
        return sum(item.files for item, _ in self.remove)


@dataclass(frozen=True)
class Removed:
    """What was removed: entries, their bytes and files, what was spared and why, dead writers' staging folders."""

    count: int
    bytes: int
    spared: tuple[tuple[Item, str], ...] = ()
    staging: int = 0
    files: int = 0

    @property
    def failed(self) -> bool:
        """Whether anything was spared that neither a process nor the user wants spared."""
        return any(why not in (IN_USE, KEPT, GONE) for _, why in self.spared)


def plan(
    items: Iterable[Item],
    *,
    now: float,
    max_age: float | None = None,
    max_bytes: int | None = None,
    arch: str | None = None,
    kernel: str | None = None,
    stale: Callable[[Manifest], str | None] | None = None,
    kept: Container[str] = (),
) -> Plan:
    """Return what to remove of *items*. Pure.

    *arch* and *kernel* say which entries are meant; alone, all of those go. Of the meant ones go: what is
    damaged, what ``stale(manifest)`` has a reason for, what was last used more than *max_age* seconds before
    *now*, and of the rest until they have at most *max_bytes* first those of which there is a newer revision, then
    the longest unused. Entries that are whole but not trusted stay: a chmod mends them; so do builds whose digest is
    among *kept*. With no criterion only the damaged go.
    """
    items = list(items)
    everything = max_age is None and max_bytes is None and stale is None and (arch is not None or kernel is not None)
    filters = ", ".join([*([f"of kernel {kernel}"] if kernel else []), *([f"for {arch}"] if arch else [])])
    gone: list[tuple[Item, str]] = []
    rest: list[Item] = []
    others: list[Item] = []
    for item in items:
        if not meant(item, arch, kernel):
            others.append(item)
            continue
        old = stale(item.manifest) if stale is not None and item.manifest is not None else None
        if item.manifest is None and not trust.mendable(item.reason):
            gone.append((item, f"damaged: {item.reason}"))
        elif everything:
            gone.append((item, filters))
        elif old:
            gone.append((item, f"stale: {old}"))
        elif max_age is not None and now - item.used > max_age:
            gone.append((item, f"not used for {quantity.age(now - item.used)}"))
        else:
            rest.append(item)

    def spared(item: Item) -> bool:
        return item.manifest is not None and item.manifest.build_digest in kept

    if max_bytes is not None:
        newest = _newest(items)
        rest.sort(key=lambda item: (spared(item), _current(item, newest), min(item.used, now), item.folder))
        total, over = sum(item.size for item in rest), f"over {quantity.size(max_bytes).replace('.0 ', ' ')}"
        going = 0
        while going < len(rest) and total > max_bytes:
            total -= rest[going].size
            going += 1
        gone.extend((item, over) for item in rest[:going])
        rest = rest[going:]
    stay = tuple(item for item, _ in gone if spared(item))
    gone = [(item, why) for item, why in gone if not spared(item)]
    keep = sorted([*rest, *others, *stay], key=lambda item: item.folder)
    return Plan(tuple(gone), tuple(keep), tuple(item for item in keep if item.used > now + _DAY), stay)


def _newest(items: Iterable[Item]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the newest revisions, of the kernel and of the schedule, that each schedule has among *items*."""
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    for m in (item.manifest for item in items if item.manifest is not None):
        revisions = (m.kernel_revision, m.schedule_revision)
        newest[m.kernel, m.schedule] = max(revisions, newest.get((m.kernel, m.schedule), revisions))
    return newest


def _current(item: Item, newest: Mapping[tuple[str, str], tuple[int, int]]) -> bool:
    """Tell whether no newer revision of what made *item* is known; of what is not trusted none is."""
    m = item.manifest
    return m is None or (m.kernel_revision, m.schedule_revision) == newest[m.kernel, m.schedule]


def remove(store: Store, plan: Plan) -> Removed:
    """Do what *plan* says, and remove what dead writers left. Spares what is in use. Raises CacheError."""
    if not store.writable:
        raise CacheError(f"the store {store.name!r} is read-only: {store.root}")
    count = size = files = 0
    spared: list[tuple[Item, str]] = [(item, KEPT) for item in plan.spared]
    if store.root is None:
        return Removed(0, 0)
    if plan.remove:
        with contextlib.suppress(OSError):  # what has no place to be renamed to is spared, with the reason
            store.make(STAGING)
    signed = listed(store.root) if plan.remove else {}
    for item, _ in plan.remove:
        reason = _remove(store.root, item, signed)
        if reason:
            spared.append((item, reason))
        else:
            count, size, files = count + 1, size + item.size, files + item.files
    now = time.time()
    for item in plan.misdated:
        with contextlib.suppress(OSError):
            os.utime(f"{store.root}/{item.folder}/{MANIFEST}", (now, now), follow_symlinks=False)
    return Removed(count, size, tuple(spared), _sweep(store.root), files)


def clear(store: Store, items: Iterable[Item] | None = None) -> Removed:
    """Remove every entry that is neither in use nor kept, and what dead writers left. Raises CacheError.

    *items*: what was listed of the store just now, where it was.
    """
    store.forget()
    digests = kept(store)
    found: tuple[list[Item], list[Item]] = [], []
    for item in store.entries() if items is None else items:
        found[item.manifest is not None and item.manifest.build_digest in digests].append(item)
    return remove(store, Plan(tuple((item, "cleared") for item in found[0]), (), spared=tuple(found[1])))


def meant(item: Item, arch: str | None, kernel: str | None) -> bool:
    """Tell whether the filters mean *item*; a damaged one is known by its folder's name only."""
    if item.manifest is not None:
        return (arch is None or item.manifest.arch == arch) and (kernel is None or item.manifest.kernel == kernel)
    _, where, what, *_ = *item.folder.split("/"), "", ""
    wanted = key.parent(arch or "", kernel or "", "").split("/")
    return (arch is None or where == wanted[1]) and (kernel is None or what == wanted[2])


def _remove(root: str, item: Item, signed: Listed) -> str | None:
    """Rename the thing away from its place, then delete it and its signatures; return why it was spared, or None."""
    parts = item.folder.split("/")
    if parts[0] != VERSION or not 2 <= len(parts) <= 5 or any(part in ("", ".", "..") for part in parts):
        return "it is not in the store"
    try:
        with descend(root, parts[:-1]) as (parent, at):
            name = parts[-1]
            info = os.lstat(name, dir_fd=at) if at is not None else os.lstat(f"{parent}/{name}")
            if not stat.S_ISDIR(info.st_mode):  # a link or a file where an entry should be: itself, never its target
                os.unlink(name, dir_fd=at) if at is not None else os.unlink(f"{parent}/{name}")
            elif len(parts) != 5:
                return "it is not an entry"
            else:
                with locks.claim(f"{parent}/{name}/{MANIFEST}"):
                    away = move(root, (parent, at), name, STAGING, f"gone-{os.urandom(6).hex()}")
                    orphans.drop(root, signed, f"{parent}/{name}", away)
                shutil.rmtree(away, ignore_errors=True)  # by descriptors: it follows no link
    except locks.InUse:
        return IN_USE
    except FileNotFoundError:
        return GONE
    except OSError as error:
        return str(error.strerror or error)
    for depth in range(len(parts) - 1, 1, -1):
        try:
            os.rmdir("/".join((root, *parts[:depth])))
        except OSError:  # not empty
            break
    return None


def _sweep(root: str) -> int:
    """Remove staging folders and lock files of writers that are no more, and what was damaged a month ago.

    Returns how many staging folders there were.
    """
    count = 0
    with contextlib.suppress(OSError), descend(root, STAGING.split("/")) as (staging, _):
        for name in os.listdir(staging):
            path = f"{staging}/{name}"
            with contextlib.suppress(OSError, locks.InUse):
                if os.path.islink(path) or not os.path.isdir(path):
                    os.unlink(path)
                    continue
                with locks.claim(path) as claimed:
                    if claimed or time.time() - os.lstat(path).st_mtime > _DAY:
                        os.rename(path, gone := f"{staging}/gone-{os.urandom(6).hex()}")
                        shutil.rmtree(gone, ignore_errors=True)
                        count += 1
    with contextlib.suppress(OSError), descend(root, DAMAGED.split("/")) as (folder, _):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(f"{folder}/{name}").st_ctime > _MONTH:  # when it was moved there
                    shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
    with contextlib.suppress(OSError), descend(root, LOCKS.split("/")) as (folder, _):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError, locks.InUse):
                if time.time() - os.lstat(path).st_mtime > _DAY:
                    with locks.claim(path):
                        os.unlink(path)
    return count
