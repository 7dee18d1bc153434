"""``python -m tlhub``: the command line, where its script is not on the PATH."""

from __future__ import annotations

from tlhub.cli import main

if __name__ == "__main__":
    main()
