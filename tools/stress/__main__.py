"""`python -m tools.stress`."""

from tools.stress.attack import main

if __name__ == "__main__":
    raise SystemExit(main())
