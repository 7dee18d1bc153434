"""Building: worker processes, front ends, the host shim and the checks on what is published."""
