"""Artifacts: what stands under a tag of a registry, an OCI image manifest with one or more layers for each arch. Pure.

Whoever pushes adds layers and takes none away, so that two who push at once can be merged: the union is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from tlhub.cache.manifest import Damaged
from tlhub.remote.layer import LARGEST_FRONT, sha256

MEDIA_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.tlhub.store.v1"
LAYER_TYPE = "application/vnd.tlhub.entries.v1.tar"
EMPTY = b"{}"
"""The config, which an image manifest must have: there is nothing to say in it."""

LARGEST = 4 << 20
MOST_LAYERS = 4096
_LARGEST_LAYER = 1 << 40
_ARCH = re.compile(r"[a-z0-9_]{1,32}:[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,10}")


class Layer(NamedTuple):
    """A blob with entries for one arch: its digest and size, and those of its front."""

    arch: str
    digest: str
    size: int
    front_digest: str
    front_size: int


def document(layers: Iterable[Layer]) -> bytes:
    """Return the manifest that lists *layers*: the same bytes for the same layers."""
    listed = [
        {
            "mediaType": LAYER_TYPE,
            "digest": layer.digest,
            "size": layer.size,
            "annotations": {
                "tlhub.arch": layer.arch,
                "tlhub.front.digest": layer.front_digest,
                "tlhub.front.size": str(layer.front_size),
            },
        }
        for layer in sorted(set(layers))
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MEDIA_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(EMPTY), "size": len(EMPTY)},
        "layers": listed,
    }
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def parse(data: bytes) -> tuple[Layer, ...]:
    """Return the layers that a manifest lists; those of other tools are passed over. Raises Damaged."""
    if len(data) > LARGEST:
        raise Damaged(f"the manifest is larger than {LARGEST} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the manifest is no JSON: {error}") from error
    if type(found) is not dict or found.get("artifactType") != ARTIFACT_TYPE:
        shown = found.get("artifactType") if type(found) is dict else None
        raise Damaged(f"it is no store of tlhub's: its artifactType is {shown!r}, not {ARTIFACT_TYPE!r}")
    listed = found.get("layers")
    if type(listed) is not list or len(listed) > MOST_LAYERS:
        raise Damaged(f"the manifest has no list of at most {MOST_LAYERS} layers")
    return tuple(_layer(item) for item in listed if type(item) is not dict or item.get("mediaType") == LAYER_TYPE)


def _layer(found: Any) -> Layer:
    if type(found) is not dict or type(found.get("annotations")) is not dict:
        raise Damaged("a layer is no mapping with annotations")
    notes = found["annotations"]
    arch, digest, front = _text(notes, "tlhub.arch", _ARCH), _text(found, "digest", _DIGEST), "tlhub.front"
    size, front_size = found.get("size"), int(_text(notes, f"{front}.size", _NUMBER))
    if type(size) is not int or not front_size < size <= _LARGEST_LAYER or front_size > LARGEST_FRONT:
        raise Damaged(f"layer {digest} has size {size!r} and a front of {front_size}")
    return Layer(arch, digest, size, _text(notes, f"{front}.digest", _DIGEST), front_size)


def _text(found: dict[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = found.get(name)
    if type(value) is not str or not form.fullmatch(value):
        raise Damaged(f"a layer has {name} {value!r}")
    return value
