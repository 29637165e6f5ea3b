"""`python -m mpx`: the command line."""

from mpx.tools.cli.main import main

if __name__ == "__main__":
    main()
