from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from cache_help import ARCH, BUILD, GENERAL, MEMBERS, PROBLEM, make_manifest, publish

from tlhub.cache.chain import Chain, Host, Wanted, refuse, this_host, uncovered
from tlhub.cache.store import Store
from tlhub.specs import Problem

pytestmark = pytest.mark.light

HOST = this_host()._replace(abi="1")


def want(**changes: Any) -> Wanted:
    base = Wanted(
        BUILD["schedule"],
        BUILD["schedule_revision"],
        BUILD["source_digest"],
        BUILD["config"],
        (PROBLEM, GENERAL),
        BUILD["toolchain"],
    )
    return base._replace(**changes)


def find(*stores: Store, wanted: tuple[Wanted, ...] = (want(),), **kwargs: Any) -> Any:
    return Chain(stores, kwargs.pop("host", HOST), kwargs.pop("match", None)).find(ARCH, wanted)


def test_nothing_anywhere(store: Store) -> None:
    hit, trace = find(store, Store("memory", None))
    assert hit is None
    assert [(step.store, step.problem, step.match) for step in trace] == [
        ("user", PROBLEM, None),
        ("user", GENERAL, None),
        ("memory", PROBLEM, None),
        ("memory", GENERAL, None),
    ]
    assert all(step.reasons == () for step in trace)


MATCHES = {
    "exact": want(),
    "compatible": want(toolchain={"apache-tvm": "0.27.0"}),
    "compatible, toolchain unknown": want(toolchain=None),
    "revision": want(source_digest="6" * 64),
    "revision, other config": want(config={"tile": 32}),
    "revision, True is not 1": want(config={**BUILD["config"], "pack": 1}),
    "none, revision": want(revision=4),
    "none, schedule": want(schedule="other"),
}


@pytest.mark.parametrize("case", MATCHES)
def test_kinds_of_match(store: Store, case: str) -> None:
    entry = publish(store)
    hit, trace = find(store, wanted=(MATCHES[case],))
    kind = case.partition(",")[0]
    if kind == "none":
        assert hit is None
        assert ("wanted is 4" in " ".join(trace[0].reasons)) == (case == "none, revision")
    else:
        assert (hit.match, hit.index, hit.problem, hit.origin) == (kind, 0, PROBLEM, "cache")
        assert hit.entry.folder == entry.folder and hit.store is store
        assert hit.entry.read("kernel.so") == MEMBERS["kernel.so"]
        assert trace[-1].match == kind


@pytest.mark.parametrize("loosest", ["exact", "compatible", "revision"])
@pytest.mark.parametrize("kind", ["exact", "compatible", "revision"])
@pytest.mark.parametrize("who", ["plugin", "user", "store"])
def test_the_loosest_match_that_serves(tmp_path: Path, kind: str, loosest: str, who: str) -> None:
    store = Store("user", tmp_path / "root", match=loosest if who == "store" else "revision")
    publish(store)
    wanted = MATCHES[kind]._replace(match=loosest if who == "plugin" else "revision")
    hit, trace = find(store, wanted=(wanted,), match=loosest if who == "user" else None)
    order = ["exact", "compatible", "revision"]
    if order.index(kind) <= order.index(loosest):
        assert hit.match == kind
    else:
        assert hit is None
        assert f"it is a {kind} match, and only {loosest} ones serve" in trace[0].reasons[0]


def test_what_the_user_said_takes_the_place_of_the_plugins_wish(store: Store) -> None:
    publish(store)
    edited = MATCHES["revision"]._replace(match="compatible")
    assert find(store, wanted=(edited,))[0] is None
    assert find(store, wanted=(edited,), match="revision")[0].match == "revision"


def test_the_best_of_several_entries(store: Store) -> None:
    publish(store, make_manifest(source_digest="6" * 64))
    old = publish(store, make_manifest(toolchain={"tvm": "1"}, provenance={"created": "2026-01-01T00:00:00Z"}))
    new = publish(store, make_manifest(toolchain={"tvm": "2"}, provenance={"created": "2026-02-01T00:00:00Z"}))
    hit, _ = find(store, wanted=(want(toolchain=None),))
    assert (hit.match, hit.entry.folder) == ("compatible", new.folder)
    hit, _ = find(store, wanted=(want(toolchain={"tvm": "1"}),))
    assert (hit.match, hit.entry.folder) == ("exact", old.folder)


def test_a_damaged_best_one_leaves_the_next(store: Store) -> None:
    best = publish(store)
    publish(store, make_manifest(source_digest="6" * 64))
    (Path(str(best.folder)) / "kernel.so").write_bytes(b"")
    hit, trace = find(store)
    assert hit.match == "revision"
    assert any("torn" in reason for reason in trace[0].reasons)
    assert Path(str(best.folder)).exists(), "readers delete nothing"


