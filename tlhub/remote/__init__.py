"""Remote stores: entries in an OCI registry, pushed, pulled, and read one at a time by lookups."""
