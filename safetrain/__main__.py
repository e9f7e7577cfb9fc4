"""`python -m safetrain` is the same program as `safetrain`."""

from .cli.main import main

if __name__ == "__main__":
    main()
