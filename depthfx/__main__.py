"""``python -m depthfx``."""

from depthfx.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
