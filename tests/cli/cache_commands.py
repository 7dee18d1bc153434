"""What the tests of the cache commands share."""

KINDS = ("float32", "float64")


def entries(tlhub):
    return tlhub("cache", "ls", "--json").json["entries"]


def libraries(store):
    return sorted(store.glob("v1/*/*/*/*/kernel.so"))
