"""Device code, and what its launches share."""