def test_the_order_is_stores_then_candidates_then_problems(tmp_path: Path) -> None:
    first, second = (Store(name, tmp_path / name, origin=name) for name in ("first", "second"))
    other = want(schedule="other")
    publish(first, make_manifest(GENERAL, schedule="other"))
    publish(second)
    hit, trace = find(first, second, wanted=(want(), other))
    assert (hit.store.name, hit.index, hit.problem, hit.origin) == ("first", 1, GENERAL, "first")
    assert [(s.store, s.schedule, s.problem) for s in trace] == [
        ("first", "gemm.cpu", PROBLEM),
        ("first", "gemm.cpu", GENERAL),
        ("first", "other", PROBLEM),
        ("first", "other", GENERAL),
    ]
    publish(first, make_manifest(PROBLEM, schedule="other"))
    assert find(first, wanted=(want(), other))[0].problem == PROBLEM
    publish(first, make_manifest(GENERAL))
    assert find(first, wanted=(want(), other))[0].index == 0


def test_what_was_kept_in_memory_is_found_and_called_so(store: Store) -> None:
    memory = Store("user", None)
    publish(memory)
    hit, _ = find(memory)
    assert hit.origin == "memory" and hit.entry.read("kernel.so") == MEMBERS["kernel.so"]


PLATFORM = {"os": "linux", "machine": "x86_64", "glibc": "2.17"}
LINUX = Host("linux", "x86_64", "2.36", "1", 580, 101376)


@pytest.mark.parametrize(
    ("changes", "host", "says"),
    [
        ({}, LINUX, None),
        ({"abi": "2"}, LINUX, "tvm-ffi ABI 2, here is 1"),
        ({"abi": "2"}, LINUX._replace(abi=""), None),
        ({}, LINUX._replace(os="darwin"), "for linux x86_64, here is darwin x86_64"),
        ({}, LINUX._replace(machine="aarch64"), "here is linux aarch64"),
        ({"platform": {**PLATFORM, "glibc": "2.36"}}, LINUX, None),
        ({"platform": {**PLATFORM, "glibc": "2.37"}}, LINUX, "needs glibc 2.37, here is 2.36"),
        ({"platform": {**PLATFORM, "glibc": "2.4"}}, LINUX, None),
        ({"platform": {**PLATFORM, "glibc": "3.0"}}, LINUX, "needs glibc 3.0"),
        ({}, LINUX._replace(glibc=""), "another libc"),
        ({"platform": {**PLATFORM, "glibc": ""}}, LINUX._replace(glibc=""), None),
        ({"least_driver": 580}, LINUX, None),
        ({"least_driver": 590}, LINUX, "driver 590, here is 580"),
        ({"least_driver": 590}, LINUX._replace(driver=0), None),
        ({"resources": {"shared_memory": 101376}}, LINUX, None),
        (
            {"resources": {"registers": 168, "shared_memory": 101377}},
            LINUX,
            "it needs 101377 bytes of shared memory a block, the device has 101376",
        ),
        ({"resources": {"shared_memory": 232448}}, LINUX._replace(shared_memory=0), None),
        ({"resources": {"shared_memory": "much"}}, LINUX, None),
    ],
)
def test_foreign_entries(changes: dict[str, Any], host: Host, says: str | None) -> None:
    reason = refuse(make_manifest(**{"platform": PLATFORM, **changes}), host)
    assert reason is None if says is None else reason is not None and says in reason


def test_a_foreign_entry_is_a_miss_with_its_reason(store: Store) -> None:
    publish(store)
    hit, trace = find(store, host=HOST._replace(abi="99"))
    assert hit is None and "tvm-ffi ABI 1, here is 99" in trace[0].reasons[0]


def test_an_entry_for_another_machine_is_found_for_that_machine(store: Store) -> None:
    publish(store, make_manifest(platform={"os": "other", "machine": "riscv64", "glibc": "9.9"}, least_driver=9999))
    assert find(store)[0] is None
    hit, _ = Chain([store], HOST).find(ARCH, [want()], here=False)
    assert hit is not None and hit.match == "exact"


def test_this_host_is_named_as_manifests_name_it() -> None:
    host = this_host()
    assert host.machine not in ("amd64", "arm64") and host.machine == host.machine.lower()
    assert host.glibc == "" or all(part.isdigit() for part in host.glibc.split("."))


def test_hosts_are_named_as_the_tags_of_wheels_name_them() -> None:
    host = Host.named("manylinux_2_28_aarch64")
    assert host == Host("linux", "aarch64", "2.28") and host.platform == "manylinux_2_28_aarch64"
    assert (
        Host("linux", "x86_64").platform == "linux x86_64" and Host("darwin", "arm64", "2.28").platform[:6] == "darwin"
    )


