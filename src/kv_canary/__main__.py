"""`python -m kv_canary`, the same as `kv-canary`."""

from kv_canary.cli import main

if __name__ == "__main__":
    main()
