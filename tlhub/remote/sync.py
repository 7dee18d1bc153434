"""Push and pull: entries of a store to a registry and back, with the signatures that are known of them."""

from __future__ import annotations

import functools
import hashlib
import io
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tlhub.cache import archive, signature, vouching
from tlhub.cache.copying import find
from tlhub.cache.entry import Damaged, Entry, Manifest
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError
from tlhub.remote import artifact, layer, reading
from tlhub.remote.artifact import Layer
from tlhub.remote.layer import Marks
from tlhub.remote.reading import Shelf
from tlhub.remote.registry import Registry

_ROUNDS = 12
_SETTLE = 0.2  # seconds


@dataclass
class Done:
    """What a push or a pull did. ``digest``: of what the tag means; ``present``: entries that were there already;
    ``size``: bytes that were sent; ``refused``: folders of entries that were left out, or signatures of theirs, and
    why."""

    digest: str = ""
    entries: int = 0
    present: int = 0
    size: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)


def push(registry: Registry, store: Store, entries: Iterable[Entry], *, replace: bool = False) -> Done:
    """Add *entries* of *store* to what the tag means, with their signatures: for each arch a layer of what is new.

    *replace*: the tag means these alone from then on. Raises ArgumentError for a digest in place of a tag, and
    CacheError, also where there is nothing to push.
    """
    if registry.reference.digest:
        raise ArgumentError(
            f"{registry.reference} is one state for good: push to a tag",
            argument="reference",
            hint=f"tlhub remote push {registry.reference._replace(digest=None)}",
        )
    document = None if replace else registry.manifest()
    there = () if document is None else reading.open_shelves(registry, document)
    known = {row.manifest.build_digest: row.manifest.sha256 for shelf in there for row in shelf.front.rows}
    sent, lists = merged(there), functools.cache(signature.listed)
    done, new, marks = Done(), dict[str, dict[str, Entry]](), dict[str, dict[str, dict[str, bytes]]]()
    for entry in entries:
        manifest, arch = entry.manifest, entry.manifest.arch
        try:
            entry.verify()
        except Damaged as error:
            done.refused.append((manifest.folder, error.reason))
            continue
        entry.hold()
        if manifest.build_digest not in known:
            new.setdefault(arch, {})[manifest.build_digest] = entry
        else:
            done.present += 1
        if known.get(manifest.build_digest, manifest.sha256) == manifest.sha256:
            good, wrong = vouching.sift(manifest, signature.beside(entry, lists))
            done.refused += ((manifest.folder, reason) for reason in wrong)
            unsent = {signer: made for signer, made in good.items() if signer not in sent.get(manifest.sha256, {})}
            if unsent:
                marks.setdefault(arch, {})[manifest.sha256] = unsent
    if not new and not done.present:
        raise CacheError(f"nothing to push: no whole entry of {store.root} is meant", hint="tlhub cache ls")
    mine = []
    for arch in sorted({*new, *marks}):
        chosen = list(new.get(arch, {}).values())
        mine.append(_upload(registry, arch, chosen, marks.get(arch, {})))
        done.entries, done.size = done.entries + len(chosen), done.size + mine[-1].size
    done.digest = _publish(registry, mine, replace) if mine or document is None else layer.sha256(document)
    return done


def pull(
    registry: Registry,
    store: Store,
    *,
    archs: Sequence[str] | None = None,
    wanted: Callable[[Manifest], bool] = lambda manifest: True,
) -> Done:
    """Bring the entries that are *wanted* into *store*, verified, with their signatures.

    What the store would not serve for want of a signature is refused. Raises CacheError: what came before stays.
    """
    digest, found = reading.shelves(registry, archs)
    marks, done = merged(found), Done(digest)
    for shelf in found:
        missing = []
        for row in shelf.front.rows:
            manifest, signatures = row.manifest, marks.get(row.manifest.sha256, {})
            if not wanted(manifest):
                continue
            reason = vouching.unwanted(store, manifest, signatures)
            there = None if reason else find(store, manifest)
            if reason:
                done.refused.append((manifest.folder, reason))
            elif there is None:
                missing.append(row)
            else:
                done.present += 1
                if there.manifest.sha256 == manifest.sha256:
                    wrong = vouching.keep(store, manifest, signatures)
                    done.refused += ((manifest.folder, reason) for reason in wrong)
        for got in reading.download(registry, shelf.layer, missing, store.stage):
            manifest = got.row.manifest
            if got.wrong:
                done.refused.append((manifest.folder, got.wrong))
                continue
            with vouching.keeping(store, manifest, marks.get(manifest.sha256, {})) as wrong:
                if not store.publish(got.staged, manifest).published:
                    raise store.unkept or CacheError(f"{store.root} keeps no entry")
            done.refused += ((manifest.folder, reason) for reason in wrong)
            done.entries, done.size = done.entries + 1, done.size + got.row.end - got.row.start
    return done


def merged(shelves: Iterable[Shelf]) -> dict[str, dict[str, bytes]]:
    """Return the signatures of all *shelves*: one layer may have those of another's entries."""
    marks: dict[str, dict[str, bytes]] = {}
    for shelf in shelves:
        for digest, found in shelf.front.signatures.items():
            marks.setdefault(digest, {}).update(found)
    return marks


def _upload(registry: Registry, arch: str, entries: Sequence[Entry], marks: Marks) -> Layer:
    """Send a layer with *entries*, and signatures by digest and key. Raises CacheError."""
    data, front = layer.plan((entry.manifest for entry in entries), marks)
    by_build = {entry.key: entry for entry in entries}
    with tempfile.TemporaryFile() as file:
        digest = hashlib.sha256()

        def write(piece: bytes) -> None:
            digest.update(piece)
            file.write(piece)

        write(data)
        for row in front.rows:
            for name, _, _ in row.members():
                write(layer.member_header(row, name))
                write(archive.padded(by_build[row.manifest.build_digest].read(name)))
        write(archive.END)
        made = Layer(arch, f"sha256:{digest.hexdigest()}", front.layer_size, layer.sha256(data), front.size)
        registry.put_blob(file, made.digest)
    return made


def _publish(registry: Registry, mine: Sequence[Layer], replace: bool) -> str:
    """Have the tag mean *mine* besides what it means, or alone, and return the digest of that.

    A registry cannot be asked to change a tag only if nobody else did. So whoever pushes looks afterwards whether what
    it put is still there, later than another's reading and writing take, and if not puts it again.
    """
    registry.put_blob(io.BytesIO(artifact.EMPTY), layer.sha256(artifact.EMPTY))
    for _ in range(_ROUNDS):
        began = time.monotonic()
        found = registry.manifest()
        others = () if found is None or replace else artifact.parse(found)
        digest = registry.put_manifest(artifact.document((*others, *mine)))
        if replace:
            return digest
        time.sleep((_SETTLE + 4 * (time.monotonic() - began)) * random.uniform(1, 2))
        now = registry.manifest() or b""
        if layer.sha256(now) == digest or set(mine) <= set(artifact.parse(now)):
            return layer.sha256(now)
    raise CacheError(
        f"others change {registry.reference} all the time: what was pushed is not in it",
        hint=f"tlhub remote push {registry.reference}",
    )