def with_m(extent: int | str) -> Problem:
    return dataclasses.replace(PROBLEM, dims=tuple((n, extent if n == "M" else e) for n, e in PROBLEM.dims))


@pytest.mark.parametrize(
    ("covers", "extent", "says"),
    [
        ({}, 0, None),
        ({"M": {}}, "?0", None),
        ({"M": {"min": 8, "max": 64, "multiple": 8}}, 8, None),
        ({"M": {"min": 8, "max": 64, "multiple": 8}}, 64, None),
        ({"M": {"min": 8, "max": 64, "multiple": 8}}, 7, "M from 8 to 64, multiples of 8, not 7"),
        ({"M": {"min": 8, "max": 64, "multiple": 8}}, 65, "not 65"),
        ({"M": {"min": 8, "max": 64, "multiple": 8}}, 12, "not 12"),
        ({"M": {"min": 1}}, 0, "M from 1, not 0"),
        ({"M": {"max": 64}}, "?0", "M from 0 to 64, not every M"),
        ({"M": {"multiple": 8}}, "?0", "not every M"),
    ],
)
def test_covers(covers: dict[str, dict[str, int]], extent: int | str, says: str | None) -> None:
    reason = uncovered(make_manifest(GENERAL, covers=covers), with_m(extent))
    assert reason is None if says is None else reason is not None and says in reason


def test_the_entry_that_covers_is_taken(store: Store) -> None:
    small = publish(store, make_manifest(GENERAL, covers={"M": {"max": 32}}, toolchain={"tvm": "1"}))
    large = publish(store, make_manifest(GENERAL, covers={"M": {"min": 33}}, toolchain={"tvm": "2"}))
    for extent, entry in ((32, small), (33, large)):
        hit, _ = find(store, wanted=(want(problems=(with_m(extent), GENERAL)),))
        assert hit.entry.folder == entry.folder
    hit, trace = find(store, wanted=(want(problems=(GENERAL,)),))
    assert hit is None and len(trace[0].reasons) == 2


def test_an_entry_for_every_extent_has_the_config_of_its_own_problem(store: Store) -> None:
    """What was built for a symbolic dim serves a concrete one, though that would get another config."""
    asked = want(general=lambda problem: {"tile": 16} if problem is GENERAL else None)
    publish(store, make_manifest(GENERAL, config={"tile": 4}))
    assert find(store, wanted=(asked,))[0].match == "revision"
    general = publish(store, make_manifest(GENERAL, config={"tile": 16}))
    publish(store, make_manifest(GENERAL, config={"tile": 8}))
    hit, _ = find(store, wanted=(asked,))
    assert (hit.match, hit.entry.folder) == ("exact", general.folder)
    own = publish(store, make_manifest(GENERAL))
    assert find(store, wanted=(asked,))[0].entry.folder == own.folder, "its own config is the better one"


def test_the_nearest_entry_and_its_differences(store: Store, tmp_path: Path) -> None:
    chain = Chain([store], HOST)
    assert chain.nearest(ARCH, [want()]) is None
    publish(store, make_manifest(dataclasses.replace(PROBLEM, kernel="attention")))
    assert chain.nearest(ARCH, [want()]) is None
    publish(store, make_manifest(arch="cpu:x86-64-v4", schedule_revision=9, abi="7"))
    near = chain.nearest(ARCH, [want()])
    assert near is not None and near.differs == {"arch": ("cpu:x86-64-v4", ARCH), "schedule_revision": (9, 3)}
    entry = publish(store, make_manifest(with_m(128)))
    near = chain.nearest(ARCH, [want(problems=(PROBLEM,))])
    assert near is not None and near.differs == {"dims.M": (128, 64)}
    assert near.store == "user" and f"{store.root}/{near.folder}" == entry.folder
    near = chain.nearest(ARCH, [want(problems=(with_m(128),), config={**BUILD["config"], "pack": 1}, toolchain={})])
    assert near is not None
    assert near.differs == {
        "config.pack": (True, 1),
        "toolchain.apache-tvm": ("0.25.0.post1", None),
        "toolchain.cc": ("gcc 12.2.0", None),
    }
    assert json.loads(json.dumps(near.differs))


def test_finding_is_no_use(store: Store) -> None:
    """Who serves a hit notes its use; who only explains must not keep it from being pruned."""
    import os

    folder = publish(store).folder
    os.utime(f"{folder}/entry.json", (1e9, 1e9))
    hit, _ = find(store)
    assert os.stat(f"{folder}/entry.json").st_mtime == 1e9
    store.touch(hit.entry, 2e9)
    assert os.stat(f"{folder}/entry.json").st_mtime == 2e9
