"""Packages: what a workload needs, carried as an archive or as a wheel that pip installs."""
