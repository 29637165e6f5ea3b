"""`python -m mpx`: the command line."""

from mpx_cli import main

if __name__ == "__main__":
    main()
