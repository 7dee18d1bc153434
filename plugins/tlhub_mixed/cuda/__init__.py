"""Device code of mixed precision, and what its launches share."""
