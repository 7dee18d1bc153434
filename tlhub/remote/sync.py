"""Push and pull: entries of a store to a registry and back, with the signatures that are known of them."""

from __future__ import annotations

import hashlib
import io
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tlhub.cache import archive, signature, vouching
from tlhub.cache.entry import Damaged, Entry, Manifest
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError
from tlhub.remote import artifact, layer, reading
from tlhub.remote.artifact import Layer
from tlhub.remote.layer import Marks
from tlhub.remote.registry import Registry

_ROUNDS = 12
_SETTLE = 0.2  # seconds


@dataclass
class Done:
    """What a push or a pull did. ``digest``: of what the tag means; ``present``: entries that were there already;
    ``size``: bytes that were sent; ``refused``: folders of entries that were left out, and why."""

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
    signed = {mark for shelf in there for mark in shelf.front.signatures}
    done, new, marks = Done(), dict[str, dict[str, Entry]](), dict[str, dict[tuple[str, str], bytes]]()
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
            found = signature.find(str(store.root), manifest.sha256)
            unsent = {(manifest.sha256, signer): made for signer, made in found.items()}
            marks.setdefault(arch, {}).update({mark: made for mark, made in unsent.items() if mark not in signed})
    if not new and not done.present:
        raise CacheError(f"nothing to push: no whole entry of {store.root} is meant", hint="tlhub cache ls")
    mine = []
    for arch in sorted({*new, *(arch for arch, found in marks.items() if found)}):
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
    marks = {mark: made for shelf in found for mark, made in shelf.front.signatures.items()}
    done = Done(digest)
    for shelf in found:
        missing = []
        for row in shelf.front.rows:
            if wanted(row.manifest):
                reason = unvouched(store, row.manifest, marks)
                if reason:
                    done.refused.append((row.manifest.folder, reason))
                elif find(store, row.manifest):
                    done.present += 1
                    keep_signatures(store, row.manifest, marks)
                else:
                    missing.append(row)
        for got in reading.download(registry, shelf.layer, missing, store.stage):
            if got.wrong:
                done.refused.append((got.row.manifest.folder, got.wrong))
                continue
            keep_signatures(store, got.row.manifest, marks)  # before it can be found
            if not store.publish(got.staged, got.row.manifest).published:
                raise store.unkept or CacheError(f"{store.root} keeps no entry")
            done.entries, done.size = done.entries + 1, done.size + got.row.end - got.row.start
    return done


def unvouched(store: Store, manifest: Manifest, marks: Marks) -> str | None:
    """Return why *store* would not serve the entry for want of a signature, or None."""
    if not store.wants_signatures or (store.signed or vouching.policy()) != "require":
        return None
    return vouching.refusal(manifest, lambda digest, signer: marks.get((digest, signer)))


def find(store: Store, manifest: Manifest) -> Entry | None:
    """Return the whole entry of that build that *store* has and would serve, or None."""
    for entry in store.lookup(manifest.arch, manifest.kernel, manifest.problem_digest).entries:
        if entry.key == manifest.build_digest:
            try:
                store.vouch(entry)
                entry.verify()
                return entry
            except Damaged:
                continue
    return None


def keep_signatures(store: Store, manifest: Manifest, marks: Marks) -> None:
    """Put those of *marks* that are signatures of the entry beside it. Raises CacheError."""
    for (digest, signer), made in marks.items():
        if digest == manifest.sha256 and store.signature(digest, signer) is None:
            signature.write(store, digest, signer, made)


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
