"""``trust``: whose signatures count, signing entries, and who signed what."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, Group, json_option
from tlhub.cli.entries import (
    arch_option,
    check_kernel,
    count_entries,
    full_arch,
    items_of,
    kernel_option,
    name_of,
    root_of,
    sound,
    user_store,
)

if TYPE_CHECKING:
    from tlhub.cache.manifest import Manifest
    from tlhub.cache.store import Item, Store

_store_option = click.option("--store", metavar="FOLDER", help="The entries of this store, instead of the cache.")


@click.group(cls=Group)
def trust() -> None:
    """Say whose signatures of entries count, and sign entries."""


@trust.command(cls=Command)
@click.argument("name")
@click.argument("file")
def add(name: str, file: str) -> None:
    """Trust the public key in FILE (PEM, Ed25519) and call it NAME."""
    from tlhub.cache import keyring

    key = keyring.trust_key(name, file)
    output.note(f"signatures by {key.name} ({key.id}) count from now on")


@trust.command(cls=Command)
@json_option
def ls(as_json: bool) -> None:
    """List the keys that are trusted."""
    from tlhub.cache import home, keyring, vouching

    found, policy = list(keyring.trusted().values()), vouching.policy()
    if as_json:
        listed = [{"name": key.name, "id": key.id} for key in found]
        output.write_json({"path": home.config("trusted"), "policy": policy, "keys": listed})
        return
    output.table(["name", "key"], [(key.name, key.id) for key in found], whole=["key"])
    output.note(f"policy where a store has none of its own: {policy}")


@trust.command(cls=Command)
@click.argument("name")
def rm(name: str) -> None:
    """Trust the key NAME no longer."""
    from tlhub.cache import keyring

    key = keyring.distrust(name)
    output.note(f"signatures by {key.name} ({key.id}) count no longer")


@trust.command(cls=Command)
@click.argument("name")
def keygen(name: str) -> None:
    """Make a pair of keys to sign with: NAME.key, which nobody else can read, and NAME.pub to hand out."""
    from tlhub.cache import keyring

    private, public = keyring.generate(name)
    output.write_path(public)
    output.note(f"the private key is {private}, not encrypted\nnext:\n  tlhub trust add {name} {shlex.quote(public)}")


@trust.command(cls=Command)
@click.option("--key", required=True, metavar="NAME", help="A key of `trust keygen`, or a file with a private key.")
@_store_option
@kernel_option
@arch_option
@json_option
def sign(key: str, store: str | None, kernel: str | None, arch: str | None, as_json: bool) -> None:
    """Sign entries, each of which is read and hashed first; exits with 1 where one is damaged."""
    from tlhub.cache import keyring, signature

    signer, where = keyring.signer(key), _store(store)
    entries, refused = sound(where, _meant(where, kernel, arch))
    for entry in entries:
        signature.write(where, entry.manifest.sha256, signer.id, signer.sign(entry.manifest))
    if as_json:
        damaged = [{"entry": folder, "reason": reason} for folder, reason in refused]
        output.write_json({"path": where.root, "key": signer.id, "signed": len(entries), "damaged": damaged})
    else:
        output.write(f"{len(entries)} signed by {signer.id} in {where.root}, {len(refused)} damaged")
        for folder, reason in refused:
            output.note(f"not signed: {folder}: {reason}")
    if refused:
        sys.exit(FOUND_PROBLEMS)


@trust.command(cls=Command)
@_store_option
@kernel_option
@arch_option
@json_option
def check(store: str | None, kernel: str | None, arch: str | None, as_json: bool) -> None:
    """Say who vouches for each entry; exits with 1 where nobody does whom you trust."""
    from tlhub.cache import vouching

    where = _store(store)
    found: list[tuple[Item, Manifest, str | None]] = []
    for item in _meant(where, kernel, arch):
        if item.manifest is not None:  # a damaged one is never served
            found.append((item, item.manifest, vouching.voucher(item.manifest, where.signature)))
    if as_json:
        entries = [{"entry": i.folder, "key": m.build_digest, "vouched_for_by": who} for i, m, who in found]
        output.write_json({"path": where.root, "entries": entries})
    else:
        rows = [(name_of(i), m.kernel, m.arch, who or "nobody") for i, m, who in found]
        output.table(["entry", "kernel", "arch", "vouched for by"], rows, whole=["entry"])
    unsigned = sum(who is None for _, _, who in found)
    output.note(f"{count_entries(len(found))} in {where.root}; nobody whom you trust vouches for {unsigned}")
    if unsigned:
        sys.exit(FOUND_PROBLEMS)


def _store(named: str | None) -> Store:
    if named is None:
        root_of(user_store())
        return user_store()
    from tlhub.cache.store import Store

    store = Store(named, os.path.abspath(os.path.expanduser(named)), "site")
    store.check_readable()
    return store


def _meant(store: Store, kernel: str | None, arch: str | None) -> list[Item]:
    from tlhub.cache.prune import meant

    items, place = items_of(store), full_arch(arch)
    check_kernel(kernel, items)
    return [item for item in items if meant(item, place, kernel)]
